import csv

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_embodied.callbacks import BatchSize, GoodputMonitor
from lightning_embodied.errors import ConfigError
from lightning_embodied.packing import PackedBatch


class Clock:
    """Time passes only where the test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Loader:
    """Each batch takes `wait` seconds to load and holds the lengths given."""

    def __init__(self, clock, wait, batches):
        self.clock, self.wait, self.batches = clock, wait, batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for lengths in self.batches:
            self.clock.now += self.wait
            yield packed(lengths)


class Model(LightningModule):
    def __init__(self, clock, work, validation=0.0):
        super().__init__()
        self.clock, self.work, self.validation = clock, work, validation
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        self.clock.now += self.work
        return self.layer.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.clock.now += self.validation

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SlowCheckpoint(ModelCheckpoint):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        pl_module.clock.now += 50


class ReadBar(Callback):
    """What the progress bar would show after each batch."""

    def __init__(self):
        self.shown = []

    def on_train_batch_end(self, trainer, *_):
        self.shown.append(dict(trainer.progress_bar_metrics))


def packed(lengths):
    total = sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    count = len(lengths)
    numbers = torch.zeros(count, dtype=torch.int64)
    return PackedBatch(
        input_ids=torch.zeros(total, dtype=torch.int64),
        position_ids=torch.zeros(total, dtype=torch.int64),
        cu_seqlens=ends,
        max_seqlen=max(lengths),
        pixel_values=torch.zeros(0, 3, 8, 8, dtype=torch.uint8),
        state=torch.zeros(count, 1),
        actions=torch.zeros(count, 2, 1),
        action_is_pad=torch.zeros(count, 2, dtype=torch.bool),
        loss_weight=torch.ones(count),
        dataset=numbers,
        episode_index=numbers,
        frame_index=numbers,
    )


def fit(tmp_path, clock, *, batches, wait=1.0, work=3.0, monitor=None, callbacks=(), validation=0.0, **options):
    bar = ReadBar()
    monitor = monitor or GoodputMonitor(clock=clock)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=CSVLogger(tmp_path, name="log", version=0),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        callbacks=[monitor, bar, *callbacks],
        default_root_dir=tmp_path,
        **{"num_sanity_val_steps": 0, **options},
    )
    val = [torch.zeros(1)] if validation else None
    trainer.fit(Model(clock, work, validation), Loader(clock, wait, batches), val)
    with open(tmp_path / "log" / "version_0" / "metrics.csv") as file:
        return bar.shown, list(csv.DictReader(file))


def test_rates_shares_and_padding(tmp_path):
    shown, rows = fit(tmp_path, Clock(), batches=[[2, 4], [6, 2, 4]], wait=1.0, work=3.0)
    last = shown[-1]
    assert last["tokens_per_s"] == pytest.approx(18 / 8)
    assert last["samples_per_s"] == pytest.approx(5 / 8)
    assert last["data_wait"] == pytest.approx(0.25)
    assert last["padding"] == 0
    assert set(last) == {"tokens_per_s", "samples_per_s", "data_wait", "padding"}, "at most four values in the bar"
    assert float(rows[-1]["padding_avoided"]) == pytest.approx(1 - 18 / 26)
    assert float(rows[-1]["tokens_per_s"]) == pytest.approx(18 / 8)
    assert float(rows[-1]["samples_per_batch"]) == pytest.approx(2.5)
    assert "fill" not in rows[-1], "there is no budget to fill"


def test_accumulation_does_not_change_the_rates(tmp_path):
    shown, _ = fit(tmp_path, Clock(), batches=[[4]] * 6, accumulate_grad_batches=3)
    assert shown[-1]["tokens_per_s"] == pytest.approx(1)
    assert shown[-1]["data_wait"] == pytest.approx(0.25)


def test_validation_is_neither_work_nor_waiting(tmp_path):
    shown, _ = fit(tmp_path, Clock(), batches=[[4]] * 6, validation=100.0, val_check_interval=2, num_sanity_val_steps=2)
    assert shown[-1]["tokens_per_s"] == pytest.approx(1)
    assert shown[-1]["data_wait"] == pytest.approx(0.25)


def test_writing_checkpoints_is_neither_work_nor_waiting(tmp_path):
    saver = SlowCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    shown, _ = fit(tmp_path, Clock(), batches=[[4]] * 4, callbacks=[saver])
    assert shown[-1]["data_wait"] == pytest.approx(3 / 15), "the wait after the checkpoint is left out"
    assert shown[-1]["tokens_per_s"] == pytest.approx(16 / 15)


def test_the_window_forgets(tmp_path):
    clock = Clock()
    shown, _ = fit(tmp_path, clock, batches=[[100], [4], [4]], monitor=GoodputMonitor(window=2, clock=clock))
    assert shown[-1]["tokens_per_s"] == pytest.approx(1)


def test_any_batch_with_a_function_that_measures_it(tmp_path):
    clock = Clock()
    monitor = GoodputMonitor(measure=lambda batch: BatchSize(6, 2, slots=10, longest=5), clock=clock)
    shown, rows = fit(tmp_path, clock, batches=[[1]], monitor=monitor)
    assert shown[-1]["padding"] == pytest.approx(0.4)
    assert float(rows[-1]["padding_avoided"]) == pytest.approx(0.4)


def test_an_empty_window_is_refused():
    with pytest.raises(ConfigError, match="window"):
        GoodputMonitor(window=0)
