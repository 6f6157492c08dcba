"""Loggers that survive being sent to workers and restarted there.

Lightning's take a new version or run in every process that opens them first, and CSVLogger deletes the rows of the
attempt before; so versions and ids are fixed on the driver, and rows up to the checkpoint are put back.
"""

from __future__ import annotations

import csv
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger

from lightning_embodied.strategies.lightning_compat import pin_wandb_run

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def fix_versions(trainer: Trainer) -> None:
    """Decides on the driver what version or run each logger writes to.

    Args:
        trainer: The driver's.
    """
    for logger in trainer.loggers:
        _ = logger.version  # the property decides when it is first read
        pin_wandb_run(logger, uuid.uuid4().hex[:8])


def continue_logs(trainer: Trainer, step: int) -> None:
    """Prepares a restarted rank: earlier rows stay, and an earlier `config.yaml` is no reason to refuse.

    Args:
        trainer: Of any rank; all must do the same, for a callback that has saved asks the others for nothing.
        step: Optimizer steps of the checkpoint it resumes from.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, SaveConfigCallback):
            callback.already_saved = True
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and trainer.is_global_zero:
            _keep_rows(logger, step)


def _keep_rows(logger: CSVLogger, step: int) -> None:
    path = Path(logger.log_dir) / "metrics.csv"
    if not path.is_file():
        return
    with path.open(newline="") as file:
        whole = [row for row in csv.DictReader(file) if None not in row.values()]  # a crash may cut the last row
    rows = [{key: value for key, value in row.items() if value != ""} for row in whole]
    rows = [row for row in rows if int(row.get("step", 0)) < step]
    logger.experiment.metrics.extend(rows)  # opening the experiment deletes the file; these are written first
    logger.save()
