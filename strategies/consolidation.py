"""Makes one file of a sharded checkpoint: weights as safetensors, or a Lightning checkpoint to act and evaluate with.

Safetensors are written tensor by tensor, so that a model of any size needs the memory of its largest tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_embodied.errors import ConfigError
from lightning_embodied.strategies.async_checkpoint import open_checkpoint
from lightning_embodied.strategies.checkpoint_reader import TensorReader
from lightning_embodied.strategies.checkpoint_state import MODEL, empty_like_stored, stored_tensors

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Stored = dict[str, TensorStorageMetadata]


def consolidate(checkpoint: str, output: str, prefix: str = "") -> None:
    """Makes one file of a sharded checkpoint.

    Args:
        checkpoint: A sharded checkpoint, or a directory of them, of which the newest complete one is taken.
        output: The file to write: `.safetensors` for the weights, `.ckpt` for a Lightning checkpoint without optimizer.
        prefix: What to leave off the names of weights (`model.`); weights with other names are left out.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
        ConfigError: The output has another ending, or no weight has the prefix.
    """
    target = Path(output)
    found, reader, rest = open_checkpoint(checkpoint)
    start = f"{MODEL}.{prefix}"
    stored = {k.removeprefix(start): v for k, v in stored_tensors(reader.metadata).items() if k.startswith(start)}
    if not stored:
        raise ConfigError("no weight has this prefix", where="prefix", found=prefix, expected="for example `model.`")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    tensors = _tensors(reader, stored, start)
    if target.suffix == ".safetensors":
        with partial.open("wb") as file:
            _write_safetensors(file, stored, tensors)
    elif target.suffix == ".ckpt":
        torch.save({**rest, MODEL: {**rest[MODEL], **dict(tensors)}}, partial)
    else:
        raise ConfigError("no such format", where="output", found=output, expected="a name in .safetensors or .ckpt")
    os.replace(partial, target)
    print(f"{target}: {len(stored)} tensors, {target.stat().st_size / 1e9:.3f} GB, from {found.path}")


def _tensors(reader: TensorReader, stored: Stored, start: str) -> Iterator[tuple[str, Tensor]]:
    for name, one in stored.items():
        tensor = empty_like_stored(one)
        reader.read_into({f"{start}{name}": tensor})
        yield name, tensor


def _write_safetensors(file: IO[bytes], stored: Stored, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """The format is a length, a JSON header of that length, and the tensors' bytes one after the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, one in stored.items():
        end = offset + one.size.numel() * one.properties.dtype.itemsize
        entry = {"dtype": _DTYPES[one.properties.dtype], "shape": list(one.size), "data_offsets": [offset, end]}
        header[name], offset = entry, end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for _, tensor in tensors:
        file.write(tensor.flatten().view(torch.uint8).numpy().data)
    file.flush()
    os.fsync(file.fileno())
