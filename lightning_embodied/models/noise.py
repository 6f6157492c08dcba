"""Noise from which action chunks are sampled: from a seed, from one generator, or from one a row.

A generator a row makes a row independent of its neighbours, whatever batch it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_embodied.errors import ConfigError

Generators = torch.Generator | Sequence[torch.Generator]
"""Source of sampling noise: one for a batch, or one a row."""


def draw_noise(rows: int, shape: tuple[int, ...], generator: Generators | None, seed: int | None) -> Tensor:
    """Standard normal noise, drawn on the CPU or the generator's device.

    Args:
        rows: Number of rows.
        shape: Of one row.
        generator: Source of the noise.
        seed: Without a generator: of the noise that every row then is the same of; None draws from the random state.

    Returns:
        float32 `[rows, *shape]`.

    Raises:
        ConfigError: There are more or fewer generators than rows.
    """
    draw = partial(torch.randn, dtype=torch.float32)  # the default dtype is another one while Lightning trains
    if isinstance(generator, Sequence):
        if len(generator) != rows:
            found = f"{len(generator)} generators"
            raise ConfigError("one generator a row is needed", where="generator", found=found, expected=rows)
        return torch.stack([draw(shape, generator=one, device=one.device) for one in generator])
    if generator is not None:
        return draw(rows, *shape, generator=generator, device=generator.device)
    if seed is not None:
        return draw(1, *shape, generator=torch.Generator().manual_seed(seed)).expand(rows, *shape)
    return draw(rows, *shape)
