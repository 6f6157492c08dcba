"""How parameters, gradients and optimizer states are spread over ranks: DDP, FSDP2 or HSDP, by torch's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_embodied.errors import ConfigError

Strategy = Literal["ddp", "hsdp", "fsdp"]


@dataclass(frozen=True)
class Sharding:
    """One way to train on many ranks.

    Attributes:
        strategy: `ddp` holds everything on each rank, `fsdp` shards over all ranks, `hsdp` over groups of them.
        ranks: Ranks in all.
        shard_size: Ranks that share one copy: 1 for `ddp`, all for `fsdp`.
        units: Names of the classes whose modules are gathered one at a time; everything else is gathered for the whole
            step.
        param_dtype: What parameters are gathered and computed in. Default: as they are held, and autocast's copies of
            them in half precision stay alive until the backward pass, so that sharding saves little.
        reduce_dtype: What gradients are reduced in.
        bucket_mb: Size of DDP's buckets in MiB.
        bucket_view: Whether gradients live in DDP's buckets instead of beside them.
    """

    strategy: Strategy
    ranks: int
    shard_size: int = 1
    units: tuple[str, ...] = ()
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    bucket_mb: float = 25.0
    bucket_view: bool = True

    def __post_init__(self) -> None:
        """Refuses what no process group could be."""
        wanted = {"ddp": 1, "fsdp": self.ranks}.get(self.strategy, self.shard_size)
        if self.ranks < 1 or self.shard_size != wanted or self.ranks % self.shard_size:
            raise ConfigError(
                "the shards do not fit the ranks",
                where=f"strategy {self.strategy}",
                found=f"{self.shard_size} shards, {self.ranks} ranks",
                expected="1 shard for ddp, as many as ranks for fsdp, a divisor of the ranks for hsdp",
            )

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.ranks // self.shard_size

    @property
    def label(self) -> str:
        """`ddp`, `fsdp` or `hsdp 128 x 8`."""
        return f"hsdp {self.replicas} x {self.shard_size}" if self.strategy == "hsdp" else self.strategy

    def apply(self, module: nn.Module) -> None:
        """Shards a module in place with `fully_shard`; `ddp` leaves it as it is. Needs a process group of `ranks`.

        Args:
            module: Best on the meta device: nothing is allocated or copied then.

        Raises:
            ConfigError: No module is of a class in `units`; names those there are.
        """
        if self.strategy == "ddp":
            return
        shape = (self.ranks,) if self.replicas == 1 else (self.replicas, self.shard_size)
        names = ("shard",) if self.replicas == 1 else ("replicate", "shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        policy = MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype, cast_forward_inputs=False)
        for unit in select_units(module, self.units):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)


def select_units(module: nn.Module, units: tuple[str, ...]) -> list[nn.Module]:
    """The modules of some classes, inner ones first.

    Args:
        module: Their root.
        units: Names of classes.

    Raises:
        ConfigError: There is none of a class; names the repeated ones there are.
    """
    present = {type(child).__name__ for child in module.modules()}
    for name in units:
        if name not in present:
            raise ConfigError(
                "the model has no module of this class",
                where="units",
                found=name,
                expected=", ".join(sorted(repeated_blocks(module))) or "a class of the model's modules",
            )
    return [
        child for child in reversed(list(module.modules())) if child is not module and type(child).__name__ in units
    ]


def repeated_blocks(module: nn.Module) -> set[str]:
    """Names of the classes that a model stacks: entries of a list or sequence that have a sibling of their class."""
    found = set()
    for child in module.modules():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            blocks = [block for block in child if any(True for _ in block.parameters())]
            names = [type(block).__name__ for block in blocks if any(True for _ in block.children())]
            found |= {name for name in names if names.count(name) > 1}
    return found


class ReachedInto:
    """Watches a step for stacked blocks that other code reaches into.

    FSDP2 gathers a block's parameters when the block is called. A layer inside that is called from elsewhere, as a
    cache of keys and values does, finds them sharded; such a block cannot be a unit.

    Args:
        module: The model, not sharded.

    Attributes:
        names: Classes of the blocks that were reached into.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names: set[str] = set()
        self._active: list[nn.Module] = []
        self._handles = list(self._watch(module))

    def _watch(self, module: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        wanted = repeated_blocks(module)
        for block in [child for child in module.modules() if type(child).__name__ in wanted]:
            yield block.register_forward_pre_hook(lambda block, _: self._active.append(block))
            yield block.register_forward_hook(lambda *_: self._leave())
            for inner in block.modules():
                if inner is not block and inner._parameters:
                    yield inner.register_forward_pre_hook(self._check(block))

    def _leave(self) -> None:
        self._active.pop()

    def _check(self, block: nn.Module) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if block not in self._active:
                self.names.add(type(block).__name__)

        return hook

    def remove(self) -> None:
        """Stops watching."""
        for handle in self._handles:
            handle.remove()
