"""The callbacks that a worker's Trainer gets: to say at once why a rank fails, to go on drawing, to stop together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_embodied.strategies.lightning_compat import GlobalState

if TYPE_CHECKING:
    from lightning_embodied.strategies.on_ray.client import BoardClient
    from lightning_embodied.strategies.on_ray.strategy import RayStrategyMixin


BETWEEN_SIZES = "resized-"  # begins the names of checkpoints that are needed until the next one only


class RunStopped(BaseException):
    """The run was asked to stop and is saved.

    Args:
        checkpoint: Where.
    """

    def __init__(self, checkpoint: str) -> None:
        super().__init__(checkpoint)
        self.checkpoint = checkpoint


class FailureReporter(Callback):
    """First of all callbacks: reports an exception before the others react to it.

    A callback that saves on exceptions would wait for ranks that know of no exception; so after one that is this
    rank's alone, the strategy neither saves nor waits.

    Args:
        client: Line to the board.
        strategy: Of this worker.
    """

    def __init__(self, client: BoardClient, strategy: RayStrategyMixin) -> None:
        self._client = client
        self._strategy = strategy

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Called by Lightning when the entry point raises."""
        if isinstance(exception, RunStopped):
            return
        self._client.failed(exception)
        if trainer.world_size > 1:
            self._strategy.abandon()


class GoesOnDrawing(Callback):
    """Sets the random generators of a restarted rank to where they were, once the loader has drawn for its start.

    Args:
        state: As kept when the checkpoint was taken.
    """

    def __init__(self, state: GlobalState) -> None:
        self._state: GlobalState | None = state

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Called by Lightning before each training batch."""
        if self._state is not None:
            self._state.restore()
            self._state = None


class StopTogether(Callback):
    """Saves and stops all ranks at the same batch once the run is asked to stop, or to go on with other workers.

    Costs nothing before: whether a stop is wanted comes with the answer to this worker's sign of life.

    Args:
        client: Line to the board.
    """

    def __init__(self, client: BoardClient) -> None:
        self._client = client
        self._batches = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called by Lightning after each training batch."""
        self._batches += 1
        if not self._client.stop_requested:
            return
        point = self._client.halt_point(self._batches)
        if point is not None and self._batches >= point.batches:
            prefix = BETWEEN_SIZES if point.resize else "stopped-"
            path = str(_directory(trainer) / f"{prefix}step={trainer.global_step}.ckpt")
            trainer.save_checkpoint(path)
            raise RunStopped(path)


def _directory(trainer: Trainer) -> Path:
    callback = trainer.checkpoint_callback
    if isinstance(callback, ModelCheckpoint) and callback.dirpath:
        return Path(callback.dirpath)
    return Path(trainer.default_root_dir) / "checkpoints"
