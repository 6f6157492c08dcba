"""`metrics.csv` of a run directory, one row per logged step, written as it happens.

Lightning's CSVLogger deletes an existing file when a run is resumed and loses up to a hundred rows in a crash; this
one goes on where the resumed checkpoint was taken and holds nothing back.
"""

from __future__ import annotations

import csv
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class RunMetricsLogger(Logger):
    """Logger writing `metrics.csv` straight into the run directory.

    Args:
        save_dir: The run directory.
    """

    def __init__(self, save_dir: str | Path) -> None:
        super().__init__()
        self._save_dir = str(save_dir)
        self._columns: list[str] | None = None

    @property
    def name(self) -> str:
        """Empty: checkpoints go to `checkpoints/` in the run directory itself."""
        return ""

    @property
    def version(self) -> str:
        """Empty, for the same reason."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run directory."""
        return self._save_dir

    @property
    def log_dir(self) -> str:
        """The run directory."""
        return self._save_dir

    @property
    def path(self) -> Path:
        """The file written."""
        return Path(self._save_dir) / "metrics.csv"

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `config.yaml` beside the metrics has every option.

        Args:
            params: The module's hyperparameters.
            args: Unused.
            kwargs: Unused.
        """

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Appends one row.

        Args:
            metrics: Values by name.
            step: The optimizer step they belong to.
        """
        row = {**{key: float(value) for key, value in metrics.items()}, "step": step}
        if self._columns is None:
            self._columns = self._continue_from(step)
        new = [key for key in row if key not in self._columns]
        if new:
            self._columns = ["step", *sorted({*self._columns, *new} - {"step"})]
            self._rewrite(self._rows())
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def _continue_from(self, step: int | None) -> list[str]:
        """Drops the rows a resumed run is about to log again; gives the columns that are there."""
        rows = self._rows()
        if not rows:
            return []
        self._columns = list(rows[0])
        if step is not None:
            self._rewrite([row for row in rows if int(row["step"] or 0) < step])
        return self._columns

    def _rows(self) -> list[dict[str, str]]:
        if not self.path.is_file():
            return []
        with self.path.open(newline="") as file:
            return [row for row in csv.DictReader(file) if None not in row.values()]  # a crash may cut the last one

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".csv.part")
        with fresh.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns or [])
            writer.writeheader()
            writer.writerows(rows)
        os.replace(fresh, self.path)
