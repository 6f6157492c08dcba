"""A process group of any size in one process: collectives return at once and move nothing.

torch's own `fake` backend (`torch.testing._internal.distributed.fake_pg`, private) makes `fully_shard` and device
meshes believe in a thousand ranks, so what a plan shards is sharded by the code that training will run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_embodied.errors import ConfigError


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """Makes this process rank 0 of a group of `ranks`.

    Args:
        ranks: Size of the group.

    Raises:
        ConfigError: This process is in a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError(
            "planning makes a process group of its own, and this process is in one",
            found=f"{dist.get_backend()}, {dist.get_world_size()} ranks",
            mend="plan in a process of its own, before training starts",
        )
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
