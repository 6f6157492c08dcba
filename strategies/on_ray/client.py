"""A worker's line to the run's board: signs of life beside training, everything else on the spot.

The signs of life come from a thread of their own, so a step may take as long as it likes; a process that is stopped,
or whose machine is gone, sends none.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
from typing import TYPE_CHECKING, Any

from lightning_embodied.errors import import_extra
from lightning_embodied.strategies.lightning_compat import GlobalState
from lightning_embodied.strategies.on_ray.failures import RankFailure
from lightning_embodied.strategies.on_ray.ranks import sigterm_received

if TYPE_CHECKING:
    from lightning_embodied.strategies.on_ray.halt import HaltPoint
    from lightning_embodied.strategies.on_ray.ranks import Assignment

_BEAT_SECONDS = 1.0


class BoardClient:
    """What one worker says to the board and hears from it.

    Args:
        board: Handle of the `RunBoard` actor.
        assignment: Place of this worker.
    """

    def __init__(self, board: Any, assignment: Assignment) -> None:
        self._ray = import_extra("ray", "ray")
        self._board = board
        self._attempt = assignment.attempt
        self._rank = assignment.rank
        self._ended = threading.Event()
        self.stop_requested = False

    def __enter__(self) -> BoardClient:
        node_id = self._ray.get_runtime_context().get_node_id()
        self._ask("join", self._attempt, self._rank, os.getpid(), node_id, socket.gethostname())
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._ended.set()
        self._thread.join()
        self._ask("leave", self._attempt, self._rank)

    def failed(self, error: BaseException) -> None:
        """Tells of an exception, before the other ranks notice that this one is gone."""
        self._ask("fail", self._attempt, RankFailure.of(error, self._rank, os.getpid()))

    def finished(self, result: bytes, stopped: bool) -> None:
        """Hands over what this rank sends to the driver, and whether it stopped because it was asked to."""
        self._ask("finish", self._attempt, self._rank, result, stopped)

    def saving(self, path: str) -> None:
        """A checkpoint is about to be written."""
        self._ask("saving", path)

    def saved(self, path: str, step: int) -> None:
        """A checkpoint that a run can resume from is written."""
        self._ask("saved", path, step)

    def removed(self, path: str) -> None:
        """A checkpoint is deleted."""
        self._ask("removed", path)

    def keep_generators(self, path: str, step: int) -> None:
        """Keeps this rank's random generators for a restart from a checkpoint."""
        self._ask("keep_generators", path, step, self._rank, pickle.dumps(GlobalState.capture()))

    def generators(self, path: str, step: int) -> GlobalState | None:
        """What this rank kept for a checkpoint."""
        kept: bytes | None = self._ask("generators", path, step, self._rank)
        return None if kept is None else pickle.loads(kept)  # noqa: S301 - from a worker of this run

    def write(self, stream: str, text: str) -> None:
        """Shows text on the driver's terminal; does not wait for it."""
        self._board.write.remote(stream, text)

    def halt_point(self, batches: int) -> HaltPoint | None:
        """Where all ranks stop; see `Halt.point`."""
        answer: HaltPoint | None = self._ask("halt_point", self._attempt, self._rank, batches)
        return answer

    def _ask(self, method: str, *args: Any) -> Any:
        return self._ray.get(getattr(self._board, method).remote(*args))

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            try:
                if sigterm_received.is_set() and not self.stop_requested:
                    self._ask("request_stop", f"SIGTERM on rank {self._rank} (pid {os.getpid()})")
                self.stop_requested = self._ask("beat", self._attempt, self._rank, self.stop_requested)
            except Exception:  # the board is gone with the driver, and Ray ends this process next
                return
