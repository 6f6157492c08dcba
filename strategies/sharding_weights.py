"""Builds a model without memory for its weights, and reads from safetensors files only the rows each rank holds.

On the meta device a parameter has a shape and no data. Sharding it first and reading afterwards means that no rank
ever holds, or reads, the whole model: a shard is a range of rows, which lies in the file as one range of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_embodied.errors import CheckpointError

INDEX = "model.safetensors.index.json"


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which modules get parameters without data; buffers are made as usual, with theirs.

    Initialising costs nothing either. `load_weights` gives the parameters their values.
    """

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta:
            return None
        return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def load_weights(module: nn.Module, path: str | PathLike[str], device: torch.device, prefix: str = "") -> None:
    """Reads a sharded module's parameters, of each its own rows only, and gives meta parameters memory first.

    What the files lack and already has values keeps them; what is on the meta device is initialised by the
    `reset_parameters` of its module.

    Args:
        module: Sharded or not.
        path: A safetensors file, or a directory with `model.safetensors` or with shards and their index.
        device: Where parameters on the meta device get their memory.
        prefix: What the module's names have in front of the files' (`model.`).

    Raises:
        CheckpointError: A file is missing or damaged, a shape differs, no name fits, or a parameter on the meta device
            is in no file and its module cannot initialise it.
    """
    empty = {name for name, param in module.named_parameters() if param.is_meta}
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
    named = {name: param for name, param in module.named_parameters() if name.startswith(prefix)}
    with _opened(Path(path)) as files:
        places = {name: name.removeprefix(prefix) for name in named if name.removeprefix(prefix) in files}
        if not places:
            raise CheckpointError(
                "no weight in the files has the name of a parameter",
                where=path,
                found=", ".join(list(files)[:3]),
                expected=", ".join([name.removeprefix(prefix) for name in named][:3]),
                mend="set the prefix that the module's names have in front of the files'",
            )
        for name, place in places.items():
            _read_rows(named[name], files[place].get_slice(place), f"{path}: {place}")
    _initialize(module, empty - set(places), path)


def _read_rows(param: nn.Parameter, stored: Any, where: str) -> None:  # noqa: ANN401
    if list(param.shape) != list(stored.get_shape()):
        raise CheckpointError(
            "a weight has another shape", where=where, found=stored.get_shape(), expected=list(param.shape)
        )
    with torch.no_grad():
        if not isinstance(param, DTensor):
            param.copy_(stored[:])
            return
        (chunk,) = param.__create_chunk_list__()  # type: ignore[no-untyped-call]
        rows = slice(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
        if chunk.sizes[0]:
            param.to_local().copy_(stored[rows])


def _initialize(module: nn.Module, missing: set[str], path: str | PathLike[str]) -> None:
    left = set(missing)
    for prefix, owner in module.named_modules():
        own = {f"{prefix}.{name}" if prefix else name for name, _ in owner.named_parameters(recurse=False)}
        if own and own <= missing and callable(reset := getattr(owner, "reset_parameters", None)):
            reset()
            left -= own
    if left:
        raise CheckpointError(
            "parameters are in no file, and their modules cannot initialise them",
            where=path,
            found=", ".join(sorted(left)[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else ""),
            expected="weights for them, or modules with `reset_parameters`",
            mend="check the prefix; to train from other weights, take a checkpoint that holds these",
        )


@contextmanager
def _opened(path: Path) -> Iterator[Mapping[str, Any]]:
    """Name of a stored tensor to its open file."""
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(file, framework="pt")) for file in _files(path)]
            yield {name: file for file in files for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, json.JSONDecodeError, KeyError) as error:
        raise CheckpointError(
            "the weights cannot be read",
            where=path,
            found=f"{type(error).__name__}: {error}",
            expected="a .safetensors file, or a directory with model.safetensors or its shards and their index",
        ) from error


def _files(path: Path) -> list[Path]:
    if path.is_dir() and (path / INDEX).is_file():
        return sorted({path / name for name in json.loads((path / INDEX).read_text())["weight_map"].values()})
    return [path / "model.safetensors" if path.is_dir() else path]
