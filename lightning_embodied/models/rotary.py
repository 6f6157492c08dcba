"""Rotary positions (RoPE, arXiv:2104.09864) as Gemma and Qwen pair dimensions: `i` with `i + head_dim / 2`.

No buffers, so that a network made on the meta device misses none when its weights are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each float32 `[T, 1, head_dim / 2]`."""


def rotation_of(position_ids: Tensor, head_dim: int, base: float = 10_000.0) -> Rotation:
    """Rotations of positions `[T]`; `base` is that of the wave lengths."""
    steps = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32)
    angles = position_ids.float()[:, None, None] * base ** (-steps / head_dim)
    return angles.cos(), angles.sin()


def rotate_halves(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates queries or keys `[T, heads, head_dim]`, in float32 or wider."""
    (cos, sin), (first, second) = rotation, x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
