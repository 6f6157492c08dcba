"""Fully sharded data parallelism (FSDP2, HSDP) for any module, from plain options: torch's `fully_shard`, made safe.

It adds what `fully_shard` leaves to its caller and nothing reports: units by name, recomputation, methods besides
`forward`, tied parameters, and optimizers that were built before. It knows no strategy and no launcher; the idea is
arXiv:2304.11277, what it saves is in `docs/sharding.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_embodied.errors import ConfigError
from lightning_embodied.strategies.sharding_checks import check_sharded, synchronize_initial_values
from lightning_embodied.strategies.sharding_methods import register_forward_methods
from lightning_embodied.strategies.sharding_optimizer import ParameterNames
from lightning_embodied.strategies.sharding_units import is_called, parts_of, repeated_layers, select_modules

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Sharding:
    """How to shard a module.

    Args:
        units: What one all-gather brings together: class names of layers (`GemmaLayer`), or patterns of module names
            (`*.embed_tokens`). Default: the repeated layers of every `ModuleList` and `Sequential`.
        joint_units: Units whose own `forward` is never called, because another module calls their parts, as two
            towers with a joint attention do. Their parts are gathered together when the first of them is called.
        activation_checkpointing: Layers, named as `units`, whose activations are computed again in the backward pass.
        param_dtype: Dtype in which parameters are gathered and used; the shards and the optimizer keep their own.
            Inputs are not cast: it belongs to a mixed-precision context (`precision: bf16-mixed`).
        reduce_dtype: Dtype in which gradients are reduced; default: that of the gathered parameters.
        forward_methods: Methods of the root, besides `forward`, that use its parameters.
    """

    units: Sequence[str] | None = None
    joint_units: Sequence[str] = ()
    activation_checkpointing: Sequence[str] = ()
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = "float32"
    forward_methods: Sequence[str] = ()

    def apply(self, root: nn.Module, mesh: DeviceMesh) -> ShardedModule:
        """Shards a module in place; all ranks of the mesh call it.

        Values become rank 0's, as with DDP. Parameters on the meta device stay there: see `load_weights`.

        Args:
            root: Parameters and buffers on any device; they move to the mesh's.
            mesh: From `sharding_mesh`.

        Raises:
            ConfigError: A name matches nothing, ranks have different models, or a parameter cannot be sharded.
        """
        _check_can_be_sharded(root)
        recomputed = select_modules(root, self.activation_checkpointing, "activation_checkpointing")
        groups = self._groups(root)
        synchronize_initial_values(root)
        names, ties = ParameterNames(root), _ties(root)
        for module in recomputed:
            module.forward = partial(_recomputing, module.forward)
        policy = MixedPrecisionPolicy(_dtype(self.param_dtype), _dtype(self.reduce_dtype), cast_forward_inputs=False)
        for group in [*groups, [root]]:
            _shard(group, mesh, policy)
        _check_ties(root, ties)
        check_sharded(root)
        register_forward_methods(root, self.forward_methods)
        return ShardedModule(root, mesh, names)

    def _groups(self, root: nn.Module) -> list[list[nn.Module]]:
        joint = select_modules(root, self.joint_units, "joint_units")
        whole = repeated_layers(root) if self.units is None else select_modules(root, self.units, "units")
        taken: set[nn.Module] = set()
        groups = []
        for unit in (m for m in reversed(list(root.modules())) if m in joint or m in whole):
            together = unit in joint or not is_called(unit)
            group = [part for part in parts_of(unit) if part not in taken] if together else [unit]
            taken.update(unit.modules())
            groups.append(group)
        return [group for group in groups if group]


class ShardedModule:
    """A module that `Sharding.apply` has sharded.

    Args:
        module: The module.
        mesh: The mesh it is sharded over.
        names: Names of the parameters it had before.

    Attributes:
        module: The module.
        mesh: The mesh it is sharded over.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, names: ParameterNames) -> None:
        self.module, self.mesh, self._names = module, mesh, names

    @property
    def units(self) -> list[FSDPModule]:
        """What is gathered and freed together, the root first."""
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]

    def rebind(self, optimizers: Iterable[Optimizer]) -> None:
        """Points optimizers that were built before the sharding at the sharded parameters (see `ParameterNames`).

        Raises:
            ConfigError: An optimizer holds other tensors, or parameters appeared that are not sharded.
        """
        self._names.rebind(optimizers, self.module)
        check_sharded(self.module)

    def defer_all_reduce(self, defer: bool) -> None:
        """Lets backward passes leave out the all-reduce between replicas, until one that does not defer it.

        Gradients stay reduced within a replica, and sharded: accumulating them costs no memory. Without replicas this
        changes nothing.
        """
        for unit in self.units:
            unit.set_requires_all_reduce(not defer, recurse=False)


def _shard(group: list[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    classes = [type(module) for module in group]
    fully_shard(group if len(group) > 1 else group[0], mesh=mesh, mp_policy=policy)
    for module, original in zip(group, classes, strict=True):
        # torch derives a class `FSDP<name>`; checkpoints and messages that name the class mean the user's.
        sharded = type(module)
        sharded.__name__, sharded.__qualname__ = original.__name__, original.__qualname__
        sharded.__module__ = original.__module__


def _recomputing(forward: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _dtype(name: Dtype | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _check_can_be_sharded(root: nn.Module) -> None:
    if any(isinstance(module, FSDPModule) for module in root.modules()):
        raise ConfigError(
            "parts of the model are sharded already",
            where=type(root).__name__,
            mend="take the `fully_shard` calls out of `configure_model`: units are named in the strategy's options",
        )
    scalars = [name for name, param in root.named_parameters() if param.ndim == 0]
    if scalars:
        raise ConfigError(
            "a parameter without dimensions cannot be sharded",
            where=", ".join(scalars[:4]),
            found="shape ()",
            expected="at least one dimension",
            mend="make it `nn.Parameter(torch.zeros(1))`",
        )


def _ties(root: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, param in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [shared for shared in names.values() if len(shared) > 1]


def _check_ties(root: nn.Module, ties: list[list[str]]) -> None:
    params = dict(root.named_parameters(remove_duplicate=False))
    for shared in ties:
        if len({id(params[name]) for name in shared}) > 1:
            raise ConfigError(
                "a parameter is shared by modules of different units, which would train two copies of it",
                where=" and ".join(shared),
                mend="name units that contain all of them or none; those in none are sharded with the root",
            )
