"""A loss that is NaN or infinite ends the run in one error, before a checkpoint holds what it made of the weights.

Lightning goes on with NaN for ever, and its `EarlyStopping(check_finite=True)` ends such a run as if it were done. The
loss is looked at where it lies; only every so many batches does the processor wait for the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_embodied.errors import ConfigError, TrainingError


class FiniteLoss(Callback):
    """Raises a `TrainingError` once a training loss was not finite, and lets no later checkpoint be written.

    On Ray such a run is not restarted: it would come to the same loss again.

    Args:
        every_n_batches: Batches between two looks, each of which waits for the device.

    Raises:
        ConfigError: The number is not positive.
    """

    def __init__(self, every_n_batches: int = 10) -> None:
        if every_n_batches < 1:
            raise ConfigError("too small", where="FiniteLoss.every_n_batches", found=every_n_batches, expected=">= 1")
        self.every_n_batches = every_n_batches
        self._bad_step: Tensor | None = None
        self._ending = False

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        """Notes the first step whose loss is not finite."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor):  # manual optimization returns what it likes
            return
        step = torch.full((), trainer.global_step, device=loss.device)
        before = torch.full_like(step, -1) if self._bad_step is None else self._bad_step
        self._bad_step = torch.where((before < 0) & ~loss.detach().isfinite().all(), step, before)
        if (batch_idx + 1) % self.every_n_batches == 0:
            self._check()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuses to save on all ranks if the loss of one was not finite."""
        if self._bad_step is None:
            return
        if not self._ending:  # a rank that fails alone saves alone, and may wait for nobody
            bad = trainer.strategy.reduce_boolean_decision(int(self._bad_step) >= 0, all=False)
            if bad and int(self._bad_step) < 0:
                raise _not_finite(trainer.global_step, "nan or inf on another rank")
        self._check()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks at the last batches."""
        self._check()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remembers that this rank ends."""
        self._ending = True

    def _check(self) -> None:
        step = -1 if self._bad_step is None else int(self._bad_step)
        if step >= 0:
            raise _not_finite(step, "nan or inf")


def _not_finite(step: int, found: str) -> TrainingError:
    return TrainingError(
        "the training loss is not finite",
        where=f"optimizer step {step}",
        found=found,
        expected="a finite loss",
        mend="resume from the last checkpoint with a lower learning rate or `trainer.gradient_clip_val`;"
        " `trainer.detect_anomaly: true` names the operator",
    )
