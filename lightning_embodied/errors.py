"""What bad input ends in: one message that names the place, what was found, what was expected and the mend.

Every room raises these and nothing else for input it cannot use, so that the command line can show the message
without a traceback and a program can catch `EmbodiedError`.
"""

from __future__ import annotations

import importlib
from types import ModuleType


class EmbodiedError(Exception):
    """Base of all errors about the user's input.

    Args:
        problem: What is wrong, one clause without a full stop.
        where: The file, key or option it was found in.
        found: The value found there.
        expected: What would have been right.
        mend: What to do about it, in the imperative.
    """

    def __init__(
        self,
        problem: str,
        *,
        where: object = None,
        found: object = None,
        expected: object = None,
        mend: str | None = None,
    ) -> None:
        self.problem = problem
        self.where = where
        self.found = found
        self.expected = expected
        self.mend = mend
        parts = [("where", where), ("found", found), ("expected", expected), ("mend", mend)]
        lines = [problem, *(f"  {name + ':':<10}{value}" for name, value in parts if value is not None)]
        super().__init__("\n".join(lines))


class DatasetError(EmbodiedError, ValueError):
    """A dataset that is missing, damaged or inconsistent with itself."""


class ConfigError(EmbodiedError, ValueError):
    """An option or combination of options that cannot work."""


class CheckpointError(EmbodiedError, ValueError):
    """A checkpoint that cannot be read or does not fit what it is used for."""


class TrainingError(EmbodiedError, RuntimeError):
    """A run that goes on computes nothing of use."""


class MissingExtraError(EmbodiedError, ImportError):
    """An optional package is needed and not installed, or is installed and broken."""


def import_extra(module: str, extra: str) -> ModuleType:
    """Imports an optional package where it is needed.

    Args:
        module: Dotted module name.
        extra: The extra of this project that brings it.

    Raises:
        MissingExtraError: The module cannot be imported; names the extra to install.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # a half-installed package raises RuntimeError or OSError, not only ImportError
        raise MissingExtraError(
            f"the package {module!r} cannot be imported",
            found=f"{type(error).__name__}: {error}",
            mend=f"pip install 'lightning-embodied[{extra}]'",
        ) from error
