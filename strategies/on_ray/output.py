"""Rank 0's terminal is the driver's: what it prints, progress bar included, appears there as it is written."""

from __future__ import annotations

import io
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TextIO

_STREAMS = ("stdout", "stderr")
_LIGHTNING = ("lightning.pytorch", "lightning.fabric")


@dataclass(frozen=True)
class Terminal:
    """What rank 0 has to know of the driver's terminal to draw for it.

    Args:
        is_terminal: Whether standard output and standard error are one, by name.
        columns: Its width.
    """

    is_terminal: dict[str, bool]
    columns: int

    @classmethod
    def of_this_process(cls) -> Terminal:
        """Looks at the streams of this process."""
        return cls({name: _isatty(getattr(sys, name)) for name in _STREAMS}, shutil.get_terminal_size().columns)


class ForwardedStream(io.TextIOBase):
    """A stream whose text goes to the driver.

    Args:
        send: Called with each text.
        terminal: What `isatty` answers.
    """

    encoding = "utf-8"

    def __init__(self, send: Callable[[str], None], terminal: bool) -> None:
        super().__init__()
        self._send = send
        self._terminal = terminal

    def write(self, text: str) -> int:
        """Sends text at once, as a terminal would show it."""
        if text:
            self._send(text)
        return len(text)

    def writable(self) -> bool:
        """True."""
        return True

    def isatty(self) -> bool:
        """Whether the driver's stream is a terminal."""
        return self._terminal


@contextmanager
def forwarded_output(send: Callable[[str, str], None], terminal: Terminal) -> Iterator[None]:
    """Sends what this process prints through Python to the driver.

    Args:
        send: Called with the stream's name and the text.
        terminal: Of the driver.
    """
    before = {name: getattr(sys, name) for name in _STREAMS}
    for name in _STREAMS:
        setattr(sys, name, ForwardedStream(_bind(send, name), terminal.is_terminal.get(name, False)))
    try:
        with _logging_follows(before):
            yield
    finally:
        for name, stream in before.items():
            setattr(sys, name, stream)


def _bind(send: Callable[[str, str], None], name: str) -> Callable[[str], None]:
    return lambda text: send(name, text)


@contextmanager
def _logging_follows(before: dict[str, TextIO]) -> Iterator[None]:
    """Handlers that were made with the old streams write to the new ones, and Lightning's messages appear once.

    Ray gives the root logger handlers for its files, and Lightning then leaves its messages to them.
    """
    with ExitStack() as stack:
        for name in _LIGHTNING:
            logger = logging.getLogger(name)
            if logger.propagate and not logger.handlers:
                handler: logging.StreamHandler[TextIO] = logging.StreamHandler(sys.stderr)
                logger.addHandler(handler)
                stack.callback(logger.removeHandler, handler)
                logger.propagate = False
                stack.callback(setattr, logger, "propagate", True)
        for name in list(logging.root.manager.loggerDict):
            for old in logging.getLogger(name).handlers:
                if isinstance(old, logging.StreamHandler) and old.stream in before.values():
                    stack.callback(old.setStream, old.stream)
                    old.setStream(sys.stdout if old.stream is before["stdout"] else sys.stderr)
        yield


def _isatty(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
