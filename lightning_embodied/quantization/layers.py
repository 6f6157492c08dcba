"""Layers whose weight is stored in eight bits: the class they had, with codes and scales in place of the weight.

`layer.weight` is still there, computed when it is read, so everything that worked with the layer does. A linear layer
whose activations were calibrated casts its input to FP8 as well; on GPUs with FP8 cores it then multiplies there, and
elsewhere it computes the same numbers in the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_embodied.quantization.formats import WeightFormat, dequantize, quantize

_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max
_FP8_CORES = (8, 9)  # compute capability: Ada, Hopper, Thor
_MULTIPLE = 16  # of both sides of a weight, for the kernels


class QuantizedLayer(nn.Module):
    """What quantised layers share; made by `quantize_layer` out of an existing layer, never constructed.

    Attributes:
        codes: Shaped like the weight.
        weight_scale: float32; see `WeightFormat.scale_shape`.
    """

    codes: Tensor
    weight_scale: Tensor
    like: Tensor

    @property
    def weight(self) -> Tensor:
        """The weight that the codes stand for, in the dtype that the module is in."""
        return dequantize(self.codes, self.weight_scale).to(self.like.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLayer:
        """Follows the module to another device; to another dtype, codes and scales do not follow."""

        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            stays = tensor is not self.like and not isinstance(tensor, nn.Parameter)
            return tensor.to(moved.device) if stays and moved.dtype != tensor.dtype else moved

        super()._apply(keep, recurse)  # type: ignore[no-untyped-call]
        return self


class QuantizedLinear(QuantizedLayer, nn.Linear):  # type: ignore[override]  # the weight is computed
    """`nn.Linear` with a quantised weight.

    Attributes:
        input_scale: float32 scalar that inputs are divided by before they are cast to E4M3, or None: they are not cast.
    """

    input_scale: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`, of the dtype that `nn.Linear` would return."""
        if self.input_scale is None or not input.numel():
            return F.linear(input, self.weight, self.bias)
        codes = (input.float() / self.input_scale).clamp(-_LARGEST, _LARGEST).to(_E4M3)
        if self._has_kernel():
            output = scaled_product(codes.flatten(0, -2), self.codes, self.input_scale, self.weight_scale)
            output = output.to(input.dtype).view(*input.shape[:-1], self.out_features)
            return output if self.bias is None else output + self.bias
        return F.linear((codes.float() * self.input_scale).to(input.dtype), self.weight, self.bias)

    def _has_kernel(self) -> bool:
        rows, columns = self.codes.shape
        aligned = rows % _MULTIPLE == 0 and columns % _MULTIPLE == 0
        whole = self.weight_scale.shape in ((1, 1), (rows, 1)) and self.codes.dtype == _E4M3
        device = self.codes.device
        return whole and aligned and device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CORES


class QuantizedEmbedding(QuantizedLayer, nn.Embedding):  # type: ignore[override]
    """`nn.Embedding` with a quantised table."""


class QuantizedConv2d(QuantizedLayer, nn.Conv2d):  # type: ignore[override]
    """`nn.Conv2d` with a quantised kernel; an output channel is a row."""


QUANTIZED: dict[type[nn.Module], type[QuantizedLayer]] = {
    nn.Linear: QuantizedLinear,
    nn.Embedding: QuantizedEmbedding,
    nn.Conv2d: QuantizedConv2d,
}
"""Classes of layers that can be quantised, and what they become. Subclasses have their own ways and are left alone."""


def quantize_layer(layer: nn.Module, kind: WeightFormat) -> None:
    """Quantises the weight of a layer, in place.

    Args:
        layer: Of a class in `QUANTIZED`.
        kind: The format.

    Raises:
        ConfigError: The weight is not finite.
    """
    weight = cast(Tensor, layer.weight)
    _become_quantized(layer, *quantize(weight, kind), dtype=weight.dtype)


def empty_layer(layer: nn.Module, kind: WeightFormat, *, input_scale: bool) -> None:
    """Makes a layer one whose codes and scales are yet to be loaded, in place; they are on the meta device until then.

    Args:
        layer: Of a class in `QUANTIZED`.
        kind: The format.
        input_scale: Whether its activations were calibrated.
    """
    weight = cast(Tensor, layer.weight)
    codes = torch.empty(weight.shape, dtype=kind.dtype, device="meta")
    scale = torch.empty(kind.scale_shape(*weight.flatten(1).shape), device="meta")
    _become_quantized(layer, codes, scale, dtype=weight.dtype)
    if input_scale:
        layer.input_scale = torch.empty((), device="meta")


def quantized_layers(module: nn.Module) -> dict[str, QuantizedLayer]:
    """The quantised layers of a module by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, QuantizedLayer)}


def scaled_product(codes: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """`codes @ weight.t()` on FP8 cores, accumulated in float32.

    Args:
        codes: E4M3 `[M, K]`.
        weight: E4M3 `[N, K]`.
        input_scale: float32 scalar.
        weight_scale: float32 `[N, 1]` or `[1, 1]`.

    Returns:
        bfloat16 `[M, N]`.
    """
    if weight_scale.shape[0] == weight.shape[0]:
        scales = input_scale.repeat(codes.shape[0], 1), weight_scale.t().contiguous()
    else:
        scales = input_scale.view(1), weight_scale.view(1)
    return torch._scaled_mm(codes, weight.t(), *scales, out_dtype=torch.bfloat16)


def _become_quantized(layer: nn.Module, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    del layer.weight
    layer.__class__ = QUANTIZED[type(layer)]
    layer.register_buffer("codes", codes)
    layer.register_buffer("weight_scale", scale)
    layer.register_buffer("like", torch.empty(0, dtype=dtype, device=codes.device), persistent=False)
    if isinstance(layer, QuantizedLinear):
        layer.register_buffer("input_scale", None)
