"""Progress for a log file: one plain line at a time, no cursor movement.

In a terminal the CLI uses Lightning's RichProgressBar; into a pipe or a file a bar would leave escape codes.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar


class LineProgress(ProgressBar):
    """Prints a line with the step, the rate and the progress-bar metrics.

    Args:
        every_s: Seconds between two lines.
    """

    def __init__(self, every_s: float = 10.0) -> None:
        super().__init__()
        self.every_s = every_s
        self._enabled = True
        self._started = self._printed = (0.0, 0)

    def enable(self) -> None:
        """Called by the Trainer on the rank that shows progress."""
        self._enabled = True

    def disable(self) -> None:
        """Called by the Trainer on every other rank."""
        self._enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the first step."""
        self._started = self._printed = (time.monotonic(), trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after every batch."""
        if time.monotonic() - self._printed[0] >= self.every_s:
            self._line(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the last step."""
        self._line(trainer, pl_module)

    def _line(self, trainer: Trainer, pl_module: LightningModule) -> None:
        now, step = time.monotonic(), trainer.global_step
        rate = (step - self._printed[1]) / max(now - self._printed[0], 1e-9)
        self._printed = (now, step)
        if not self._enabled:
            return
        total = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
        values = {key: value for key, value in self.get_metrics(trainer, pl_module).items() if key != "v_num"}
        shown = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
        )
        elapsed = now - self._started[0]
        print(f"step {step}{total}  {elapsed:.0f} s  {rate:.1f} steps/s  {shown}", flush=True)


def progress_bar() -> ProgressBar:
    """The bar for where the output goes: Rich in a terminal, lines elsewhere."""
    return RichProgressBar() if sys.stdout.isatty() else LineProgress()
