"""What went wrong on which rank, and which of several failures is the cause of the others.

When one rank stops, the others lose their connection to it, often before the first one has finished saying why; so
neither rank nor time tells the cause. The kind does: an exception of the user's code before a process that hung or
died, and those before a broken connection.
"""

from __future__ import annotations

import pickle
import socket
import traceback
from dataclasses import dataclass
from enum import IntEnum

import cloudpickle

from lightning_embodied.errors import EmbodiedError

_BROKEN_CONNECTION = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "gloo/transport",
    "timed out waiting",
    "socket timeout",
    "nccl error",
    "nccl communicator was aborted",
    "watchdog caught collective operation timeout",
    "connectfullmesh failed",
)


class FailureKind(IntEnum):
    """Kinds of failure, likelier causes first."""

    EXCEPTION = 0
    HUNG = 1
    DIED = 2
    CONNECTION = 3


@dataclass(frozen=True)
class RankFailure:
    """The end of one rank.

    Args:
        rank: Which.
        kind: What ended it.
        summary: One line: the exception's type and message, or how the process went.
        node: Host name.
        pid: Process id there.
        traceback: Of the exception; empty when there was none.
        pickled: The exception itself where it can be sent.
    """

    rank: int
    kind: FailureKind
    summary: str
    node: str
    pid: int
    traceback: str = ""
    pickled: bytes | None = None

    @property
    def place(self) -> str:
        """Rank, node and process in words."""
        return f"rank {self.rank} (node {self.node}, pid {self.pid})"

    @classmethod
    def of(cls, error: BaseException, rank: int, pid: int) -> RankFailure:
        """Describes an exception in the process it was raised in.

        Args:
            error: The exception.
            rank: Of this process.
            pid: Of this process.
        """
        lines = "".join(traceback.format_exception(error))
        summary = f"{type(error).__name__}: {error}"
        return cls(rank, classify(error), summary, socket.gethostname(), pid, lines, _pickled(error))


class WorkerFailedError(RuntimeError):
    """Tells the orchestration that a rank failed; the board has the details."""


class RankFailedError(RuntimeError):
    """A worker failed and the run was not, or no longer, restarted.

    Args:
        failures: All that are known, in any order, at least one.
        restarts: How often the run had been restarted before.
    """

    def __init__(self, failures: list[RankFailure], restarts: int = 0) -> None:
        self.failures = sorted(failures, key=lambda failure: (failure.kind, failure.rank))
        self.restarts = restarts
        super().__init__(_describe(self.failures, restarts))

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[list[RankFailure], int]]:
        return type(self), (self.failures, self.restarts)


def classify(error: BaseException) -> FailureKind:
    """Whether an exception is the user's or a connection that another rank broke.

    Args:
        error: What was raised on a rank.
    """
    import torch.distributed as dist  # here, for the board needs this module and not torch

    if isinstance(error, dist.DistError):
        return FailureKind.CONNECTION
    text = str(error).lower()
    broken = isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _BROKEN_CONNECTION)
    return FailureKind.CONNECTION if broken else FailureKind.EXCEPTION


def to_raise(failures: list[RankFailure], restarts: int) -> BaseException:
    """The exception that the driver raises.

    Args:
        failures: All that are known, at least one.
        restarts: How often the run had been restarted.

    Returns:
        An error about the user's input as it was raised on the rank, else a `RankFailedError`; with the original as
        its cause where it could be sent.
    """
    failed = RankFailedError(failures, restarts)
    cause = failed.failures[0]
    original = _unpickled(cause.pickled)
    if isinstance(original, EmbodiedError):
        original.add_note(f"raised on {cause.place}")
        return original
    failed.__cause__ = original
    return failed


def _describe(failures: list[RankFailure], restarts: int) -> str:
    first, *others = failures
    again = f" after {restarts} restart{'s' if restarts != 1 else ''}" if restarts else ""
    lines = [f"{first.place} failed{again}: {first.summary}"]
    if first.traceback:
        lines += ["", first.traceback.rstrip()]
    lines += [f"then {other.place}: {_one_line(other.summary)}" for other in others]
    return "\n".join(lines)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 160 else line[:157] + "..."


def _pickled(error: BaseException) -> bytes | None:
    try:
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)  # noqa: S301 - our own bytes: an exception that cannot be rebuilt must not be sent
    except Exception:
        return None
    return data


def _unpickled(data: bytes | None) -> BaseException | None:
    if data is None:
        return None
    try:
        error = pickle.loads(data)  # noqa: S301 - from our own worker
    except Exception:  # a class that only the worker can import
        return None
    return error if isinstance(error, BaseException) else None
