"""Reads and writes the tensors of a checkpoint with torch's distributed checkpoint (DCP), pickled code excluded.

DCP keeps its index as a pickle; reading it with `pickle.load` would run whatever a stranger's checkpoint says. Here
only the index's own classes are built.
"""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_embodied.errors import CheckpointError
from lightning_embodied.strategies.checkpoint_storage import is_local

_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}


def write_tensors(tensors: dict[str, Tensor], path: str, group: dist.ProcessGroup | None) -> None:
    """Writes tensors to a fresh directory; all ranks of the group call it.

    Args:
        tensors: By name; of a `DTensor` each rank writes its shard, of copies one rank writes one.
        path: Directory or URL.
        group: A gloo group that nobody else is using, or None to write alone.

    Raises:
        CheckpointException: Some rank could not write.
    """
    writer = FileSystemWriter(path) if is_local(path) else FsspecWriter(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)


class TensorReader:
    """The tensors of a checkpoint.

    Args:
        path: Directory or URL of the data.

    Attributes:
        metadata: DCP's index.

    Raises:
        CheckpointError: The index is missing, damaged or not only an index.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._reader = _LocalReader(path) if is_local(path) else _RemoteReader(path)
        try:
            self.metadata = self._reader.read_metadata()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
            raise _unreadable(path, error) from error

    def read_into(self, tensors: dict[str, Tensor]) -> None:
        """Fills tensors by name; of a `DTensor` this rank's shard alone. Ranks need not call it together.

        Raises:
            CheckpointError: A file is missing or damaged, or a tensor has another shape.
        """
        self._check(tensors)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(tensors, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise _unreadable(self.path, cause) from error

    def _check(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            stored = getattr(self.metadata.state_dict_metadata[name], "size", None)
            if stored != tensor.shape:
                raise CheckpointError(
                    "a tensor has another shape",
                    where=f"{self.path}: {name}",
                    found=None if stored is None else list(stored),
                    expected=list(tensor.shape),
                )


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in the index of a checkpoint")


class _IndexOnly(FileSystemReader):
    """Reads the index without running code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ANN401
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as stream:
            metadata = _IndexUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"the index is a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _LocalReader(_IndexOnly):
    pass


class _RemoteReader(_IndexOnly, FsspecReader):
    pass


def _unreadable(path: str, error: BaseException) -> CheckpointError:
    return CheckpointError(
        "the checkpoint cannot be read",
        where=path,
        found=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}",
        mend="take another checkpoint; a file of this one is missing, damaged or not a checkpoint's",
    )
