"""The `lightning-embodied` command: LightningCLI's subcommands and ours, one YAML each.

`main` runs it; `EmbodiedCLI` is the LightningCLI to subclass. Importing this package imports neither torch nor
Lightning, so that `--help` and `doctor` answer at once and also where one of them is broken.
"""

from typing import TYPE_CHECKING, Any

from lightning_embodied.cli.entry import main

if TYPE_CHECKING:
    from lightning_embodied.cli.lightning_cli import EmbodiedCLI

__all__ = ["EmbodiedCLI", "main"]


def __getattr__(name: str) -> Any:
    if name == "EmbodiedCLI":
        from lightning_embodied.cli.lightning_cli import EmbodiedCLI

        return EmbodiedCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
