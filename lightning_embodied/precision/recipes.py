"""Recipes for FP8 training: how each operand of a linear layer's three matrix products is cast to eight bits.

Forward, input gradient and weight gradient contract over different axes, so each operand is cast once for each product
it enters. Sources: `tensorwise`, `rowwise` and `rowwise_with_gw_hp` are torchao's float8 recipes, `delayed` is
Transformer Engine's (arXiv:2209.05433), `blockwise` DeepSeek-V3's (arXiv:2412.19437, section 3.3) and `mxfp8` OCP's
microscaling (arXiv:2310.10537) with NVIDIA's rounding of scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from lightning_embodied.errors import ConfigError

RecipeName = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "mxfp8"]
Backend = Literal["torchao", "transformer_engine", "emulated"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Cast:
    """How one operand becomes FP8.

    Attributes:
        dtype: E4M3 (four bits of exponent, largest value 448) or E5M2 (five, 57344).
        shared: What shares one scale: the whole `tensor`, an `axis` (all values that one output sums over), a `block`
            of `size` values along that axis, or a `tile` of `size` x `size`.
        size: Of a block or tile.
        rounding: Scales as they come out, or rounded to the `power_of_2` below, which makes scaling itself exact.
    """

    dtype: torch.dtype = E4M3
    shared: Literal["tensor", "axis", "block", "tile"] = "tensor"
    size: int = 0
    rounding: Literal["exact", "power_of_2"] = "exact"

    @property
    def largest(self) -> float:
        """Largest finite value of the format."""
        return torch.finfo(self.dtype).max


@dataclass(frozen=True)
class Recipe:
    """The casts of the three matrix products.

    Attributes:
        output: Of input `[M, K]` and weight `[N, K]`, contracted over `K`.
        grad_input: Of output gradient `[M, N]` and weight, contracted over `N`.
        grad_weight: Of output gradient and input, contracted over `M`; None computes it in high precision.
        delayed: Scales follow from the largest values of earlier steps instead of the tensor at hand.
    """

    output: tuple[Cast, Cast]
    grad_input: tuple[Cast, Cast]
    grad_weight: tuple[Cast, Cast] | None
    delayed: bool = False


_TENSOR, _TENSOR_E5M2 = Cast(), Cast(E5M2)
_ROW = Cast(shared="axis", rounding="power_of_2")
_BLOCK, _TILE = (Cast(shared=shared, size=128, rounding="power_of_2") for shared in ("block", "tile"))
_MX = Cast(shared="block", size=32, rounding="power_of_2")
_E5M2_GRADIENTS = ((_TENSOR, _TENSOR), (_TENSOR_E5M2, _TENSOR), (_TENSOR_E5M2, _TENSOR))

RECIPES: dict[str, Recipe] = {
    "tensorwise": Recipe(*_E5M2_GRADIENTS),
    "rowwise": Recipe((_ROW, _ROW), (_ROW, _ROW), (_ROW, _ROW)),
    "rowwise_with_gw_hp": Recipe((_ROW, _ROW), (_ROW, Cast(rounding="power_of_2")), None),
    "delayed": Recipe(*_E5M2_GRADIENTS, delayed=True),
    "blockwise": Recipe((_BLOCK, _TILE), (_BLOCK, _TILE), (_BLOCK, _BLOCK)),
    "mxfp8": Recipe((_MX, _MX), (_MX, _MX), (_MX, _MX)),
}

BACKEND_RECIPES: dict[str, tuple[str, ...]] = {
    "torchao": ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"),
    "transformer_engine": ("tensorwise", "delayed", "blockwise", "mxfp8"),
    "emulated": get_args(RecipeName),
}
"""Which recipes each backend has kernels for outside its prototypes."""

_CAPABILITY = {"blockwise": (9, 0), "mxfp8": (10, 0)}
_LOWEST_CAPABILITY = (8, 9)


def check_combination(recipe: str, backend: str) -> None:
    """Raises `ConfigError` unless the backend knows the recipe; names what does."""
    for name, value, known in (("recipe", recipe, tuple(RECIPES)), ("backend", backend, tuple(BACKEND_RECIPES))):
        if value not in known:
            raise ConfigError(f"no such {name}", where=f"FP8Precision.{name}", found=value, expected=", ".join(known))
    if recipe not in BACKEND_RECIPES[backend]:
        others = [other for other, recipes in BACKEND_RECIPES.items() if recipe in recipes]
        raise ConfigError(
            f"the backend {backend!r} has no recipe {recipe!r}",
            where="FP8Precision",
            expected=f"one of {', '.join(BACKEND_RECIPES[backend])}",
            mend=f"choose one of them, or backend: {' or '.join(others)}",
        )


def check_device(recipe: str, backend: str, device: torch.device) -> None:
    """Raises `ConfigError` if the device cannot multiply FP8 with the recipe and backend."""
    if backend == "emulated" or (backend == "torchao" and device.type == "cpu"):
        return
    needed = _CAPABILITY.get(recipe, _LOWEST_CAPABILITY)
    found = str(device)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= needed:
            return
        found = f"{torch.cuda.get_device_name(device)}, capability {capability[0]}.{capability[1]}"
    raise ConfigError(
        f"this device cannot run the FP8 recipe {recipe!r} with {backend}",
        where="FP8Precision",
        found=found,
        expected=f"a CUDA device of compute capability {needed[0]}.{needed[1]} or more",
        mend="choose another recipe, or backend: emulated, which computes the same numbers slowly on any device",
    )


def alignment(recipe: str, backend: str) -> int:
    """What rows and features must be multiples of: the kernels take nothing else. Rows are padded, features are not."""
    return {"blockwise": 128, "mxfp8": 32}.get(recipe, 16) if backend == "transformer_engine" else 16
