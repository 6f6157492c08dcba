"""Ranks that train by themselves and meet every so many steps: local SGD, and DiLoCo, over slow networks.

Every `every` steps the ranks average how far each has come, and an outer optimizer takes that as its gradient
(DiLoCo, arXiv:2311.08105, algorithm 1). With an outer learning rate of 1 and no momentum this averages parameters:
local SGD, after `start_step` steps of ordinary training post-local SGD (arXiv:1808.07217).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # `torch.distributed.GradBucket`, which has no type there
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_embodied.errors import ConfigError


@dataclass(frozen=True)
class LocalSGD:
    """When ranks meet and what they make of it. DiLoCo's own: `{every: 500, outer_lr: 0.7, outer_momentum: 0.9}`.

    Args:
        every: Optimizer steps between two meetings.
        start_step: Optimizer steps of ordinary data-parallel training before.
        outer_lr: Of the outer optimizer; 1 without momentum averages parameters.
        outer_momentum: Nesterov's.
    """

    every: int = 50
    start_step: int = 0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("every", self.every >= 1, "1 or more steps"),
            ("start_step", self.start_step >= 0, "0 or more steps"),
            ("outer_lr", self.outer_lr > 0, "more than 0"),
            ("outer_momentum", 0 <= self.outer_momentum < 1, "at least 0 and less than 1"),
        ):
            if not good:
                found = getattr(self, name)
                raise ConfigError(
                    "local SGD cannot use this", where=f"local_sgd.{name}", found=found, expected=expected
                )


class Meetings:
    """The outer optimizer of one rank, and the hook that keeps its gradients to itself.

    Args:
        options: When and how.
        model: The wrapped module, with the weights to start from.
    """

    def __init__(self, options: LocalSGD, model: DistributedDataParallel) -> None:
        self._options = options
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._common = [parameter.detach().clone() for parameter in self._parameters]
        nesterov = options.outer_momentum > 0
        self._outer = torch.optim.SGD(
            self._common, lr=options.outer_lr, momentum=options.outer_momentum, nesterov=nesterov
        )
        self._steps = self._alone = 0
        model.register_comm_hook(self, _hook)

    @property
    def apart(self) -> bool:
        """Whether the ranks train by themselves now."""
        return self._steps >= self._options.start_step

    def after_step(self) -> None:
        """Counts an optimizer step; a meeting if one is due. Collective then."""
        if self.apart:
            self._alone += 1
        self._steps += 1
        if self._alone == self._options.every:
            self.meet()
        elif not self._alone and self.apart:
            self._remember()

    @torch.no_grad()
    def meet(self) -> None:
        """Brings the ranks together, early if they have met less than `every` steps ago. Collective."""
        if not self._alone:
            return
        for common, parameter in zip(self._common, self._parameters, strict=True):
            common.grad = (common - parameter) / dist.get_world_size()
        _sum(common.grad for common in self._common if common.grad is not None)
        self._outer.step()
        for common, parameter in zip(self._common, self._parameters, strict=True):
            parameter.copy_(common)
            common.grad = None
        self._alone = 0

    def state_dict(self) -> dict[str, Any]:
        """Steps done, and the outer optimizer's state; to be taken after `meet`."""
        return {"steps": self._steps, "outer": self._outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state, and from the weights as they are."""
        self._steps, self._alone = state["steps"], 0
        self._outer.load_state_dict(state["outer"])
        self._remember()

    @torch.no_grad()
    def _remember(self) -> None:
        for common, parameter in zip(self._common, self._parameters, strict=True):
            common.copy_(parameter)


def _hook(meetings: Meetings, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    world = dist.group.WORLD
    assert world is not None  # noqa: S101 - DDP is in it
    reduced: torch.futures.Future[Tensor] = noop_hook(None, bucket) if meetings.apart else allreduce_hook(world, bucket)
    return reduced


def _sum(tensors: Iterable[Tensor]) -> None:
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
