"""The table of subcommands, and how one of ours becomes a parser with `--config`.

A command of ours is a typed function; jsonargparse reads its signature and its docstring, so a flag, its YAML key
and its help text cannot drift apart. The function is imported only when its command is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_embodied.errors import MissingExtraError

LIGHTNING_COMMANDS = {
    "fit": "train a policy: data, model and Trainer from one YAML",
    "validate": "one pass over the validation data with a checkpoint",
    "test": "one pass over the test data with a checkpoint",
    "predict": "run a checkpoint over a dataset's batches",
}


@dataclass(frozen=True)
class Command:
    """One subcommand of ours.

    Args:
        summary: The line `--help` shows beside the name.
        target: `module:function`; the function takes the options. An int it returns is the exit code.
    """

    summary: str
    target: str

    def function(self) -> Callable[..., object]:
        """Imports the function that does the work."""
        module, _, name = self.target.partition(":")
        function: Callable[..., object] = getattr(importlib.import_module(module), name)
        return function


COMMANDS = {
    "collect": Command("record demonstrations from scripted experts", "lightning_embodied.collection:collect"),
    "evaluate": Command("success rates in closed loop, with intervals", "lightning_embodied.cli.evaluate:evaluate"),
    "report": Command("a run on one HTML page, videos included", "lightning_embodied.cli.report:report"),
    "fp8-report": Command(
        "what FP8 costs each layer, and which to exclude", "lightning_embodied.cli.fp8_report:fp8_report"
    ),
    "quantize": Command("a checkpoint in eight bits for a robot", "lightning_embodied.cli.quantize:quantize"),
    "stats": Command("exact statistics of a dataset's features", "lightning_embodied.cli.stats:stats"),
    "consolidate": Command("one file of a sharded checkpoint", "lightning_embodied.strategies:consolidate"),
    "plan": Command("memory, time and storage on a thousand GPUs", "lightning_embodied.cli.plan:plan"),
    "doctor": Command("what this machine has, what is missing, how to get it", "lightning_embodied.cli.doctor:doctor"),
}


def command_parser(name: str) -> Any:
    """The parser of one of our commands.

    Args:
        name: A key of `COMMANDS`.

    Raises:
        MissingExtraError: jsonargparse is not installed with its `signatures` extra.
    """
    try:
        from lightning_embodied.cli.parsing import CommandParser
    except ImportError as error:
        raise MissingExtraError(
            "the option parser cannot be imported", found=error, mend="pip install 'jsonargparse[signatures]'"
        ) from error

    return CommandParser.for_function(COMMANDS[name].function(), prog=f"lightning-embodied {name}")


def run_command(name: str, args: list[str]) -> int:
    """Parses the options of one of our commands and runs it.

    Args:
        name: A key of `COMMANDS`.
        args: What follows the name on the command line.

    Returns:
        The exit code.
    """
    parser = command_parser(name)
    options = parser.instantiate_classes(parser.parse_args(args))
    keywords = {key: value for key, value in options.as_dict().items() if key != "config"}
    result = COMMANDS[name].function()(**keywords)
    return result if isinstance(result, int) else 0
