"""Main module of a worker process: hosts one object and executes its methods on request.

`processes.WorkerProcess` starts it with the file descriptor of a connected socket. It ends when the other side closes
the socket, so it cannot outlive its parent, however that died.
"""

from __future__ import annotations

import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def main(descriptor: int) -> None:
    """Serves requests until the parent closes the connection.

    Args:
        descriptor: File descriptor of the socket. The first message is `(factory, arguments)`, each further one
            `(method, arguments)`; each is answered by `(result, None)` or `(None, (exception, traceback text))`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    connection = Connection(descriptor)
    hosted: Any = None
    try:
        while True:
            try:
                target, arguments = connection.recv()
                if hosted is None:
                    hosted = target(*arguments)
                    answer: tuple[Any, Any] = (None, None)
                else:
                    answer = (getattr(hosted, target)(*arguments), None)
            except EOFError:
                break
            except Exception as error:  # whatever it is, the parent raises it
                answer = (None, (error, traceback.format_exc()))
            _send(connection, answer)
    except (BrokenPipeError, ConnectionResetError):  # the parent is gone
        pass
    if hasattr(hosted, "close"):
        hosted.close()


def _send(connection: Connection, answer: tuple[Any, Any]) -> None:
    try:
        connection.send(answer)
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:  # an answer that cannot be pickled
        text = traceback.format_exc()
        connection.send((None, (RuntimeError(f"{type(error).__name__}: {error}"), text)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
