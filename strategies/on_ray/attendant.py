"""The driver's side of the conversation while an orchestration blocks it: output, hung workers and signals.

A thread asks the board for news a few times a second. A worker that has gone silent is killed where it runs, so that
Ray sees it die and either orchestration restarts; a process that is stopped cannot be asked to leave.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from lightning_embodied.strategies.on_ray.ranks import WorkerRecord

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2


class Attendant:
    """Thread beside a blocked driver.

    Args:
        ray: The `ray` module.
        board: Handle of the `RunBoard` actor.
        stop_grace: Seconds that ranks have to save and stop once asked to.
    """

    def __init__(self, ray: Any, board: Any, stop_grace: float) -> None:
        self._ray = ray
        self._board = board
        self._stop_grace = stop_grace
        self._done = threading.Event()
        self._stop_wanted: str | None = None
        self._deadline: threading.Timer | None = None
        self._thread = threading.Thread(target=self._attend, name="ray-attendant", daemon=True)

    def __enter__(self) -> Attendant:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._done.set()
        self._thread.join()
        if self._deadline is not None:
            self._deadline.cancel()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """While this lasts, the first SIGTERM or SIGINT lets all ranks save and stop; a second SIGINT interrupts."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop_wanted is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._stop_wanted = f"{signal.Signals(number).name} to the driver"  # the thread passes it on

    def _attend(self) -> None:
        sent = False
        while True:
            last = self._done.wait(_POLL_SECONDS)
            try:
                if self._stop_wanted is not None and not sent:
                    sent = True
                    self._ask_to_stop(self._stop_wanted)
                news = self._ray.get(self._board.news.remote())
            except Exception:  # Ray is gone, and the driver's own call says so
                return
            for stream, text in news.output:
                _show(stream, text)
            for record in news.hung:
                log.warning("rank %d (node %s, pid %d) hangs and is killed", record.rank, record.node, record.pid)
                self._kill(record)
            if last:
                return

    def _ask_to_stop(self, reason: str) -> None:
        log.warning("%s: all ranks save and stop; they have %g s", reason, self._stop_grace)
        self._ray.get(self._board.request_stop.remote(reason))
        self._deadline = threading.Timer(self._stop_grace, self.kill_all, [reason])
        self._deadline.daemon = True
        self._deadline.start()

    def kill_all(self, reason: str) -> None:
        """Ends the workers without more ado, and the run with them.

        Args:
            reason: Why.
        """
        self._ray.get(self._board.request_stop.remote(reason))  # so that nobody starts them again
        for record in self._ray.get(self._board.workers.remote()):
            self._kill(record)

    def _kill(self, record: WorkerRecord) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(record.node_id, soft=False)
        self._ray.remote(num_cpus=0)(_kill_process).options(scheduling_strategy=there).remote(record.pid)


def _kill_process(pid: int) -> None:
    import os

    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _show(stream: str, text: str) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(text)
    target.flush()
