"""The run's board: one small actor beside the driver that all workers and the orchestration write to.

It holds what must outlive any worker: the checkpoints that are complete, who failed of what, when each rank was last
heard of, rank 0's output and the results. Both orchestrations ask it what to do next, so they cannot disagree.
This class is plain Python; Ray makes an actor of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_embodied.strategies.on_ray.checkpoints import CheckpointLog, KeptGenerators
from lightning_embodied.strategies.on_ray.failures import FailureKind, RankFailure
from lightning_embodied.strategies.on_ray.halt import Halt, HaltPoint
from lightning_embodied.strategies.on_ray.ranks import Beginning, WorkerRecord


@dataclass(frozen=True)
class BoardConfig:
    """What the board is told once.

    Args:
        max_restarts: Restarts before a failure ends the run.
        hang_timeout: Seconds without a sign of life after which a rank counts as hung.
        payload: References to what the workers run; in a list, so that Ray passes them on unopened.
    """

    max_restarts: int
    hang_timeout: float
    payload: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class News:
    """What the driver gets when it asks.

    Args:
        output: `(stream, text)` of rank 0 since it last asked.
        hung: Workers that went silent since it last asked.
    """

    output: list[tuple[str, str]]
    hung: list[WorkerRecord]


class RunBoard:
    """State of one run over all its attempts.

    Args:
        config: See `BoardConfig`.
    """

    def __init__(self, config: BoardConfig) -> None:
        self._config = config
        self._checkpoints = CheckpointLog()
        self._generators = KeptGenerators()
        self._output: list[tuple[str, str]] = []
        self._attempt = -1
        self._restarts = 0
        self._halt = Halt()
        self._world_size = 0
        self._workers: dict[int, WorkerRecord] = {}
        self._failures: dict[int, RankFailure] = {}
        self._results: dict[int, bytes] = {}

    def payload(self) -> list[Any]:
        """References to what the workers run."""
        return self._config.payload

    def begin(self, world_size: int) -> Beginning:
        """Starts the next attempt.

        Args:
            world_size: Its number of workers.
        """
        self._attempt += 1
        self._world_size = world_size
        self._halt.begin()
        self._workers, self._failures, self._results = {}, {}, {}
        newest = self._checkpoints.newest() if self._attempt else None
        return Beginning(self._attempt, *newest) if newest else Beginning(self._attempt)

    def join(self, attempt: int, rank: int, pid: int, node_id: str, node: str) -> None:
        """A worker says where it is.

        Args:
            attempt: The attempt it belongs to.
            rank: Its rank.
            pid: Its process.
            node_id: Ray's id of its node.
            node: The node's host name.
        """
        if attempt == self._attempt:
            self._workers[rank] = WorkerRecord(rank, pid, node_id, node, time.monotonic())

    def beat(self, attempt: int, rank: int, knows_stop: bool) -> bool:
        """A sign of life.

        Args:
            attempt: The attempt of the worker.
            rank: Its rank.
            knows_stop: Whether it has been told to stop.

        Returns:
            Whether all ranks are to save and stop.
        """
        if attempt == self._attempt and rank in self._workers:
            record = self._workers[rank]
            record.heard, record.knows_stop = time.monotonic(), knows_stop
        return self._halt.wanted

    def leave(self, attempt: int, rank: int) -> None:
        """A worker is done and will give no more signs of life.

        Args:
            attempt: The attempt of the worker.
            rank: Its rank.
        """
        if attempt == self._attempt:
            self._workers.pop(rank, None)

    def fail(self, attempt: int, failure: RankFailure) -> None:
        """A rank failed; the first word about it stands.

        Args:
            attempt: The attempt of the worker.
            failure: What happened.
        """
        if attempt == self._attempt:
            self._failures.setdefault(failure.rank, failure)

    def finish(self, attempt: int, rank: int, result: bytes, stopped: bool = False) -> None:
        """A rank came to its end.

        Args:
            attempt: The attempt of the worker.
            rank: Its rank.
            result: What it sends to the driver.
            stopped: Whether it saved and stopped because it was asked to.
        """
        if attempt == self._attempt:
            self._results[rank] = result
            if stopped:
                self._halt.saved(rank)

    def saving(self, path: str) -> None:
        """A checkpoint is about to be written: what was there before no longer counts."""
        self._checkpoints.discard(path)

    def saved(self, path: str, step: int) -> None:
        """A checkpoint that a run can resume from is written.

        Args:
            path: Where.
            step: Optimizer steps done.
        """
        self._checkpoints.add(path, step)
        self._generators.forget(path, before=step)

    def removed(self, path: str) -> None:
        """A checkpoint is deleted."""
        self._checkpoints.discard(path)
        self._generators.forget(path)

    def keep_generators(self, path: str, step: int, rank: int, state: bytes) -> None:
        """Random generators of a rank as they were when a checkpoint was taken, which holds none.

        Args:
            path: The checkpoint.
            step: Its optimizer steps.
            rank: The rank.
            state: Its generators.
        """
        self._generators.keep(path, step, rank, state)

    def generators(self, path: str, step: int, rank: int) -> bytes | None:
        """What a rank kept for a checkpoint; None if the number of ranks has changed since.

        Args:
            path: The checkpoint.
            step: Its optimizer steps.
            rank: The rank.
        """
        kept = self._generators.of(path, step)
        return kept.get(rank) if len(kept) == self._world_size else None

    def write(self, stream: str, text: str) -> None:
        """Output of rank 0.

        Args:
            stream: `stdout` or `stderr`.
            text: What it wrote.
        """
        self._output.append((stream, text))

    def news(self) -> News:
        """What the driver has not seen yet."""
        output, self._output = self._output, []
        now = time.monotonic()
        silent = [
            record
            for record in self._workers.values()
            if not record.hung and now - record.heard > self._config.hang_timeout
        ]
        for record in silent:
            record.hung = True
            seconds = f"no sign of life for {self._config.hang_timeout:g} s"
            self.fail(self._attempt, RankFailure(record.rank, FailureKind.HUNG, seconds, record.node, record.pid))
        return News(output, [replace(record) for record in silent])

    def workers(self) -> list[WorkerRecord]:
        """Those that are running."""
        return [replace(record) for record in self._workers.values()]

    def request_stop(self, reason: str) -> None:
        """All ranks are to save and stop; the first reason stands.

        Args:
            reason: Who wants it and why.
        """
        self._halt.request(reason)

    def stop_reason(self) -> str | None:
        """Why the run is to stop; None when it is not."""
        return self._halt.reason

    def request_resize(self) -> None:
        """All ranks are to save and stop, for another number of them to go on."""
        self._halt.request_resize()

    def resizes(self) -> bool:
        """Whether all ranks have saved and stopped so that another number of them goes on."""
        return self._halt.goes_on(self._world_size)

    def awaits_resize(self, rank: int) -> bool:
        """Whether a rank has saved and is about to be replaced.

        Args:
            rank: The rank.
        """
        return self._halt.waits(rank)

    def halt_point(self, attempt: int, rank: int, batches: int) -> HaltPoint | None:
        """Where all ranks stop; see `Halt.point`.

        Args:
            attempt: The attempt of the worker.
            rank: Its rank.
            batches: Training batches it has done in this attempt.
        """
        if attempt != self._attempt:
            return None
        others = (record for record in self._workers.values() if record.rank != rank)
        all_told = len(self._workers) == self._world_size and all(record.knows_stop for record in others)
        return self._halt.point(rank, batches, all_told)

    def may_restart(self, lost: dict[int, str]) -> bool:
        """Whether a failed attempt is followed by another; counts it if so.

        Args:
            lost: What the orchestration saw of each rank it lost; used where the rank itself said nothing.
        """
        for rank, summary in lost.items():
            record = self._workers.get(rank)
            node, pid = (record.node, record.pid) if record else ("unknown", 0)
            self.fail(self._attempt, RankFailure(rank, FailureKind.DIED, summary, node, pid))
        user_error = any(failure.kind is FailureKind.EXCEPTION for failure in self._failures.values())
        if user_error or self._halt.reason is not None or self._restarts >= self._config.max_restarts:
            return False
        self._restarts += 1
        return True

    def failures(self) -> list[RankFailure]:
        """Those of the current attempt."""
        return list(self._failures.values())

    def restarts(self) -> int:
        """How often the run was restarted after a failure."""
        return self._restarts

    def results(self) -> dict[int, bytes]:
        """What each rank of the current attempt sent."""
        return self._results
