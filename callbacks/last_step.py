"""A run's last step is saved, whatever the interval of `ModelCheckpoint`.

Lightning writes `last.ckpt` only where its interval falls: a run of 550 steps with `every_n_train_steps: 500` ends with
the weights of step 500 on disk, and what is then evaluated is not what was trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


class SaveLastStep(Callback):
    """Brings the `last` checkpoint of every `ModelCheckpoint(save_last=…)` up to the step at which training ended."""

    def __init__(self) -> None:
        self._saved_step: int | None = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remembers which step was saved last."""
        self._saved_step = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves once more if steps were trained since the last save."""
        if self._saved_step == trainer.global_step:
            return
        for callback in trainer.checkpoint_callbacks:
            # Without a `last` so far ModelCheckpoint writes one itself when training ends.
            if isinstance(callback, ModelCheckpoint) and callback.last_model_path:
                last = Path(callback.last_model_path)
                if trainer.is_global_zero and last.is_symlink():  # save_last: link; the step's own file stays as it is
                    last.unlink()
                trainer.save_checkpoint(last, callback.save_weights_only)
