"""EmbodiedCLI: LightningCLI with our subcommands, readable errors, run directories and local logging by default.

Private Lightning API touched here and nowhere else in this package, held by tests/cli/test_lightning_contract.py:
`LightningCLI._add_subcommands`, `._parse_ckpt_path`, `._instantiate_trainer`, `._get`.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger

from lightning_embodied.callbacks.finite_loss import FiniteLoss
from lightning_embodied.callbacks.last_step import SaveLastStep
from lightning_embodied.cli.commands import COMMANDS, run_command
from lightning_embodied.cli.metrics_log import RunMetricsLogger
from lightning_embodied.cli.parsing import CommandParser, ReadableErrors
from lightning_embodied.cli.progress import progress_bar
from lightning_embodied.cli.runs import RunDirectory
from lightning_embodied.errors import ConfigError, import_extra

WandbMode = Literal["auto", "online", "offline", "disabled"]  # W&B's own words; `off` would be False in YAML

_ROOMS = ("data", "packing", "models", "precision", "callbacks", "strategies")  # YAML finds class names of theirs


class EmbodiedArgumentParser(ReadableErrors, LightningArgumentParser):
    """LightningCLI's parser with our error messages."""

    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        """Remembers the action, so that more subcommands can follow Lightning's."""
        self.subcommands_action = super().add_subcommands(*args, **kwargs)
        return self.subcommands_action


class SaveRunConfig(SaveConfigCallback):
    """Writes `config.yaml` into the run directory when `fit` starts; a differing earlier one is kept beside it.

    Args:
        parser: The parser of the subcommand.
        config: The parsed configuration.
        kwargs: Of `SaveConfigCallback`.
    """

    def __init__(self, parser: LightningArgumentParser, config: Any, **kwargs: Any) -> None:
        super().__init__(parser, config, **{**kwargs, "save_to_log_dir": False})
        self.text: str = parser.dump(config, skip_none=False)

    def __getstate__(self) -> dict[str, Any]:
        """Launchers that pickle the trainer need the text only."""
        return {**self.__dict__, "parser": None, "config": None}

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called on rank zero when the stage is set up."""
        if stage != "fit":
            return
        path = Path(trainer.default_root_dir) / self.config_filename
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.read_text() != self.text:
            earlier = sum(1 for _ in path.parent.glob(f"{path.stem}-*{path.suffix}"))
            path.rename(path.with_stem(f"{path.stem}-{earlier + 1}"))
        path.write_text(self.text)


class EmbodiedCLI(LightningCLI):
    """`fit`, `validate`, `test` and `predict` as Lightning has them, plus this package's subcommands.

    Args:
        args: The command line after the program's name; that of the process when None.
        kwargs: Of `LightningCLI`.
    """

    def __init__(self, *, args: ArgsType = None, **kwargs: Any) -> None:
        given = sys.argv[1:] if args is None else args
        if isinstance(given, list) and given and given[0] in COMMANDS:
            self.exit_code = run_command(given[0], given[1:])  # needs no Trainer, and its own parser is all it builds
            return
        self.exit_code = 0
        for room in _ROOMS:
            package = importlib.import_module(f"lightning_embodied.{room}")
            for name in package.__all__:
                getattr(package, name)  # some are imported only when they are asked for
        logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advertisement)
        warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")  # Lightning's own, with the newest torch
        kwargs.setdefault("parser_class", EmbodiedArgumentParser)
        kwargs.setdefault("save_config_callback", SaveRunConfig)
        kwargs.setdefault("seed_everything_default", 0)  # a run that names no seed can still be repeated
        kwargs["trainer_defaults"] = {"default_root_dir": "runs/default", **(kwargs.get("trainer_defaults") or {})}
        super().__init__(args=args, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds `--wandb`.

        Args:
            parser: The parser of a Lightning subcommand.
        """
        parser.add_argument(
            "--wandb",
            type=WandbMode,
            default="auto",
            help="Weights & Biases beside metrics.csv: 'offline' writes into the run directory, 'online' sends, "
            "'disabled' does neither, 'auto' is offline where wandb is installed. Not with your own trainer.logger.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses a list without Lightning's warning that `sys.argv` is there too."""
        if isinstance(args, list):
            self.config = parser.parse_args(args)
        else:
            super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        """Nothing: what the YAML says counts, whether `ckpt_path` is `last`, a directory or a file.

        From a file alone Lightning would take the model's arguments, over those of the YAML, and it cannot read those
        that are mappings, such as `sizes` and `lora`.
        """

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        super()._add_subcommands(parser, **kwargs)
        if isinstance(parser, EmbodiedArgumentParser):
            for name, command in COMMANDS.items():  # for the list in --help; they run before this parser is built
                parser.subcommands_action.add_subcommand(name, CommandParser(), help=command.summary)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        configured = config.get("callbacks") or []
        configured = configured if isinstance(configured, list) else [configured]
        if config.get("enable_progress_bar") is not False and not _has(configured, ProgressBar):
            callbacks = [*callbacks, progress_bar()]
        checkpoints = config.get("enable_checkpointing") is not False and not config.get("fast_dev_run")
        if checkpoints:
            callbacks = [*callbacks, SaveLastStep()]
        if not _has(configured, FiniteLoss):
            callbacks = [*callbacks, FiniteLoss()]
        if checkpoints and not _has(configured, Checkpoint):
            callbacks = [*callbacks, ModelCheckpoint(save_last=True, save_on_exception=True)]
        config["logger"] = self._loggers(config)
        return super()._instantiate_trainer(config, callbacks)

    def _loggers(self, config: dict[str, Any]) -> Any:
        """The configured loggers, or `metrics.csv` and W&B."""
        mode: WandbMode = self._get(self.config, "wandb")
        if config.get("logger") is not None:
            if mode != "auto" and config["logger"] is not True:
                raise ConfigError(
                    "both trainer.logger and wandb are given",
                    found=f"wandb: {mode}",
                    mend="drop one: wandb applies to the default loggers, trainer.logger replaces them",
                )
            if config["logger"] is not True:
                return config["logger"]
        root = Path(config["default_root_dir"])
        where = root if self.subcommand == "fit" else root / str(self.subcommand)
        loggers: list[Logger] = [RunMetricsLogger(where)]
        if mode in ("online", "offline") or (mode == "auto" and find_spec("wandb") is not None):
            loggers.append(_wandb_logger(where, root.name, offline=mode != "online"))
        return loggers

    def fit(self, **kwargs: Any) -> None:
        """Trains in a run directory of its own; see `RunDirectory` for what happens to an earlier run.

        Args:
            kwargs: Of `Trainer.fit`.
        """
        run = RunDirectory(self.trainer.default_root_dir)
        if self.trainer.is_global_zero and not getattr(self.trainer, "fast_dev_run", False):
            run.claim(resume=run.resumes(kwargs.get("ckpt_path")))
            if run.moved_to is not None:
                print(f"{run.path} held an earlier run: it is now {run.moved_to}")
            print(f"run directory: {run.path}", flush=True)
        try:
            self.trainer.fit(**kwargs)
        except BaseException:
            run.give_back()
            raise
        finally:
            run.release()


def _wandb_logger(save_dir: Path, name: str, *, offline: bool) -> Logger:
    wandb = import_extra("wandb", "wandb")
    from lightning.pytorch.loggers import WandbLogger

    # Offline there is no page to point to, and W&B's six lines about that would drown ours.
    settings = wandb.Settings(silent=offline)
    return WandbLogger(project="lightning-embodied", name=name, save_dir=save_dir, offline=offline, settings=settings)


def _has(callbacks: list[Callback], kind: type[Callback]) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return "litlogger" not in record.getMessage() and "litmodels" not in record.getMessage()
