"""Fails when Lightning changes the private parts that `lightning_embodied.data.progress` uses, and says which."""

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer

from lightning_embodied.data.loader import ResumableLoader
from lightning_embodied.data.order import SampleOrder


def test_the_loops_have_the_parts_we_read_and_set():
    loop = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu").fit_loop
    for name in ("_combined_loader", "_combined_loader_states_to_load", "_data_fetcher", "_restarting"):
        assert hasattr(loop, name), name
    for name in ("restarting", "restarted_mid_epoch", "restarted_on_epoch_end", "reset_restart_stage"):
        assert hasattr(loop, name), name
    for name in ("_batches_that_stepped", "_should_accumulate", "update_restart_stage", "reset_restart_stage"):
        assert hasattr(loop.epoch_loop, name), name
    counters = {"ready", "started", "processed", "completed"}
    for progress in (loop.epoch_loop.batch_progress, loop.epoch_progress):
        assert set(vars(progress.total)) == set(vars(progress.current)) == counters
    assert loop.epoch_loop.batch_progress.is_last_batch is False


def test_lightning_announces_every_epoch_to_the_sampler_of_the_batch_sampler():
    heard = []
    loader = ResumableLoader(range(8), SampleOrder(8), batch_size=2)
    loader.batch_sampler.sampler.set_epoch = heard.append
    _set_sampler_epoch(loader, 3)
    assert heard == [3]
