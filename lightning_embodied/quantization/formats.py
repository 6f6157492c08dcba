"""Weights as eight-bit codes with scales: FP8 E4M3 in blocks, rows or whole tensors, and int8 in rows.

`value = code * scale`. One scale serves 128 x 128 values (arXiv:2412.19437, section 3.3), an output row, or all. Fewer
values a scale serves, fewer an outlier can spoil. E4M3 keeps three bits of mantissa whatever the size of a value, int8
keeps steps of one size: on weights, which have few outliers in a row, int8 is the more accurate of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_embodied.errors import ConfigError

FormatName = Literal["fp8_block", "fp8_row", "fp8_tensor", "int8_row"]
Shared = Literal["block", "row", "tensor"]

BLOCK = 128
"""Side of a block."""

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class WeightFormat:
    """How a weight is stored.

    Attributes:
        name: Its name.
        dtype: Of the codes.
        shared: What shares one scale.
    """

    name: FormatName
    dtype: torch.dtype
    shared: Shared

    @property
    def largest(self) -> float:
        """Largest code; int8 leaves -128 unused, so that codes are symmetric."""
        return 127.0 if self.dtype == torch.int8 else torch.finfo(self.dtype).max

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a `[rows, columns]` weight."""
        if self.shared == "block":
            return -(-rows // BLOCK), -(-columns // BLOCK)
        return (rows, 1) if self.shared == "row" else (1, 1)


FORMATS: dict[str, WeightFormat] = {
    "fp8_block": WeightFormat("fp8_block", torch.float8_e4m3fn, "block"),
    "fp8_row": WeightFormat("fp8_row", torch.float8_e4m3fn, "row"),
    "fp8_tensor": WeightFormat("fp8_tensor", torch.float8_e4m3fn, "tensor"),
    "int8_row": WeightFormat("int8_row", torch.int8, "row"),
}


def format_of(name: str) -> WeightFormat:
    """The format of that name.

    Raises:
        ConfigError: There is none; names those there are.
    """
    if name not in FORMATS:
        raise ConfigError(
            "no such weight format", where="weights", found=name, expected=", ".join(get_args(FormatName))
        )
    return FORMATS[name]


def quantize(weight: Tensor, kind: WeightFormat) -> tuple[Tensor, Tensor]:
    """A weight as codes and scales.

    Args:
        weight: `[rows, ...]`, floating; all axes behind the first count as columns. Neither needs to be a multiple of
            the block, and either may be 0.
        kind: The format.

    Returns:
        Codes, shaped like the weight, and float32 scales, of `kind.scale_shape`. Zeros come back as zeros.

    Raises:
        ConfigError: The weight is no matrix, or a value is NaN or infinite in float32.
    """
    if weight.dim() < 2 or not weight.is_floating_point():
        raise ConfigError(
            "only matrices of real numbers can be quantised", found=f"{weight.dtype} {list(weight.shape)}"
        )
    matrix = weight.detach().float().flatten(1)
    if not bool(matrix.isfinite().all()):
        bad = int((~matrix.isfinite()).sum())
        raise ConfigError(
            "the weight holds values that are not finite",
            found=f"{bad} of {matrix.numel()} values are NaN or infinite",
            mend="take a checkpoint from before the run diverged",
        )
    scale = _scales(matrix, kind)
    scaled = (matrix / spread(scale, matrix.shape)).clamp(-kind.largest, kind.largest)
    codes = scaled.round() if kind.dtype == torch.int8 else scaled
    return codes.to(kind.dtype).view_as(weight), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """The weight that codes and scales stand for: float32, shaped like the codes."""
    return codes.float() * spread(scale, codes.flatten(1).shape).view(codes.shape)


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Scales as a matrix that multiplies a `shape`d weight: `[rows, columns]`."""
    rows, columns = shape
    if tuple(scale.shape) in ((1, 1), (rows, 1)):
        return scale.expand(rows, columns)
    blocks = scale[:, None, :, None].expand(-1, BLOCK, -1, BLOCK)
    return blocks.reshape(scale.shape[0] * BLOCK, scale.shape[1] * BLOCK)[:rows, :columns]


def relative_error(weight: Tensor, kind: WeightFormat) -> float:
    """Norm of what quantising changes over the norm of the weight; 0 for zeros."""
    exact = weight.detach().double()
    norm = float(exact.norm())
    return float((dequantize(*quantize(weight, kind)).double() - exact).norm()) / norm if norm else 0.0


def _scales(matrix: Tensor, kind: WeightFormat) -> Tensor:
    """Scales that map the largest magnitude to the largest code: 1 where there are only zeros, never subnormal."""
    rows, columns = matrix.shape
    shape = kind.scale_shape(rows, columns)
    if not matrix.numel():
        return matrix.new_ones(shape)
    if kind.shared == "block":
        padded = torch.nn.functional.pad(matrix, (0, -columns % BLOCK, 0, -rows % BLOCK))
        amax = padded.view(shape[0], BLOCK, shape[1], BLOCK).abs().amax((1, 3))
    else:
        amax = matrix.abs().amax(1, keepdim=True) if kind.shared == "row" else matrix.abs().amax().view(1, 1)
    # The largest scale whose product with the largest code is finite, so that no value comes back infinite.
    limit = torch.nextafter(matrix.new_tensor(torch.finfo(torch.float32).max / kind.largest), matrix.new_zeros(()))
    scale = (amax.double() / kind.largest).float().clamp(min=_TINY).minimum(limit)
    return torch.where(amax > 0, scale, torch.ones_like(scale))
