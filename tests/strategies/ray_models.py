"""A small regression with everything a run leaves behind; workers import this file by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES = 48


def samples() -> TensorDataset:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


class Regression(LightningModule):
    def __init__(self, width: int = 8, spare: bool = False, noise: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        self.noise = noise
        if spare:
            self.spare = nn.Linear(3, 3)

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss((batch[0] + self.noise * torch.randn_like(batch[0]), batch[1]))
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return batch[0][:, 0]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class GoesOn(DistributedSampler):
    """In order, each rank its share; a resumed epoch goes on where the checkpoint was taken.

    Args:
        trainer: Whose progress counts.
        batch_size: Samples of a batch on one rank.
    """

    def __init__(self, trainer, batch_size) -> None:
        super().__init__(samples(), trainer.world_size, trainer.global_rank, shuffle=False)
        self.trainer, self.batch_size = trainer, batch_size

    def __iter__(self):
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.completed
        yield from list(super().__iter__())[done * self.batch_size :]


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.epochs_served = 0

    def train_dataloader(self):
        return DataLoader(samples(), batch_size=self.batch_size, sampler=GoesOn(self.trainer, self.batch_size))

    def val_dataloader(self):
        return DataLoader(samples(), batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader

    def state_dict(self):
        return {"epochs_served": self.trainer.current_epoch}

    def load_state_dict(self, state_dict):
        self.epochs_served = state_dict["epochs_served"]


class Counter(Callback):
    """Notes plain things, and something only its own state knows."""

    def __init__(self) -> None:
        self.batches = 0
        self.losses = []
        self._hidden = object()
        self.loaded = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1
        self.losses.append(float(outputs["loss"].detach()))

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict["batches"]


class Mishap(Callback):
    """Things happen on one rank: the first after `step` optimizer steps, the next after twice as many, and so on.

    Args:
        marker: A file that remembers how many did.
        what: `kill`, `hang`, `raise`, `terminate`, `lose node`, or a list of them.
        rank: On which rank.
        step: After how many optimizer steps.
    """

    def __init__(self, marker: Path, what: str | list[str], rank: int = 1, step: int = 3) -> None:
        self.marker, self.what, self.rank, self.step = Path(marker), what, rank, step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        done = len(self.marker.read_text()) if self.marker.exists() else 0
        coming = [self.what] if isinstance(self.what, str) else self.what
        due = done < len(coming) and trainer.global_step == self.step * (done + 1)
        if not due or trainer.global_rank != self.rank:
            return
        self.marker.write_text("x" * (done + 1))
        if coming[done] == "raise":
            raise ValueError("the mishap")
        if coming[done] == "lose node":
            os.kill(os.getppid(), signal.SIGKILL)  # Ray's process of this node, which takes all workers with it
            signal.pause()
        number = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "terminate": signal.SIGTERM}[coming[done]]
        os.kill(os.getpid(), number)
