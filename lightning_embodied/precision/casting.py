"""Casts a matrix to FP8 with scales and back, in float32: what the tensor cores see, on any device.

Scales multiply: `fp8 = round(value * scale)` with `scale = largest / amax`, as torchao has it. They are computed in
float64, so that eager and compiled code agree. Values that are not finite stay so: a diverged run must show.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from lightning_embodied.precision.recipes import Cast

_SMALLEST_AMAX = 1e-12  # torchao's; rows of zeros stay zeros


def scale_of(amax: Tensor, cast: Cast) -> Tensor:
    """The scale that maps `amax` to the largest value of the format: float32, shaped like `amax`."""
    scale = (cast.largest / amax.double().clamp(min=_SMALLEST_AMAX)).float()
    return torch.exp2(torch.floor(torch.log2(scale))) if cast.rounding == "power_of_2" else scale


def quantized(x: Tensor, cast: Cast, axis: int, amax: Tensor | None = None) -> Tensor:
    """A matrix as the product sees it after the cast.

    Args:
        x: `[rows, columns]`, floating.
        cast: How it is cast.
        axis: The axis (0 or 1) that the product contracts.
        amax: What the largest value is taken to be, a scalar, if the scale is not to follow from `x`; larger values
            saturate.

    Returns:
        float32, shaped like `x`.
    """
    blocks, scale = _blocks_and_scale(x, cast, axis, amax)
    scaled = (blocks * scale).clamp(-cast.largest, cast.largest)
    rounded = torch.where(blocks.isfinite(), scaled.to(cast.dtype).float() / scale, blocks)
    return _unblocked(rounded, x)


def saturated_and_flushed(x: Tensor, cast: Cast, axis: int, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Shares of the nonzero values of `x` that the cast clips, and that it turns into zero.

    Args:
        x: As for `quantized`, like all other arguments.
        cast: How it is cast.
        axis: The contracted axis.
        amax: What the largest value is taken to be.

    Returns:
        Two scalars in [0, 1].
    """
    blocks, scale = _blocks_and_scale(x, cast, axis, amax)
    scaled = blocks * scale
    nonzero = blocks != 0
    count = nonzero.sum().clamp(min=1)
    clipped = scaled.abs() > cast.largest * (1 + 1e-4)  # the largest value itself may be off by rounding
    flushed = nonzero & (scaled.clamp(-cast.largest, cast.largest).to(cast.dtype).float() == 0)
    return clipped.sum() / count, flushed.sum() / count


def _blocks_and_scale(x: Tensor, cast: Cast, axis: int, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """`x` in float32, in blocks if they share scales, and the scales to multiply it with."""
    blocks = x.float() if cast.shared in ("tensor", "axis") else _blocked(x.float(), cast, axis)
    return blocks, scale_of(_amax(blocks, cast, axis) if amax is None else amax, cast)


def _amax(blocks: Tensor, cast: Cast, axis: int) -> Tensor:
    """Largest magnitudes, shaped to multiply `blocks` (those of `_blocked` for blocks and tiles)."""
    size = blocks.abs()
    if cast.shared == "tensor":
        return size.amax()
    if cast.shared == "axis":
        return size.amax(axis, keepdim=True)
    return size.amax((1, 3) if cast.shared == "tile" else 2 * axis + 1, keepdim=True)


def _blocked(x: Tensor, cast: Cast, axis: int) -> Tensor:
    """`[rows, columns]` to `[row blocks, rows of a block, column blocks, columns of a block]`, zeros at the edges."""
    tile = cast.shared == "tile"
    sizes = [cast.size if tile or axis == side else 1 for side in (0, 1)]
    rows, columns = x.shape
    padded = F.pad(x, (0, -columns % sizes[1], 0, -rows % sizes[0]))
    return padded.reshape(padded.shape[0] // sizes[0], sizes[0], padded.shape[1] // sizes[1], sizes[1])


def _unblocked(blocks: Tensor, like: Tensor) -> Tensor:
    if blocks.dim() == 2:
        return blocks
    return blocks.flatten(2, 3).flatten(0, 1)[: like.shape[0], : like.shape[1]]
