"""Tokens/s, padding and the share of the step that waits for data: what a run is worth, beside its loss.

Waiting is the time from the end of a training batch to the start of the next, measured with Lightning's hooks, less
the pauses in it (validation, checkpoints). On a GPU the host runs ahead of the device, so the share is an upper bound
of what faster loading could win.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_embodied.errors import ConfigError
from lightning_embodied.packing.batch import PackedBatch

_IN_PROGRESS_BAR = ("tokens_per_s", "samples_per_s", "data_wait", "padding")


@dataclass(frozen=True)
class BatchSize:
    """How much a batch holds.

    Attributes:
        tokens: Tokens of the samples, padding not counted.
        samples: Number of samples.
        slots: Tokens the batch computes, padding included.
        longest: Tokens of the longest sample.
    """

    tokens: int
    samples: int
    slots: int
    longest: int


def batch_size_of(batch: PackedBatch | Mapping[str, Any]) -> BatchSize:
    """How much a `PackedBatch` holds, which has no padding; a sample of a stacked batch counts as one token."""
    if isinstance(batch, PackedBatch):
        return BatchSize(batch.num_tokens, batch.batch_size, batch.num_tokens, batch.max_seqlen)
    samples = len(next(iter(batch.values())))
    return BatchSize(samples, samples, samples, 1)


@dataclass(frozen=True)
class _Step:
    size: BatchSize
    waited: float
    worked: float


class GoodputMonitor(Callback):
    """Logs what the last batches were worth, and shows it in the progress bar.

    - `tokens_per_s` and `samples_per_s` of training alone: pauses for validation and checkpoints do not count;
    - `data_wait`: share of that time in which the rank waits for its next batch, 0 to 1;
    - `padding`: share of the computed tokens that is padding, 0 for packed batches;
    - `padding_avoided`: the share if every sample were padded to the longest of its batch;
    - `samples_per_batch`, and `fill`, tokens as a share of the DataModule's `token_budget` if it has one.

    The progress bar shows the first four; all are in the log.

    The figures are this rank's, the rates times the number of ranks: ranks step together, and measuring need not
    make them wait for each other. The wait after a checkpoint is left out of all figures, for Lightning does not say
    where writing ends.

    Args:
        window: Batches to average over.
        measure: Function from a batch to its `BatchSize`, in YAML its import path. Default: for `PackedBatch` and for
            stacked samples.
        clock: Function that gives rising seconds.

    Raises:
        ConfigError: `window` is less than 1.
    """

    def __init__(
        self,
        window: int = 50,
        measure: Callable[[Any], BatchSize] = batch_size_of,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if window < 1:
            raise ConfigError("the window is empty", where="GoodputMonitor.window", found=window, expected="1 or more")
        self.measure, self.clock = measure, clock
        self._steps: deque[_Step] = deque(maxlen=window)
        self._idle_since: float | None = None
        self._started = self._waited = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waiting for the first batch of an epoch counts, too."""
        self._idle_since = self.clock()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
        """The batch is there."""
        self._started = self.clock()
        self._waited = 0.0 if self._idle_since is None else self._started - self._idle_since

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        """Counts the batch, logs, and begins to wait."""
        size = self.measure(batch)
        self._steps.append(_Step(size, self._waited, self.clock() - self._started))
        budget = getattr(getattr(trainer, "datamodule", None), "token_budget", None)
        for name, value in self._figures(trainer.world_size, budget).items():
            shown = name in _IN_PROGRESS_BAR
            pl_module.log(name, value, prog_bar=shown, on_step=True, on_epoch=False, batch_size=size.samples)
        self._idle_since = self.clock()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is no waiting."""
        self._idle_since = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What follows is."""
        self._idle_since = self.clock()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Writing a checkpoint is no waiting."""
        self._idle_since = None

    def _figures(self, world_size: int, token_budget: int | None) -> dict[str, float]:
        sizes = [step.size for step in self._steps]
        tokens = sum(size.tokens for size in sizes)
        waited = sum(step.waited for step in self._steps)
        seconds = max(waited + sum(step.worked for step in self._steps), 1e-9)
        samples = sum(size.samples for size in sizes)
        figures = {
            "tokens_per_s": tokens * world_size / seconds,
            "samples_per_s": samples * world_size / seconds,
            "data_wait": waited / seconds,
            "padding": 1 - tokens / max(1, sum(size.slots for size in sizes)),
            "padding_avoided": 1 - tokens / max(1, sum(size.samples * size.longest for size in sizes)),
            "samples_per_batch": samples / len(sizes),
        }
        return figures if token_budget is None else {**figures, "fill": tokens / (token_budget * len(sizes))}
