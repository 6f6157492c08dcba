"""Each FP8 layer's errors against high precision, measured while it computes.

A layer under observation computes its output and weight gradient a second time in float32 from the same operands, so
what is found is its own rounding, not that of the layers before it. Nothing is kept but sums: operands of the weight
gradient are those that autograd saves, recomputed where activations are. Costs two more products in the steps observed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_embodied.precision.casting import saturated_and_flushed
from lightning_embodied.precision.conversion import fp8_layers
from lightning_embodied.precision.linear import DelayedAmax, FP8Linear, Matmul
from lightning_embodied.precision.products import GRAD, INPUT, WEIGHT
from lightning_embodied.precision.recipes import RECIPES, Cast

OPERANDS = ("input", "weight", "grad")
"""Order of the values that `LayerHealth` has of each operand; `grad` is the gradient of the output."""


@dataclass(frozen=True)
class LayerHealth:
    """What FP8 costs one layer.

    Attributes:
        output_error: Norm of the output's error, relative to that of the output in high precision.
        weight_grad_error: The same for the gradient of the weight; None if it has none.
        amax: Largest magnitude of each operand.
        flushed: Share of the nonzero values of each operand that become zero: underflow.
        saturated: Share of the values of each operand beyond the largest of the format: overflow.
    """

    output_error: float
    weight_grad_error: float | None
    amax: dict[str, float]
    flushed: dict[str, float]
    saturated: dict[str, float]


class Observation:
    """Layers under observation.

    Args:
        layers: By name.
    """

    def __init__(self, layers: dict[str, FP8Linear]) -> None:
        self._probes = {name: _LayerProbe(layer) for name, layer in layers.items()}

    def results(self) -> dict[str, LayerHealth]:
        """What was found in each layer that has computed, by name; waits for the device once."""
        seen = {name: probe.values() for name, probe in self._probes.items() if probe.calls}
        rows = torch.stack(list(seen.values())).tolist() if seen else []
        return {name: _health(row) for name, row in zip(seen, rows, strict=True)}


@contextmanager
def observe(module: nn.Module) -> Iterator[Observation]:
    """Within this context, the FP8 layers of a module are observed, each at all of its calls.

    Args:
        module: With converted layers.
    """
    layers = fp8_layers(module)
    observation = Observation(layers)
    try:
        for name, layer in layers.items():
            layer.fp8.probe = observation._probes[name]
        yield observation
    finally:
        for layer in layers.values():
            layer.fp8.probe = None


class _LayerProbe:
    """Sums of one layer: squared errors and norms, largest values, shares of lost values and calls."""

    def __init__(self, layer: FP8Linear) -> None:
        self._recipe, self._amax = RECIPES[layer.fp8.recipe], layer.fp8.amax
        self.calls = 0
        self._sums: dict[str, Tensor] = {}
        self._grad: Tensor | None = None

    def __call__(self, matmul: Matmul, rows: Tensor, weight: Tensor) -> Tensor:
        """See `Probe`."""
        self.calls += 1
        watched = weight.requires_grad and torch.is_grad_enabled()
        output = matmul(rows, _WeightGradient.apply(weight, rows, self) if watched else weight)  # type: ignore[no-untyped-call]
        with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
            self._compare("output", output, rows.float() @ weight.float().t())
            self._look(INPUT, rows, self._recipe.output[0])
            self._look(WEIGHT, weight, self._recipe.output[1])
        if output.requires_grad:
            output.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        return output

    def on_weight_gradient(self, found: Tensor, rows: Tensor) -> None:
        """Compares the gradient that the layer has computed; that of its output came just before."""
        if self._grad is not None:
            self._compare("weight_grad", found, self._grad.float().t() @ rows.float())
        self._grad = None

    def values(self) -> Tensor:
        """All sums as one vector, in the order that `_health` reads."""
        device = self._sums["output_norm"].device
        zero = torch.zeros((), device=device)
        names = [f"{of}_{what}" for of in ("output", "weight_grad") for what in ("error", "norm")]
        names += [f"{what}_{operand}" for what in ("amax", "flushed", "saturated", "looks") for operand in OPERANDS]
        return torch.stack([self._sums.get(name, zero) for name in names])

    def _on_gradient(self, grad: Tensor) -> None:
        self._grad = grad.detach()
        with torch.no_grad():
            self._look(GRAD, self._grad, self._recipe.grad_input[0])

    def _compare(self, of: str, found: Tensor, exact: Tensor) -> None:
        self._add(f"{of}_error", (found.detach().float() - exact).square().sum())
        self._add(f"{of}_norm", exact.square().sum())

    def _look(self, operand: int, tensor: Tensor, cast: Cast) -> None:
        name, size = OPERANDS[operand], tensor.detach()
        largest = size.abs().amax().float()
        saturated, flushed = saturated_and_flushed(size, cast, 1, _scaled_with(self._amax, operand, largest))
        self._sums[f"amax_{name}"] = torch.maximum(self._sums.get(f"amax_{name}", largest), largest)
        self._add(f"saturated_{name}", saturated)
        self._add(f"flushed_{name}", flushed)
        self._add(f"looks_{name}", torch.ones_like(largest))

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value


class _WeightGradient(torch.autograd.Function):
    """Passes the weight on, and shows its gradient to a probe; the rows are saved as autograd saves any activation."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, probe: _LayerProbe) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(rows)
        ctx.probe = probe
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        with torch.autocast(grad.device.type, enabled=False):
            ctx.probe.on_weight_gradient(grad, *ctx.saved_tensors)
        return grad, None, None


def _scaled_with(amax: DelayedAmax | None, operand: int, current: Tensor) -> Tensor | None:
    return None if amax is None else torch.where(amax.used[operand] > 0, amax.used[operand], current)


def _health(row: list[float]) -> LayerHealth:
    output_error, output_norm, grad_error, grad_norm, *rest = row
    amax, flushed, saturated, looks = (dict(zip(OPERANDS, rest[i : i + 3], strict=True)) for i in range(0, 12, 3))
    return LayerHealth(
        output_error=_ratio(output_error, output_norm) ** 0.5,
        weight_grad_error=_ratio(grad_error, grad_norm) ** 0.5 if grad_norm or grad_error else None,
        amax=amax,
        flushed={name: _ratio(value, looks[name]) for name, value in flushed.items()},
        saturated={name: _ratio(value, looks[name]) for name, value in saturated.items()},
    )


def _ratio(value: float, of: float) -> float:
    return value / of if of else 0.0
