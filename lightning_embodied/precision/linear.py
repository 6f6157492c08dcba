"""A linear layer that multiplies in FP8: `nn.Linear` with another `forward`, nothing else.

Conversion sets the class of the module in place, so parameters, ties, names, hooks, flags and sharding are those the
module had, and its checkpoints too. Weights stay in their own dtype and are cast anew for each product. Rows are padded
with zeros to what the kernels take, which changes nothing: a row of zeros adds nothing to any product or scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

from lightning_embodied.errors import ConfigError
from lightning_embodied.precision.products import GRAD, INPUT, WEIGHT, products
from lightning_embodied.precision.recipes import alignment

Matmul = Callable[[Tensor, Tensor], Tensor]
"""Rows `[M, K]` and weight `[N, K]` to `[M, N]`."""


class Probe(Protocol):
    """Looks on while a layer computes."""

    def __call__(self, matmul: Matmul, rows: Tensor, weight: Tensor) -> Tensor:
        """Returns `matmul(rows, weight)`."""


@dataclass
class DelayedAmax:
    """Largest values of one layer's input, weight and output gradient, in this order: float32 `[3]` each.

    Attributes:
        used: Over the last steps; 0 as long as there was none.
        seen: In the step under way.
    """

    used: Tensor
    seen: Tensor

    @classmethod
    def cold(cls, device: torch.device) -> DelayedAmax:
        """Nothing seen yet."""
        return cls(torch.zeros(3, device=device), torch.zeros(3, device=device))


@dataclass
class FP8State:
    """What a converted layer knows beyond `nn.Linear`.

    Attributes:
        recipe: Name of the recipe.
        backend: Name of the backend.
        amax: For delayed scaling.
        engine: Transformer Engine's layer, for that backend.
        enabled: Whether it multiplies in FP8, or as `nn.Linear` does.
        probe: Looks on if there is one.
    """

    recipe: str
    backend: str
    amax: DelayedAmax | None = None
    engine: Any = None
    enabled: bool = True
    probe: Probe | None = None


class FP8Linear(nn.Linear):
    """`nn.Linear` in FP8; made by `FP8Precision` out of an existing layer, never constructed."""

    fp8: FP8State

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`, of the dtype that `nn.Linear` would return."""
        if not self.fp8.enabled or not input.numel():
            return super().forward(input)
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        rows = input.reshape(-1, self.in_features)
        count = rows.shape[0]
        rows = F.pad(rows, (0, 0, 0, -count % alignment(self.fp8.recipe, self.fp8.backend)))
        output = self._matmul(rows) if self.fp8.probe is None else self._probed(rows)
        output = output[:count].reshape(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _matmul(self, rows: Tensor, weight: Tensor | None = None) -> Tensor:
        weight = self.weight if weight is None else weight
        if isinstance(weight, DTensor):
            raise ConfigError(
                "a tensor-parallel layer cannot compute in FP8",
                where=repr(self),
                found=f"a weight placed {weight.placements} in the forward pass",
                mend="exclude it with FP8Precision.exclude, or use data parallelism for it",
            )
        state = self.fp8
        if state.engine is not None:
            output: Tensor = state.engine(rows, weight)
            return output
        used = seen = None
        if state.amax is not None:
            used, seen = state.amax.used, state.amax.seen if self.training else None
        result: Tensor = FP8Matmul.apply(rows, weight, state.recipe, state.backend, used, seen)  # type: ignore[no-untyped-call]
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _probed(self, rows: Tensor) -> Tensor:
        assert self.fp8.probe is not None  # noqa: S101 - for the type checker
        return self.fp8.probe(self._matmul, rows, self.weight)

    def extra_repr(self) -> str:
        """Shown by `print(model)`."""
        return f"{super().extra_repr()}, recipe={self.fp8.recipe}, backend={self.fp8.backend}"


@torch.compiler.allow_in_graph
class FP8Matmul(torch.autograd.Function):
    """`rows @ weight.t()` whose three products are in FP8. Products nobody needs are not computed."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,  # noqa: ANN401
        rows: Tensor,
        weight: Tensor,
        recipe: str,
        backend: str,
        used: Tensor | None,
        seen: Tensor | None,
    ) -> Tensor:
        amax = None
        if used is not None:
            amax = [_noted(rows, INPUT, used, seen), _noted(weight, WEIGHT, used, seen)]
        ctx.save_for_backward(rows, weight)
        ctx.arguments = recipe, backend, amax, used, seen
        with torch.autocast(rows.device.type, enabled=False):
            return products(recipe, backend).output(rows, weight, amax)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401, D102
        rows, weight = ctx.saved_tensors
        recipe, backend, amax, used, seen = ctx.arguments
        if used is not None:
            amax = [*amax, _noted(grad, GRAD, used, seen)]
        compute = products(recipe, backend)
        grad_rows = grad_weight = None
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_rows = compute.grad_input(grad, weight, amax)
            if ctx.needs_input_grad[1]:
                grad_weight = compute.grad_weight(grad, rows, amax).to(weight.dtype)
        return grad_rows, grad_weight, None, None, None, None


def _noted(tensor: Tensor, operand: int, used: Tensor, seen: Tensor | None) -> Tensor:
    """The largest value to scale an operand with: that of earlier steps or, if there were none, its own.

    A cold start with any fixed scale would lose gradients, and the values it passes on would be remembered wrongly.
    What is noted in `seen` does not act before the optimizer step, and noting it twice is noting it once: computing
    activations again in the backward pass changes nothing.
    """
    current = tensor.detach().abs().amax().float()
    if seen is not None:
        seen[operand] = torch.maximum(seen[operand], current)
    return torch.where(used[operand] > 0, used[operand], current)
