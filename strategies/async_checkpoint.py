"""`AsyncShardedCheckpoint`: checkpoints written beside training, that appear whole and load on any number of ranks.

A save copies the shards to host memory, which is all that training waits for; a thread then writes them with torch's
distributed checkpoint on a process group of its own (on the training group their collectives would interleave).
Lightning's `AsyncCheckpointIO` is ignored for sharded checkpoints, and returns before files are safe from a crash.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from os import PathLike
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from lightning_embodied.errors import CheckpointError
from lightning_embodied.strategies.checkpoint_reader import TensorReader, write_tensors
from lightning_embodied.strategies.checkpoint_state import (
    empty_like_stored,
    from_bytes,
    join_checkpoint,
    split_checkpoint,
    stored_tensors,
    to_bytes,
)
from lightning_embodied.strategies.checkpoint_storage import (
    CommittedCheckpoint,
    Publication,
    remove_checkpoint,
)

PLAIN_VALUES = "trainer.pt"


class AsyncShardedCheckpoint(CheckpointIO):
    """A checkpoint plugin for `FSDP2Strategy`, and for every strategy that saves on one rank (`ddp`, one device).

    Which checkpoints are written and kept stays with `ModelCheckpoint`, whose `dirpath` may be an fsspec URL. A
    checkpoint that it no longer wants is removed only when its successor is complete. Resume from a checkpoint, or from
    the directory that holds them: `trainer.fit(ckpt_path=dirpath)` takes the newest complete one.

    Args:
        asynchronous: Whether to write beside training. A save that comes while one is being written waits for it.
        timeout: How long ranks wait for each other while they write.
    """

    def __init__(self, asynchronous: bool = True, timeout: timedelta = timedelta(minutes=30)) -> None:
        self.asynchronous, self.timeout = asynchronous, timeout
        self._threads: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._stager: DefaultStager | None = None
        self._group: tuple[object, dist.ProcessGroup] | None = None
        self._failed = False

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | PathLike[str],
        storage_options: Any | None = None,  # noqa: ANN401
    ) -> None:
        """Begins a save; on all ranks if the state is sharded, else on one.

        Args:
            checkpoint: Lightning's; optimizer states by position, tensors possibly `DTensor`s.
            path: The checkpoint's directory or URL.
            storage_options: Nothing takes any.

        Raises:
            CheckpointError: This save cannot begin, or the one before it failed.
        """
        if storage_options is not None:
            raise CheckpointError("there are no storage options", where="save_checkpoint", found=storage_options)
        self.wait()
        tensors, rest = split_checkpoint(checkpoint)
        sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
        group = self._own_group() if sharded else None
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if group is not None else (0, 1)
        plain = to_bytes(rest)
        publication = _agreed(lambda: Publication.begin(os.fspath(path)), group)
        facts = {"global_step": rest.get("global_step"), "epoch": rest.get("epoch"), "world_size": ranks}
        staged = self._stage(tensors)

        def write() -> None:
            self._write(staged, publication, group, plain if rank == 0 else None, facts)

        self._submit(write)
        if not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            CheckpointError: A save failed; nothing of it will be found.
        """
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def load_checkpoint(
        self,
        path: str | PathLike[str],
        map_location: Any | None = None,  # noqa: ANN401
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Reads a whole checkpoint into memory, as strategies that do not shard need it.

        Args:
            path: A checkpoint, or a directory of checkpoints, of which the newest complete one is taken.
            map_location: Device for the tensors.
            weights_only: No code is unpickled whatever it says.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """
        self.wait()
        _, reader, rest = open_checkpoint(path)
        tensors = {name: empty_like_stored(stored) for name, stored in stored_tensors(reader.metadata).items()}
        reader.read_into(tensors)
        if isinstance(map_location, str | torch.device):
            tensors = {name: tensor.to(map_location) for name, tensor in tensors.items()}
        return join_checkpoint(tensors, rest)

    def remove_checkpoint(self, path: str | PathLike[str]) -> None:
        """Removes a checkpoint once the saves before are complete; one that failed keeps its predecessor."""
        self._submit(lambda: None if self._failed else remove_checkpoint(os.fspath(path)))

    def teardown(self) -> None:
        """Waits for the last save."""
        try:
            self.wait()
        finally:
            if self._threads is not None:
                self._threads.shutdown()
            if self._stager is not None:
                self._stager.close()
            self._threads = self._stager = self._group = None

    def _submit(self, work: Callable[[], None]) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending.append(self._threads.submit(work))

    def _own_group(self) -> dist.ProcessGroup:
        if self._group is None or self._group[0] is not dist.group.WORLD:
            self._group = dist.group.WORLD, dist.new_group(backend="gloo", timeout=self.timeout)
        return self._group[1]

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._stager is None:
            cuda = torch.cuda.is_available()
            self._stager = DefaultStager(StagingOptions(cuda, False, False, cuda))
        return cast(dict[str, Tensor], self._stager.stage(tensors))

    def _write(
        self,
        tensors: dict[str, Tensor],
        publication: Publication,
        group: dist.ProcessGroup | None,
        plain: bytes | None,
        facts: dict[str, Any],
    ) -> None:
        """Writes in the thread; `plain` is None on ranks that do not commit."""

        def commit() -> None:
            publication.write(PLAIN_VALUES, plain or b"")
            publication.commit(facts)

        self._failed = True
        try:
            write_tensors(tensors, publication.data, group)
            _agreed(commit, group)
        except (CheckpointException, OSError, RuntimeError) as error:
            raise _not_written(publication.target, error) from error
        self._failed = False


def open_checkpoint(path: str | PathLike[str]) -> tuple[CommittedCheckpoint, TensorReader, dict[str, Any]]:
    """Opens a complete checkpoint, or the newest one of a directory: what it is, its tensors, its plain values.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    found = CommittedCheckpoint.find(path)
    try:
        plain = found.read(PLAIN_VALUES)
    except OSError as error:
        raise CheckpointError("the checkpoint cannot be read", where=found.path, found=repr(error)) from error
    return found, TensorReader(found.data), from_bytes(plain, found.path)


def _agreed(act: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:  # noqa: ANN401
    """Acts on the first rank of a group; all return its result, or raise its error."""
    if group is None:
        return act()
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = act()
        except OSError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, group_src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _not_written(path: str, error: BaseException) -> CheckpointError:
    cause: BaseException = error
    where = path
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        where = f"{path} (rank {rank})"
    return CheckpointError(
        "a checkpoint was not written; the one before it is still complete",
        where=where,
        found=f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0][:200]}",
        mend="make room, or mend the storage, and resume from the directory of checkpoints",
    )
