"""Entry point: picks the subcommand, and turns every way a command can end into a message and an exit code.

0 done; 1 the command ran and its answer is bad; 2 the input cannot be used (one message, no traceback);
130 stopped by Ctrl-C; 141 nobody reads its output any more (as in `| head`). `--debug` anywhere on the line shows
tracebacks instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from lightning_embodied.cli.commands import COMMANDS, LIGHTNING_COMMANDS, run_command
from lightning_embodied.cli.config_files import resolve_configs
from lightning_embodied.errors import ConfigError, EmbodiedError, MissingExtraError
from lightning_embodied.version import __version__

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_READER_GONE = 141

_EXAMPLE = """\
example:
  lightning-embodied fit --config configs/quickstart.yaml --trainer.max_steps 500

`lightning-embodied COMMAND --help` lists a command's options; each one is also a key of its YAML (`--config`), and
`--print_config` writes that YAML. `--debug` shows tracebacks."""


def help_text() -> str:
    """What `lightning-embodied --help` prints."""
    summaries = {**LIGHTNING_COMMANDS, **{name: command.summary for name, command in COMMANDS.items()}}
    rows = [f"  {name:<13}{summary}" for name, summary in summaries.items()]
    head = "usage: lightning-embodied COMMAND [--config FILE.yaml] [--option VALUE ...]"
    about = "Train vision-language-action policies with PyTorch Lightning, from demonstrations to a success rate."
    return "\n".join([head, "", about, "", "commands:", *rows, "", _EXAMPLE])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments; those of the process when None.

    Returns:
        The exit code.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    if debug:
        args = [arg for arg in args if arg != "--debug"]
        os.environ["JSONARGPARSE_DEBUG"] = "true"  # the parser raises instead of exiting
    try:
        code = _dispatch(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        if debug:
            raise
        print(f"\n{str(stop) or 'stopped by Ctrl-C'}; what was complete is kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    except EmbodiedError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        if debug:
            raise
        return _reader_gone()
    except SystemExit as stop:  # argparse, and Lightning after it has shut down
        return _exit_code(stop)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if args[0] == "--version":
        print(f"lightning-embodied {__version__}")
        return 0
    known = [*LIGHTNING_COMMANDS, *COMMANDS]
    if args[0] not in known:
        raise ConfigError(f"unknown command {args[0]!r}", expected=", ".join(known), mend=_did_you_mean(args[0], known))
    args = resolve_configs(args)
    if args[0] in COMMANDS:
        return run_command(args[0], args[1:])

    try:
        from lightning_embodied.cli.lightning_cli import EmbodiedCLI
    except ImportError as error:
        raise MissingExtraError(
            "PyTorch Lightning or one of its parts cannot be imported",
            found=error,
            mend="run lightning-embodied doctor",
        ) from error
    EmbodiedCLI(args=args, parser_kwargs={"prog": "lightning-embodied"})
    return 0


def _exit_code(stop: SystemExit) -> int:
    if isinstance(stop.__context__, KeyboardInterrupt):
        print("stopped by Ctrl-C; what was complete is kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    if isinstance(stop.__context__, BrokenPipeError):  # rich's way to say so
        return _reader_gone()
    return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _reader_gone() -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush fails again
    return EXIT_READER_GONE


def _did_you_mean(name: str, known: list[str]) -> str:
    from lightning_embodied.cli.suggestions import closest

    near = closest(name, known)
    return (
        f"did you mean {near!r}? `lightning-embodied --help` lists them" if near else "see `lightning-embodied --help`"
    )
