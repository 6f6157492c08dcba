"""Lightning's batch counters, read and set right where Lightning 2.6 leaves them wrong for a resumable loader.

This is the only file of the room that touches private Lightning API: `trainer.fit_loop` with its `epoch_loop`,
`epoch_progress`, `max_batches`, `_combined_loader`, `_combined_loader_states_to_load`, `_data_fetcher`, the loops'
`restarting`, and `_parse_num_batches`.
`tests/data/test_progress_contract.py` fails when Lightning changes any of it.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage

from lightning_embodied.errors import CheckpointError


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def _batches(trainer: Trainer) -> Any:  # noqa: ANN401 - Lightning types its trackers too narrowly
    return trainer.fit_loop.epoch_loop.batch_progress


def overfits(trainer: Trainer) -> bool:
    """Whether `Trainer(overfit_batches)` promises the same batches in every epoch."""
    return bool(getattr(trainer, "overfit_batches", 0) > 0)


def processed_batches(trainer: Trainer) -> int:
    """Batches whose training step has ended, over the whole run. A batch that is being trained is not among them."""
    return int(_batches(trainer).total.processed)


def epoch_finished(trainer: Trainer) -> bool:
    """Whether the running epoch has trained all of its batches, however many its limits allow."""
    progress = _batches(trainer)
    return bool(progress.is_last_batch and progress.current.processed == progress.current.ready > 0)


def batches_without_step(trainer: Trainer) -> int:
    """Batches trained since the last optimizer step: their gradients are in no checkpoint."""
    if epoch_finished(trainer):
        return 0
    return int(_batches(trainer).current.processed % trainer.accumulate_grad_batches)


def load_forgotten_states(trainer: Trainer) -> None:
    """Gives the training loaders the states of the checkpoint that Lightning did not load.

    Lightning loads them when it builds the loaders. A model that reads `trainer.estimated_stepping_batches` in
    `configure_optimizers` builds them before the loops have their state, and the state is then silently dropped; so
    it is for a checkpoint made at the end of an epoch.

    Raises:
        CheckpointError: The checkpoint holds states of another number of loaders.
    """
    loop = trainer.fit_loop
    states, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
    if not states or loop._combined_loader is None:
        return
    loaders = [loader for loader in loop._combined_loader.flattened if isinstance(loader, _Stateful)]
    if len(loaders) != len(states):
        raise CheckpointError(
            "the checkpoint holds the positions of another number of training loaders",
            found=f"{len(states)} states for {len(loaders)} loaders",
            mend="resume with the loaders that the run was started with",
        )
    for loader, state in zip(loaders, states, strict=True):
        loader.load_state_dict(state)
    if loop.restarting and loop._data_fetcher is not None:
        iter(loop._data_fetcher)  # iterators made before the states were there start over


def announce_length(trainer: Trainer) -> None:
    """Tells Lightning how many batches the coming epoch has.

    It asks once, when it builds the loaders. An epoch with more batches would be cut off, and one with fewer would end
    without Lightning knowing its last batch, on which it steps the optimizer. Call before the epoch runs.
    """
    loop = trainer.fit_loop
    combined, fetcher = loop._combined_loader, loop._data_fetcher
    if combined is None or fetcher is None:
        return
    lengths = [sized_len(loader) for loader in combined.flattened]
    limits = [
        _parse_num_batches(
            RunningStage.TRAINING, float("inf") if length is None else length, trainer.limit_train_batches
        )
        for length in lengths
    ]
    if limits == combined.limits:
        return
    combined.limits = limits
    iter(fetcher)  # its iterator and its length hold the old limits
    loop.max_batches = len(combined)
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))


def align_counters(trainer: Trainer, batches_done: int, finished: bool) -> None:
    """Makes Lightning resume the epoch with `batches_done` of its batches behind it.

    The counters in a checkpoint are in batches of the world that wrote it, and count a batch that an exception broke
    off. A checkpoint made between two epochs with `max_steps` set would train one more batch in the epoch that is over.

    Args:
        trainer: Between restoring its loops and running the epoch.
        batches_done: Batches of this world that need not be trained again in this epoch.
        finished: Whether the checkpoint was made with the whole epoch trained.
    """
    loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    progress = _batches(trainer)
    if finished and not loop.restarted_mid_epoch:
        _start_next_epoch(trainer)
        return
    if not finished and batches_done:
        _reopen_epoch(trainer)
    elif not epoch_loop.restarting:
        return
    ending = progress.current.processed - progress.current.completed  # 1: made in `on_train_batch_end`
    lost = progress.current.ready != batches_done
    for tracker, done in ((progress.total, progress.total.processed), (progress.current, batches_done)):
        tracker.ready = tracker.started = tracker.processed = done
        tracker.completed = done - ending
    progress.is_last_batch = finished
    if lost and trainer.accumulate_grad_batches > 1 and ending and not finished:
        # The loop is about to count an optimizer step for the logger that the checkpoint has counted already.
        epoch_loop._batches_that_stepped = trainer.global_step - int(not epoch_loop._should_accumulate())


def _reopen_epoch(trainer: Trainer) -> None:
    """Takes back the end of an epoch that `max_steps` or `should_stop` broke off: it counts when it is over."""
    loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    all_epochs: Any = loop.epoch_progress  # typed too narrowly
    ended_in_hook, counted = loop.restarted_on_epoch_end, all_epochs.current
    if ended_in_hook or counted.processed == counted.ready > 0:
        for epochs in (all_epochs.total, counted):
            epochs.processed -= 1
            if not ended_in_hook:  # Lightning is about to open it again
                epochs.ready, epochs.started, epochs.completed = epochs.ready - 1, epochs.started - 1, epochs.processed
    if not epoch_loop.restarting:
        epoch_loop.restarting = True
        epoch_loop.update_restart_stage()


def _start_next_epoch(trainer: Trainer) -> None:
    """Ends the epoch that is over: with `max_steps` set Lightning would go back into it."""
    loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if loop.restarted_on_epoch_end:
        loop.epoch_progress.increment_completed()
        loop.reset_restart_stage()
    loop._restarting = False  # the setter keeps it true as long as `max_steps` is set
    epoch_loop.restarting = False
    epoch_loop.reset_restart_stage()
