"""Which layers to leave out of FP8 so that the gradient stays within a bound.

The gradient of one loss is computed in high precision, in FP8, and with each layer alone in FP8. Roundings of different
layers are nearly independent, so their errors add in squares: leaving out the worst layers first needs the fewest. How
many is then found by bisection, each step measured, so the promise does not rest on that assumption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_embodied.errors import ConfigError
from lightning_embodied.precision.conversion import fp8_layers, only_in_fp8

Gradients = dict[str, Tensor]
Loss = Callable[[], Tensor]


@dataclass(frozen=True)
class GradientError:
    """How far a gradient over all parameters is from the one in high precision.

    Attributes:
        relative: Norm of the difference over the norm of the reference.
        cosine: Cosine of the angle between them.
    """

    relative: float
    cosine: float

    @classmethod
    def between(cls, found: Gradients, reference: Gradients) -> GradientError:
        """Compares gradients by parameter name; those of `reference` count."""
        error = norm = length = product = 0.0
        for name, exact in reference.items():
            value, exact = found[name].double(), exact.double()  # noqa: PLW2901
            error += float((value - exact).square().sum())
            norm += float(exact.square().sum())
            length += float(value.square().sum())
            product += float((value * exact).sum())
        scale = math.sqrt(norm * length)
        return cls(math.sqrt(error / norm) if norm else 0.0, product / scale if scale else 1.0)


@dataclass(frozen=True)
class ExclusionProposal:
    """Which layers to exclude.

    Attributes:
        bound: Largest relative error of the gradient wanted.
        total: The error with all converted layers in FP8.
        alone: Relative error with one layer alone in FP8, by its name.
        excluded: Names of the layers to exclude, worst first.
        remaining: The error without them, measured.
    """

    bound: float
    total: GradientError
    alone: dict[str, float]
    excluded: tuple[str, ...]
    remaining: GradientError


def gradients(module: nn.Module, loss: Loss, fp8: Collection[str]) -> Gradients:
    """The gradient of a loss, with the same random numbers every time; module and `.grad` are left as they are.

    Args:
        module: With converted layers.
        loss: Computes the loss with the module.
        fp8: Names of the converted layers that compute in FP8.

    Returns:
        Gradients by the names of the parameters that train and that the loss depends on.
    """
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    devices = {parameter.device for parameter in parameters.values() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), _unchanged(module), only_in_fp8(module, fp8):
        torch.manual_seed(0)
        found = torch.autograd.grad(loss(), list(parameters.values()), allow_unused=True)
    return {name: grad for name, grad in zip(parameters, found, strict=True) if grad is not None}


def propose_exclusions(module: nn.Module, loss: Loss, bound: float) -> ExclusionProposal:
    """Finds the layers to exclude; computes the gradient once for each layer, and a few times more.

    Args:
        module: With converted layers.
        loss: Computes the loss of one batch with the module.
        bound: Largest relative error of the gradient, above 0.

    Raises:
        ConfigError: The bound is not positive, or the loss is not finite.
    """
    if not bound > 0:
        raise ConfigError("no error at all is not to be had in FP8", where="bound", found=bound, expected="above 0")
    reference = gradients(module, loss, fp8=())
    if not all(bool(grad.isfinite().all()) for grad in reference.values()):
        raise ConfigError("the gradient in high precision is not finite", mend="take another batch or checkpoint")

    def error(fp8: Collection[str]) -> GradientError:
        return GradientError.between(gradients(module, loss, fp8), reference)

    names = list(fp8_layers(module))
    total = error(names)
    alone = {name: error([name]).relative for name in names}
    order = sorted(names, key=lambda name: -alone[name])
    fails, enough, remaining = -1, len(order), GradientError(0.0, 1.0)
    guess = 0 if total.relative <= bound else _predicted(order, alone, total.relative, bound)
    while enough - fails > 1:
        tried = total if guess == 0 else error(order[guess:])
        if tried.relative <= bound:
            enough, remaining = guess, tried
        else:
            fails = guess
        guess = (enough + fails) // 2
    return ExclusionProposal(bound, total, alone, tuple(order[:enough]), remaining)


def _predicted(order: list[str], alone: dict[str, float], total: float, bound: float) -> int:
    """How many of the worst layers to exclude if errors add in squares."""
    squares = [alone[name] ** 2 for name in order]
    scale = total**2 / max(sum(squares), 1e-30)
    count = next(count for count in range(len(order) + 1) if scale * sum(squares[count:]) <= bound**2)
    return min(count, len(order) - 1)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Puts back buffers, such as running means, and what delayed scaling has seen."""
    tensors = [*module.buffers(), *(layer.fp8.amax.seen for layer in fp8_layers(module).values() if layer.fp8.amax)]
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
