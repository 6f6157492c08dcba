"""Where checkpoints lie, and how they appear: whole or not at all, on disks and on object stores alike.

A checkpoint is a directory `X.ckpt` with a fresh `data-…` directory and a marker, `COMMITTED`, that names it and is
written last, in one piece. A first save to a local disk is written under a hidden name and renamed; a save over an
existing checkpoint leaves the old data in place until the marker points at the new. Whatever moment a save is cut
short at, what is found is the last complete one.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from os import PathLike
from typing import Any
from uuid import uuid4

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_embodied.errors import CheckpointError

MARKER, FORMAT = "COMMITTED", 1


@dataclass(frozen=True)
class Publication:
    """One save: its data goes to `data`, and nobody finds it before `commit`. The same on all ranks.

    Attributes:
        target: The checkpoint's path or URL.
        directory: What is written to: `target`, or a hidden directory beside it.
        token: Distinguishes the data from that of other saves.
    """

    target: str
    directory: str
    token: str

    @classmethod
    def begin(cls, target: str) -> Publication:
        """Chooses where to write; one rank does, for all."""
        fs, path = _storage(target)
        token = uuid4().hex[:12]
        if not isinstance(fs, LocalFileSystem):
            return cls(target, target, token)
        parent, name = os.path.split(path)
        if os.path.isdir(path) and not os.path.islink(path):
            return cls(path, path, token)
        return cls(path, os.path.join(parent, f".{name}.partial-{token}"), token)

    @property
    def data(self) -> str:
        """Path or URL of the fresh directory for the data."""
        return f"{self.directory}/data-{self.token}"

    def write(self, name: str, content: bytes) -> None:
        """Writes a file beside the tensors."""
        fs, path = _storage(f"{self.data}/{name}")
        fs.makedirs(os.path.dirname(path), exist_ok=True)
        _write(fs, path, content)

    def commit(self, facts: dict[str, Any]) -> None:
        """Makes the checkpoint appear, and removes what it replaces; one rank does, when all have written.

        Args:
            facts: Plain values for the marker.
        """
        fs, path = _storage(self.directory)
        marker = {"format": FORMAT, "data": f"data-{self.token}", "time": time.time(), **facts}
        _write(fs, f"{path}/{MARKER}", json.dumps(marker, indent=1).encode())
        if self.directory != self.target:
            parent, name = os.path.split(self.target)
            if os.path.lexists(self.target):  # a link, or a file of another format
                os.remove(self.target)
            os.replace(path, self.target)
            _sync(parent)
            left = [f"{parent}/{entry}" for entry in os.listdir(parent) if entry.startswith(f".{name}.partial-")]
        else:
            kept = {MARKER, marker["data"]}
            left = [entry for entry in fs.ls(path, detail=False) if os.path.basename(entry.rstrip("/")) not in kept]
        for entry in left:  # of saves that were cut short, or replaced
            fs.rm(entry, recursive=True)


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A complete checkpoint.

    Attributes:
        path: Its path or URL.
        data: Path or URL of its data.
        marker: What the marker says: `global_step`, `epoch`, `time`, `world_size`.
    """

    path: str
    data: str
    marker: dict[str, Any]

    @classmethod
    def find(cls, path: str | PathLike[str]) -> CommittedCheckpoint:
        """Opens a checkpoint, or the newest one of a directory of checkpoints.

        Raises:
            CheckpointError: Nothing complete is there.
        """
        path = os.fspath(path)
        found = _read(path) or _newest(path)
        if found is None:
            fs, place = _storage(path)
            raise CheckpointError(
                "there is no complete checkpoint",
                where=path,
                found="a save that was cut short, or something else" if fs.exists(place) else "no such directory",
                expected=f"a checkpoint directory with its marker ({MARKER}), or a directory of such",
                mend="resume from the directory that holds the run's checkpoints: the newest complete one is taken",
            )
        return found

    def read(self, name: str) -> bytes:
        """A file beside the tensors."""
        fs, path = _storage(f"{self.data}/{name}")
        content: bytes = fs.cat_file(path)
        return content


def is_sharded_checkpoint(path: str | PathLike[str]) -> bool:
    """Whether a path is a complete checkpoint of this format, or a directory that holds one."""
    return (_read(os.fspath(path)) or _newest(os.fspath(path))) is not None


def latest_checkpoint(directory: str | PathLike[str]) -> str | None:
    """Path of the newest complete checkpoint in a directory; None if there is none."""
    found = _newest(os.fspath(directory))
    return None if found is None else found.path


def remove_checkpoint(path: str) -> None:
    """Removes a checkpoint of any format; the marker goes first, so that what remains is not found."""
    fs, place = _storage(path)
    if fs.exists(f"{place}/{MARKER}"):
        fs.rm_file(f"{place}/{MARKER}")
    if fs.exists(place):
        fs.rm(place, recursive=True)


def is_local(path: str) -> bool:
    """Whether a path or URL names a place on this machine's file systems."""
    return isinstance(_storage(path)[0], LocalFileSystem)


def _newest(directory: str) -> CommittedCheckpoint | None:
    fs, place = _storage(directory)
    if not fs.isdir(place):
        return None
    names = [os.path.basename(entry["name"].rstrip("/")) for entry in fs.ls(place, detail=True)]
    found = [_read(f"{directory.rstrip('/')}/{name}") for name in names if not name.startswith(".")]
    return max((one for one in found if one is not None), key=lambda one: one.marker["time"], default=None)


def _read(path: str) -> CommittedCheckpoint | None:
    fs, place = _storage(path)
    try:
        marker = json.loads(fs.cat_file(f"{place}/{MARKER}"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(marker, dict) or marker.get("format") != FORMAT:
        raise CheckpointError("the checkpoint is of another format", where=path, found=marker, expected=FORMAT)
    return CommittedCheckpoint(path, f"{path.rstrip('/')}/{marker['data']}", marker)


def _storage(path: str) -> tuple[AbstractFileSystem, str]:
    fs, place = url_to_fs(path)
    return fs, place


def _write(fs: AbstractFileSystem, path: str, content: bytes) -> None:
    """Writes a file that is there whole or not: object stores do so themselves."""
    if not isinstance(fs, LocalFileSystem):
        fs.pipe_file(path, content)
        return
    with open(f"{path}.tmp", "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)
    _sync(os.path.dirname(path))


def _sync(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
