"""Divides what Lightning wants saved into tensors, which ranks write and read by shards, and plain values.

Optimizer state is kept as torch's optimizers number it, by position in their groups, so that it moves between
strategies and numbers of ranks. Plain values are read by `torch.load(weights_only=True)`: no code is unpickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_embodied.errors import CheckpointError

MODEL, OPTIMIZERS = "state_dict", "optimizer_states"
Tensors = dict[str, Tensor]


def split_checkpoint(checkpoint: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Takes the tensors of model and optimizers out of a Lightning checkpoint.

    Args:
        checkpoint: What `Trainer.save_checkpoint` hands a strategy; optimizer states by position.

    Returns:
        Tensors by name: `state_dict.<parameter>`, `optimizer_states.<optimizer>.<position>.<key>`; and the rest.
    """
    rest = {key: value for key, value in checkpoint.items() if key not in (MODEL, OPTIMIZERS)}
    tensors: Tensors = {}
    rest[MODEL] = _take(checkpoint.get(MODEL, {}), f"{MODEL}.", tensors)
    rest[OPTIMIZERS] = []
    for index, state in enumerate(checkpoint.get(OPTIMIZERS, [])):
        left = {position: _take(values, f"{OPTIMIZERS}.{index}.{position}.", tensors)
                for position, values in state["state"].items()}  # fmt: skip
        rest[OPTIMIZERS].append({**state, "state": left})
    return tensors, rest


def join_checkpoint(tensors: Tensors, rest: dict[str, Any]) -> dict[str, Any]:
    """Undoes `split_checkpoint`."""
    checkpoint = {**rest, MODEL: {**rest[MODEL], **_under(tensors, f"{MODEL}.")}}
    checkpoint[OPTIMIZERS] = [
        {**state, "state": {position: {**left, **_under(tensors, f"{OPTIMIZERS}.{index}.{position}.")}
                            for position, left in state["state"].items()}}
        for index, state in enumerate(rest[OPTIMIZERS])
    ]  # fmt: skip
    return checkpoint


def stored_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors that a checkpoint holds, by name."""
    return {
        key: value for key, value in metadata.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)
    }


def empty_like_stored(stored: TensorStorageMetadata, param: Tensor | None = None) -> Tensor:
    """Memory for a stored tensor: this rank's rows if it belongs to a sharded parameter of the same shape."""
    if isinstance(param, DTensor) and param.shape == stored.size:
        return torch.empty_like(param, dtype=stored.properties.dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def empty_optimizer_state(
    optimizers: Iterable[Optimizer], rest: dict[str, Any], stored: dict[str, TensorStorageMetadata]
) -> Tensors:
    """Memory, sharded as the parameters are, for the optimizer states that a checkpoint holds.

    Raises:
        CheckpointError: The checkpoint has other optimizers or parameter groups.
    """
    optimizers = list(optimizers)
    groups = [[len(group["params"]) for group in state["param_groups"]] for state in rest[OPTIMIZERS]]
    wanted = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
    if groups != wanted:
        raise CheckpointError(
            "the checkpoint is of other optimizers",
            found=f"parameters in groups: {groups}",
            expected=str(wanted),
            mend="resume with the optimizers and frozen parameters that the run began with",
        )
    tensors: Tensors = {}
    for index, optimizer in enumerate(optimizers):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for position, param in enumerate(params):
            prefix = f"{OPTIMIZERS}.{index}.{position}."
            tensors.update({k: empty_like_stored(v, param) for k, v in stored.items() if k.startswith(prefix)})
    return tensors


def to_bytes(rest: dict[str, Any]) -> bytes:
    """Serialises the plain values.

    Raises:
        CheckpointError: They hold an object that could be read back only by running code; names its class.
    """
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    content = buffer.getvalue()
    from_bytes(content, "the checkpoint that is being saved")
    return content


def from_bytes(content: bytes, where: str) -> dict[str, Any]:
    """Reads the plain values.

    Raises:
        CheckpointError: They are damaged, or hold something else.
    """
    try:
        rest: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        lines = [line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
        raise CheckpointError(
            "the checkpoint holds something other than tensors and plain values",
            where=where,
            found=(lines or str(error).splitlines())[0].strip()[:200],
            mend="keep such objects out of hyperparameters and callbacks' state, or trust their class with "
            "`torch.serialization.add_safe_globals`",
        ) from error
    return rest


def _take(values: dict[str, Any], prefix: str, tensors: Tensors) -> dict[str, Any]:
    found = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    tensors.update({f"{prefix}{name}": value.detach() for name, value in found.items()})
    return {name: value for name, value in values.items() if name not in found}


def _under(tensors: Tensors, prefix: str) -> Tensors:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
