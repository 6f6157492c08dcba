"""Parsers whose errors a reader can act on: the key, the closest valid one, no page of usage text.

jsonargparse's own messages are turned into ours by `explain`; nothing about what is accepted changes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from lightning_embodied.cli.explain import explain
from lightning_embodied.errors import EmbodiedError


class ReadableErrors:
    """Mixin before an `ArgumentParser`: `error` prints one explained message and exits with code 2.

    Half an option's name is an error too: `--trainer.max_step` may mean another option in the next version.

    Args:
        args: Of `ArgumentParser`.
        kwargs: Of `ArgumentParser`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Called by the parser for everything it cannot use.

        Args:
            message: The parser's own message.
            ex: What was caught.
        """
        if not self.exit_on_error or "JSONARGPARSE_DEBUG" in os.environ:  # type: ignore[attr-defined]
            super().error(message, ex)  # type: ignore[misc]
        parser: Any = getattr(ex, "subcommand_parser", None) or self
        name = parser.prog.replace(" [options]", "")
        print(f"error: {explain(message, parser)}\n`{name} --help` lists the options", file=sys.stderr)
        sys.exit(2)

    def instantiate_classes(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the objects that a configuration names.

        Args:
            args: Of `ArgumentParser.instantiate_classes`.
            kwargs: Of `ArgumentParser.instantiate_classes`.

        Raises:
            EmbodiedError: A class of ours refuses its arguments. The parser takes that for a value of another type,
                and would report the failure of every type allowed there.
        """
        try:
            return super().instantiate_classes(*args, **kwargs)  # type: ignore[misc]
        except ValueError as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, EmbodiedError):
                    raise cause from None
                cause = cause.__cause__
            raise


class CommandParser(ReadableErrors, ArgumentParser):
    """The parser of one of our own commands; a bare `--flag` is `--flag true`."""

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        """Parses a command line.

        Args:
            args: What follows the command's name; that of the process when None.
            rest: Of `ArgumentParser.parse_args`.
            kwargs: Of `ArgumentParser.parse_args`.
        """
        given = list(sys.argv[1:] if args is None else args)
        flags = {flag for action in self._actions if action.metavar == "{true,false}" for flag in action.option_strings}
        for i, arg in enumerate(given):
            if arg in flags and given[i + 1 : i + 2] not in (["true"], ["false"]):
                given[i] = f"{arg}=true"
        return super().parse_args(given, *rest, **kwargs)

    @classmethod
    def for_function(cls, function: Callable[..., Any], prog: str) -> CommandParser:
        """A parser with `--config` and one option per argument of a function.

        Args:
            function: Typed, with a docstring that documents each argument.
            prog: The command as the user types it.
        """
        summary = (function.__doc__ or "").partition("\n\n")[0]
        parser = cls(prog=prog, description=" ".join(summary.split()))
        parser.add_argument("-c", "--config", action="config", help="YAML with any of the options below.")
        parser.add_function_arguments(function, as_group=False, fail_untyped=True)
        return parser
