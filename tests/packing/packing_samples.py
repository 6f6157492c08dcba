"""Samples for the packing tests."""

from __future__ import annotations

from typing import Any

import torch


def make_sample(
    cameras: tuple[str, ...] = ("front",),
    task: str = "open the drawer",
    *,
    size: tuple[int, int] = (64, 64),
    seed: int = 0,
    **extra: Any,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    pictures = {
        f"observation.images.{name}": torch.randint(0, 256, (3, *size), generator=generator, dtype=torch.uint8)
        for name in cameras
    }
    return {
        **pictures,
        "observation.state": torch.randn(5, generator=generator),
        "action": torch.randn(8, 4, generator=generator),
        "action_is_pad": torch.arange(8) >= 6,
        "task": task,
        "episode_index": 3,
        "frame_index": seed,
        "timestamp": torch.tensor(0.1),
        "dataset": 0,
        **extra,
    }
