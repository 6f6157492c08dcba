"""PowerSGD: gradients travel as products of two thin matrices (arXiv:1905.13727), by torch's own hook.

The hook starts each of its all-reduces from the callback of the one before. On gloo callbacks run in several threads,
so with more than one bucket ranks start them in different orders, and the run hangs or aborts. There each bucket is
finished before the next begins, which gives up the overlap with the backward pass. NCCL keeps the order by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # `torch.distributed.GradBucket`, which has no type there
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_embodied.errors import ConfigError

# torch reads the annotations of a hook, so this file keeps them as objects
Hook = Callable[[PowerSGDState, GradBucket], torch.futures.Future[Tensor]]


@dataclass(frozen=True)
class PowerSGD:
    """Low-rank averaging of gradients. What it remembers is not in checkpoints: a restart begins with whole gradients.

    Args:
        rank: Columns of the thin matrices: more are exacter and slower.
        start_step: Optimizer steps with whole gradients before.
        min_compression: A matrix is only sent so if that is smaller by this factor.
        error_feedback: Whether what was lost is added to the next gradient; costs one more copy of the gradients.
    """

    rank: int = 1
    start_step: int = 1000
    min_compression: float = 2.0
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError("PowerSGD needs a rank", where="power_sgd.rank", found=self.rank, expected="1 or more")
        if self.start_step < 2:
            raise ConfigError(
                "PowerSGD cannot start so early, for DDP makes its buckets anew after the first step",
                where="power_sgd.start_step",
                found=self.start_step,
                expected="2 or more; hundreds, for training to settle",
            )

    def register(self, model: DistributedDataParallel) -> None:
        """Lets the gradients of a module travel so.

        Args:
            model: The wrapped module.
        """
        state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=self.start_step,
            min_compression_rate=self.min_compression,
            use_error_feedback=self.error_feedback,
        )
        model.register_comm_hook(state, one_at_a_time if dist.get_backend() == "gloo" else powerSGD_hook)


def one_at_a_time(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The hook of torch, of which a bucket begins when the one before is done.

    Args:
        state: Of torch's hook.
        bucket: Gradients.
    """
    averaged: torch.futures.Future[Tensor] = powerSGD_hook(state, bucket)
    averaged.wait()
    return averaged
