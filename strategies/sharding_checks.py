"""Ranks must agree: the same parameters with the same values at the start, the same replicas ever after.

Fully sharded training never compares them: a rank that starts from another seed contributes its slice of another
model, and a replica or an unsharded parameter that drifts is averaged into nothing. Each was seen to train on in
silence. Values are compared by their sum and norm in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_embodied.errors import ConfigError
from lightning_embodied.strategies.device_mesh import REPLICATE


def synchronize_initial_values(module: nn.Module) -> list[str]:
    """Gives all ranks rank 0's parameters and buffers, as DDP does; what is equal already is not sent.

    Args:
        module: Not yet sharded; tensors on the meta device are left alone.

    Returns:
        Names of the tensors that differed on any rank.

    Raises:
        ConfigError: The ranks do not have the same tensors; names the first.
    """
    tensors = dict(_state(module))
    layout = {name: (tuple(tensor.shape), str(tensor.dtype), tensor.is_meta) for name, tensor in tensors.items()}
    present = [tensor for tensor in tensors.values() if not tensor.is_meta]
    first: list[Any] = [(layout, _fingerprints(present).tolist())]
    dist.broadcast_object_list(first, src=0)
    expected_layout, expected = first[0]
    different = [] if layout == expected_layout else [n for n in _keys(layout, expected_layout)
                                                      if layout.get(n) != expected_layout.get(n)]  # fmt: skip
    reports = _gather_objects(different)
    if any(reports):
        rank, names = next((rank, names) for rank, names in enumerate(reports) if names)
        raise ConfigError(
            "the ranks do not have the same model",
            where=f"rank {rank}, parameters or buffers {', '.join(names[:4])}",
            found="absent, or of another shape or dtype than on rank 0",
            mend="build the same model on every rank; let nothing depend on the rank or on its data",
        )
    names = [name for name, tensor in tensors.items() if not tensor.is_meta]
    mine = _fingerprints(present).tolist()
    differing = [name for name, a, b in zip(names, mine, expected, strict=True) if repr(a) != repr(b)]
    differing = sorted(set(chain.from_iterable(_gather_objects(differing))), key=names.index)
    for name in differing:
        value = tensors[name].detach()
        contiguous = value.contiguous()
        dist.broadcast(contiguous, src=0)
        value.copy_(contiguous)
    return differing


def check_sharded(module: nn.Module) -> None:
    """Checks that no parameter that trains was left out of the sharding: its gradients would not be reduced.

    Raises:
        ConfigError: Some are; names them.
    """
    left = [name for name, p in module.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if left:
        raise ConfigError(
            "these parameters are not sharded, so their gradients would not be reduced and the ranks would diverge",
            where=", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else ""),
            expected="parameters that exist when training starts",
            mend="create them in `__init__` or `configure_model`",
        )


def check_replicas(module: nn.Module, mesh: DeviceMesh) -> None:
    """Checks that what ranks hold in copies is equal: the shards of all replicas, and parameters without shards.

    Args:
        module: Sharded over `mesh`.
        mesh: From `sharding_mesh`; all its ranks call this.

    Raises:
        ConfigError: Values differ; names the parameters.
    """
    sharded = {n: p.to_local() for n, p in module.named_parameters() if isinstance(p, DTensor)}
    plain = {n: p for n, p in module.named_parameters() if not isinstance(p, DTensor)}
    replicas = mesh.get_group(REPLICATE) if REPLICATE in (mesh.mesh_dim_names or ()) else None
    differing = [] if replicas is None else _differing(sharded, replicas)
    differing += _differing(plain, None)
    differing = sorted(set(chain.from_iterable(_gather_objects(differing))))
    if differing:
        raise ConfigError(
            "copies of parameters have different values on different ranks",
            where=", ".join(differing[:4]) + (f" and {len(differing) - 4} more" if len(differing) > 4 else ""),
            expected="equal values: all replicas start equal and take equal steps",
            mend="change parameters only by the optimizer, or on all ranks alike",
        )


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _fingerprints(tensors: Iterable[Tensor]) -> Tensor:
    """float64 `[N, 2]`: sum and norm of each tensor."""
    rows = [
        torch.stack([t.sum(dtype=torch.float64), torch.linalg.vector_norm(_floating(t), dtype=torch.float64)])
        for t in (tensor.detach() for tensor in tensors)
    ]
    return torch.stack([row.cpu() for row in rows]) if rows else torch.zeros(0, 2, dtype=torch.float64)


def _floating(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()


def _differing(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> list[str]:
    if not tensors:
        return []
    prints = _fingerprints(tensors.values()).tolist()
    first: list[Any] = [prints]
    dist.broadcast_object_list(first, group_src=0, group=group)
    return [name for name, a, b in zip(tensors, prints, first[0], strict=True) if repr(a) != repr(b)]


def _gather_objects(value: list[str]) -> list[list[str]]:
    gathered: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return cast(list[list[str]], gathered)


def _keys(*layouts: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(layouts)))
