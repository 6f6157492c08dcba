"""FP8 under FSDP2Strategy and on Ray: two ranks have the losses of one process, and resume.

A rank rounds what it has of a batch. With one scale a row or column that is a power of two, rounding does not depend on
how the batch was split, so losses agree as in float32; scales of a whole tensor do, in the first step of `delayed`.
"""

import csv

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_embodied.precision import FP8Linear, FP8Precision
from lightning_embodied.strategies import FSDP2Strategy
from tests.precision.networks import FlowModule, samples, trainer
from tests.strategies.ranks import run_ranks

SAMPLES, BATCH, EPOCHS = 24, 6, 2
TOLERANCE = {"rowwise": 1e-6, "delayed": 1e-3}


class Logged(FlowModule):
    """Logs the loss of all ranks, which share each batch."""

    def train_dataloader(self):
        world, rank = self.trainer.world_size, self.trainer.global_rank
        given = samples(SAMPLES)
        sampler = DistributedSampler(given, world, rank, shuffle=False)
        return DataLoader(given, batch_size=BATCH // world, sampler=sampler)

    def training_step(self, batch, batch_idx):
        assert isinstance(self.net.blocks[1].fc1, FP8Linear)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss


def fit(directory, recipe, ranks=1, strategy="auto", epochs=EPOCHS, ckpt_path=None, **options):
    """Returns the module after training; the losses are in `directory`."""
    module = Logged()
    run = trainer(
        max_epochs=epochs,
        devices=ranks,
        strategy=strategy,
        plugins=FP8Precision(recipe, "emulated"),
        logger=CSVLogger(directory, name="", version=""),
        log_every_n_steps=1,
        default_root_dir=directory,
        **options,
    )
    run.fit(module, ckpt_path=ckpt_path)
    return module


def losses(directory):
    with (directory / "metrics.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def weights(module):
    whole = (value.full_tensor() if isinstance(value, DTensor) else value for value in module.parameters())
    return [value.detach().clone() for value in whole]


def fsdp2(rank, directory):
    for recipe in TOLERANCE:
        for replicate, recomputed in ((1, ()), (2, ["Block"])):
            strategy = FSDP2Strategy(replicate=replicate, activation_checkpointing=recomputed)
            module = fit(directory / f"{recipe}-{replicate}", recipe, 2, strategy)
            assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    saved = ModelCheckpoint(dirpath=directory / "saved", save_last=True)
    keep = {"callbacks": [saved], "enable_checkpointing": True}
    fit(directory / "begun", "delayed", 2, FSDP2Strategy(), epochs=1, **keep)
    resumed = fit(directory / "resumed", "delayed", 2, FSDP2Strategy(), ckpt_path=saved.last_model_path)
    straight = fit(directory / "straight", "delayed", 2, FSDP2Strategy())
    return weights(resumed), weights(straight)


def test_two_sharded_ranks_train_as_one_process_and_resume_to_the_bit(tmp_path):
    resumed, straight = run_ranks(2, fsdp2, tmp_path / "ranks", tmp_path)[0]
    assert all(torch.equal(found, expected) for found, expected in zip(resumed, straight, strict=True))
    for recipe, tolerance in TOLERANCE.items():
        fit(tmp_path / recipe, recipe)
        expected = losses(tmp_path / recipe)
        assert len(expected) == EPOCHS * SAMPLES // BATCH
        for replicate in (1, 2):
            assert losses(tmp_path / f"{recipe}-{replicate}") == pytest.approx(expected, rel=tolerance)


@pytest.mark.ray
@pytest.mark.slow
def test_two_ranks_on_ray_train_as_one_process_and_resume(ray_cluster, tmp_path):
    from lightning_embodied.strategies import RayDDPStrategy, RayFSDPStrategy

    def hsdp():
        return RayFSDPStrategy(replicate=2, num_workers=2, restart="warm")

    fit(tmp_path / "alone", "delayed")
    fit(tmp_path / "ddp", "delayed", 2, RayDDPStrategy(num_workers=2, restart="warm"))
    saved = ModelCheckpoint(dirpath=tmp_path / "saved", save_last=True)
    fit(tmp_path / "begun", "delayed", 2, hsdp(), epochs=1, callbacks=[saved], enable_checkpointing=True)
    fit(tmp_path / "resumed", "delayed", 2, hsdp(), ckpt_path=saved.last_model_path)
    expected = pytest.approx(losses(tmp_path / "alone"), rel=TOLERANCE["delayed"])
    assert losses(tmp_path / "ddp") == expected
    assert losses(tmp_path / "begun") + losses(tmp_path / "resumed") == expected
