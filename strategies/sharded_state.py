"""Restores a sharded model and its optimizers from a checkpoint that any number of ranks wrote.

Every rank reads the rows it holds, whatever the shards were when they were written. A rank that cannot read stops all
of them: the others would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from lightning_embodied.errors import CheckpointError, EmbodiedError
from lightning_embodied.strategies.async_checkpoint import open_checkpoint
from lightning_embodied.strategies.checkpoint_state import (
    MODEL,
    OPTIMIZERS,
    empty_optimizer_state,
    join_checkpoint,
    stored_tensors,
)

_T = TypeVar("_T")


def restore_sharded(
    path: str | PathLike[str], module: nn.Module, optimizers: Sequence[Optimizer], strict: bool = True
) -> dict[str, Any]:
    """Reads a checkpoint into a module and its optimizers, in place; all ranks call it.

    Args:
        path: A checkpoint, or a directory of checkpoints, of which the newest complete one is taken.
        module: Sharded or not.
        optimizers: Bound to the module's parameters; none to read the weights alone.
        strict: Whether the checkpoint must hold exactly the module's tensors.

    Returns:
        The rest of the checkpoint: plain values.

    Raises:
        CheckpointError: There is none, it is damaged, or it is of another module; the same on all ranks.
    """
    return on_all_ranks(lambda: _restore(path, module, optimizers, strict))


def on_all_ranks(act: Callable[[], _T]) -> _T:
    """Acts on this rank, and raises if acting failed on any."""
    error: EmbodiedError | None = None
    try:
        result = act()
    except EmbodiedError as raised:
        error = raised
    reports: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, None if error is None else str(error))
    if error is not None:
        raise error
    failed = next((rank for rank, report in enumerate(reports) if report is not None), None)
    if failed is not None:
        raise CheckpointError("the checkpoint cannot be read", where=f"rank {failed}", found=reports[failed])
    return result


def _restore(
    path: str | PathLike[str], module: nn.Module, optimizers: Sequence[Optimizer], strict: bool
) -> dict[str, Any]:
    found, reader, rest = open_checkpoint(path)
    stored = stored_tensors(reader.metadata)
    state = get_model_state_dict(module)
    tensors = {f"{MODEL}.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
    if strict:
        _check_names(found.path, tensors, stored)
    reader.read_into({name: value for name, value in tensors.items() if name in stored})
    if rest[MODEL]:  # what `get_extra_state` gave
        set_model_state_dict(module, rest[MODEL], options=StateDictOptions(strict=False))
    if optimizers:
        slots = empty_optimizer_state(optimizers, rest, stored)
        reader.read_into(slots)
        for optimizer, values in zip(optimizers, join_checkpoint(slots, rest)[OPTIMIZERS], strict=True):
            optimizer.load_state_dict(values)
    return {key: value for key, value in rest.items() if key not in (MODEL, OPTIMIZERS)}


def _check_names(path: str, tensors: dict[str, Tensor], stored: dict[str, TensorStorageMetadata]) -> None:
    there = {name for name in stored if name.startswith(f"{MODEL}.")}
    missing, unexpected = sorted(tensors.keys() - there), sorted(there - tensors.keys())
    if missing or unexpected:
        lists = [f"{what} {', '.join(n.removeprefix(f'{MODEL}.') for n in names[:3])} ({len(names)} in all)"
                 for what, names in (("lacks", missing), ("has also", unexpected)) if names]  # fmt: skip
        raise CheckpointError(
            "the checkpoint is of another model",
            where=path,
            found="; ".join(lists),
            mend="use the model it was trained with, or set `strict_loading: false` in the module",
        )
