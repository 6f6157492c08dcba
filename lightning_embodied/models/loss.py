"""The loss as a global mean over valid targets, whatever the packing, ranks and gradient accumulation.

Averaging per-batch means, as Lightning and DDP do on their own, gives every batch equal weight however many valid
targets it holds. Here each step divides by one number that all ranks share, and the true count is put right once,
just before the optimizer step; a plain step without accumulation is exact at once and needs no correction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LossTerms:
    """Loss of one batch, not yet divided.

    Attributes:
        total: Sum over the valid targets of their weighted loss; a differentiable scalar.
        count: Sum of the weights of the valid targets; a scalar.
    """

    total: Tensor
    count: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean over this batch alone, detached; 0 when nothing in it is valid."""
        return self.total.detach() / positive(self.count)

    @classmethod
    def of_actions(cls, losses: Tensor, action_is_pad: Tensor, loss_weight: Tensor) -> LossTerms:
        """Sums the losses of action chunks.

        Args:
            losses: `[B, H, A]`, or `[B, R, H, A]` for `R` draws per sample.
            action_is_pad: bool `[B, H]`; true where there is no target.
            loss_weight: float32 `[B]`.
        """
        weight = loss_weight[:, None] * ~action_is_pad
        per_step = losses.to(torch.promote_types(losses.dtype, torch.float32)).sum(-1)
        draws = 1
        if losses.dim() == 4:
            draws, per_step = losses.shape[1], per_step.sum(1)
        return cls(total=(per_step * weight).sum(), count=weight.sum() * (draws * losses.shape[-1]))


class GlobalMean:
    """Turns the sums of micro-batches on all ranks into the gradient of one global mean.

    Lightning divides each micro-batch by `accumulate_grad_batches` and the strategy averages gradients over ranks.
    """

    def __init__(self) -> None:
        self._divisor: Tensor | None = None
        self._count: Tensor | None = None

    def step(self, terms: LossTerms, mean_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss to return from `training_step`.

        Args:
            terms: Loss of this rank's micro-batch.
            mean_over_ranks: Collective mean of a scalar.
        """
        count = terms.count.detach()
        if self._divisor is None or self._count is None:
            self._divisor = positive(mean_over_ranks(count.clone()))
            self._count = torch.zeros_like(count)
        self._count += count
        return terms.total / self._divisor

    def rescale(
        self, parameters: Iterable[nn.Parameter], accumulation: int, mean_over_ranks: Callable[[Tensor], Tensor]
    ) -> None:
        """Puts the accumulated gradients right and starts the next window; call before clipping.

        Args:
            parameters: Those whose gradients are rescaled.
            accumulation: The number Lightning divided each micro-batch's loss by.
            mean_over_ranks: Collective mean of a scalar.
        """
        divisor, count = self._divisor, self._count
        self.reset()
        if accumulation == 1 or divisor is None or count is None:
            return
        factor = float(divisor * accumulation / positive(mean_over_ranks(count)))
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def reset(self) -> None:
        """Forgets a window that was not finished."""
        self._divisor = self._count = None


def positive(count: Tensor) -> Tensor:
    """`count`, or 1 where it is 0."""
    return torch.where(count > 0, count, torch.ones_like(count))
