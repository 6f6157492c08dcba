"""The three matrix products of a linear layer in FP8: output, input gradient, weight gradient.

`EmulatedProducts` casts to FP8 and back and multiplies in float32: the numerics of the tensor cores on any device.
`TorchaoProducts` hands torchao's casts to torch's `_scaled_mm`, which runs on FP8 tensor cores and, for comparison, on
CPUs. Both are plain functions of tensors, so they can be traced, compiled and checked on fake CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_embodied.errors import import_extra
from lightning_embodied.precision.casting import quantized, scale_of
from lightning_embodied.precision.recipes import RECIPES, Cast, Recipe

INPUT, WEIGHT, GRAD = 0, 1, 2
"""Positions of the operands among the largest values that delayed scaling remembers."""

Amax = Sequence[Tensor] | None


class Products(Protocol):
    """Products of input `x` `[M, K]`, weight `w` `[N, K]` and output gradient `g` `[M, N]`.

    `amax` are scalars, the largest values of input, weight and gradient, when they do not follow from the tensors.
    """

    def output(self, x: Tensor, w: Tensor, amax: Amax) -> Tensor:
        """`x w'` `[M, N]`, of `x`'s dtype."""

    def grad_input(self, g: Tensor, w: Tensor, amax: Amax) -> Tensor:
        """`g w` `[M, K]`, of `g`'s dtype."""

    def grad_weight(self, g: Tensor, x: Tensor, amax: Amax) -> Tensor:
        """`g' x` `[N, K]`, floating."""


class EmulatedProducts:
    """Operands are cast to FP8 and back; products are computed in float32.

    Args:
        recipe: How operands are cast.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def output(self, x: Tensor, w: Tensor, amax: Amax) -> Tensor:
        """See `Products`."""
        of_input, of_weight = self._recipe.output
        left, right = quantized(x, of_input, 1, _pick(amax, INPUT)), quantized(w, of_weight, 1, _pick(amax, WEIGHT))
        return (left @ right.t()).to(x.dtype)

    def grad_input(self, g: Tensor, w: Tensor, amax: Amax) -> Tensor:
        """See `Products`."""
        of_grad, of_weight = self._recipe.grad_input
        left, right = quantized(g, of_grad, 1, _pick(amax, GRAD)), quantized(w, of_weight, 0, _pick(amax, WEIGHT))
        return (left @ right).to(g.dtype)

    def grad_weight(self, g: Tensor, x: Tensor, amax: Amax) -> Tensor:
        """See `Products`."""
        if self._recipe.grad_weight is None:
            return g.t() @ x
        of_grad, of_input = self._recipe.grad_weight
        left, right = quantized(g, of_grad, 0, _pick(amax, GRAD)), quantized(x, of_input, 0, _pick(amax, INPUT))
        return left.t() @ right


class TorchaoProducts:
    """Operands are torchao's FP8 tensors, products torch's `_scaled_mm`.

    The casts are torchao's own functions, so that its kernels and their workarounds come along. torchao calls them
    internal; a test compares results with its public `convert_to_float8_training`.

    Args:
        recipe: How operands are cast; per tensor or per axis.

    Raises:
        MissingExtraError: torchao is not installed.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        float8 = import_torchao()
        self._role = import_extra("torchao.float8.float8_training_tensor", "fp8").GemmInputRole
        self._tensor = import_extra("torchao.float8.float8_training_tensor", "fp8").hp_tensor_and_scale_to_float8
        self._config = import_extra("torchao.float8.float8_training_tensor", "fp8").LinearMMConfig()
        float8.convert_to_float8_training(torch.nn.Identity())  # applies torchao's fixes for compiled kernels

    def output(self, x: Tensor, w: Tensor, amax: Amax) -> Tensor:
        """See `Products`."""
        of_input, of_weight = self._recipe.output
        left = self._cast(x, of_input, 1, self._role.INPUT, _pick(amax, INPUT))
        right = self._cast(w.t(), of_weight, 0, self._role.WEIGHT, _pick(amax, WEIGHT))
        return torch.mm(left, right).to(x.dtype)

    def grad_input(self, g: Tensor, w: Tensor, amax: Amax) -> Tensor:
        """See `Products`."""
        of_grad, of_weight = self._recipe.grad_input
        left = self._cast(g, of_grad, 1, self._role.GRAD_OUTPUT, _pick(amax, GRAD))
        right = self._cast(w.t(), of_weight, 1, self._role.WEIGHT, _pick(amax, WEIGHT))
        return torch.mm(left, right.t()).to(g.dtype)

    def grad_weight(self, g: Tensor, x: Tensor, amax: Amax) -> Tensor:
        """See `Products`."""
        if self._recipe.grad_weight is None:
            return g.t() @ x
        of_grad, of_input = self._recipe.grad_weight
        left = self._cast(g, of_grad, 0, self._role.GRAD_OUTPUT, _pick(amax, GRAD))
        right = self._cast(x, of_input, 0, self._role.INPUT, _pick(amax, INPUT))
        return torch.mm(left.t(), right)

    def _cast(self, x: Tensor, cast: Cast, axis: int, role: Any, amax: Tensor | None) -> Tensor:  # noqa: ANN401
        """`x` as torchao's FP8 tensor; `axis` is the contracted one."""
        per_axis = cast.shared == "axis"
        if amax is None:
            amax = x.abs().amax(axis, keepdim=True) if per_axis else x.abs().amax()
        where = (-1 if axis else 0) if per_axis else None
        result: Tensor = self._tensor(x, scale_of(amax, cast), cast.dtype, self._config, role, where)
        return result


def import_torchao() -> Any:  # noqa: ANN401
    """`torchao.float8`, without what it logs about kernels that this machine cannot load.

    Raises:
        MissingExtraError: It is not installed.
    """
    import logging

    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    disabled = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        return import_extra("torchao.float8", "fp8")
    finally:
        for logger, before in zip(loggers, disabled, strict=True):
            logger.disabled = before


@cache
def products(recipe: str, backend: str) -> Products:
    """The products of a recipe.

    Args:
        recipe: Its name.
        backend: `emulated` or `torchao`.

    Raises:
        MissingExtraError: The backend is not installed.
    """
    return TorchaoProducts(RECIPES[recipe]) if backend == "torchao" else EmulatedProducts(RECIPES[recipe])


def _pick(amax: Amax, operand: int) -> Tensor | None:
    return None if amax is None else amax[operand]
