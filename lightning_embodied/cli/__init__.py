"""The `lightning-embodied` command: LightningCLI's subcommands and ours, one YAML each.

`main` runs it; `EmbodiedCLI` is the LightningCLI to subclass. Importing this package imports neither torch nor
Lightning, so that `--help` and `doctor` answer at once and also where one of them is broken.
"""

from typing import TYPE_CHECKING

from lightning_embodied.cli.entry import main
from lightning_embodied.lazy import on_first_use

if TYPE_CHECKING:
    from lightning_embodied.cli.lightning_cli import EmbodiedCLI

__all__ = ["EmbodiedCLI", "main"]

__getattr__ = on_first_use(__name__, {"EmbodiedCLI": "lightning_cli"})
