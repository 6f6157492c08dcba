"""Gradients that travel in half the bytes: cast for the all-reduce, cast back into the bucket.

torch's own `bf16_compress_hook` does the same and refuses every backend but NCCL. Averaging happens before the sum, so
that float16 does not overflow (torch.distributed.algorithms.ddp_comm_hooks.default_hooks).
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # `torch.distributed.GradBucket`, which has no type there

GradientDtype = Literal["bfloat16", "float16"]
# torch reads the annotations of a hook, so this file keeps them as objects
Hook = Callable[[object, GradBucket], torch.futures.Future[Tensor]]


def compressed_all_reduce(dtype: GradientDtype) -> Hook:
    """A communication hook for `DistributedDataParallel`.

    Args:
        dtype: In which gradients are summed.
    """
    narrow: torch.dtype = getattr(torch, dtype)

    def reduce_narrow(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        share = bucket.buffer().to(narrow).div_(dist.get_world_size())
        work = dist.all_reduce(share, async_op=True)

        def widen(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            wide: Tensor = bucket.buffer()
            return wide.copy_(done.value()[0])

        future: torch.futures.Future[Tensor] = work.get_future().then(widen)
        return future

    return reduce_narrow
