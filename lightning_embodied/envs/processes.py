"""Worker processes that are neither forked nor re-import the user's script.

Fork copies a process whose other threads (torch, OpenGL) hold locks; multiprocessing's spawn and forkserver run the
user's main module again in each child (a console script imports the trainer, a script without a main guard starts
over). A worker here is a plain subprocess that imports what it hosts and nothing else.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from lightning_embodied.errors import EmbodiedError

_PATIENCE = 5.0


class WorkerProcess:
    """Hosts one object in another process and calls its methods there.

    The process ends with `close`, when this object is collected, and when this process ends in any way. It is in a
    process group of its own: Ctrl-C in the terminal reaches this process only.

    Args:
        factory: Makes the object; importable in the other process (not defined in a script's main module).
        *arguments: Its arguments, picklable.
    """

    def __init__(self, factory: Callable[..., object], *arguments: object) -> None:
        ours, theirs = socket.socketpair()
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  our own interpreter and module
                [sys.executable, "-m", "lightning_embodied.envs.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                process_group=0,
            )
        self._connection = Connection(ours.detach())
        self._stop = weakref.finalize(self, _stop, self._process, self._connection)
        self._connection.send((factory, arguments))
        self._pending = 1

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when an answer waits, so that workers can be passed to `multiprocessing.connection.wait`."""
        return self._connection.fileno()

    def send(self, method: str, *arguments: object) -> None:
        """Asks for a method call; `receive` gets the answer.

        Raises:
            EmbodiedError: The process has ended.
        """
        try:
            self._connection.send((method, arguments))
        except OSError as error:
            raise self._ended() from error
        self._pending += 1

    def receive(self) -> Any:  # noqa: ANN401  the hosted method's result
        """Waits for the answers of everything sent and returns the last.

        Raises:
            EmbodiedError: The process has ended.
            Exception: What the hosted object raised.
        """
        result: Any = None
        while self._pending:
            try:
                result, failure = self._connection.recv()
            except (EOFError, OSError) as error:
                raise self._ended() from error
            self._pending -= 1
            if failure is not None:
                raised, text = failure
                raised.add_note(f"in worker process {self.pid}:\n{text}")
                raise raised
        return result

    def call(self, method: str, *arguments: object) -> Any:  # noqa: ANN401  the hosted method's result
        """`send` and `receive`."""
        self.send(method, *arguments)
        return self.receive()

    def close(self) -> None:
        """Ends the process; a call it is executing is finished first, for five seconds at most."""
        self._stop()

    def _ended(self) -> EmbodiedError:
        code = self._process.poll()
        return EmbodiedError(
            "a worker process ended unexpectedly",
            where=f"process {self.pid}",
            found=f"exit code {code}" if code is not None else "its connection is closed",
            mend="if the code is -9 the machine was out of memory: use fewer environments at once",
        )


def _stop(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def default_workers(tasks: int) -> int:
    """How many worker processes to use for a number of independent tasks: one a usable core, no more than tasks."""
    return max(1, min(tasks, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
