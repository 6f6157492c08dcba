"""A run whose every step writes down which samples each rank took; workers import this file by name."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import Dataset

from lightning_embodied.data import ResumableLoader, SampleOrder

SAMPLES = 100_000


class Numbers(Dataset):
    def __getitem__(self, index):
        return torch.full((4,), index / SAMPLES), torch.tensor([index / SAMPLES]), index

    def __len__(self):
        return SAMPLES


class NumberedData(LightningDataModule):
    """One long epoch, of which each step takes the next four samples a rank."""

    def train_dataloader(self):
        run = self.trainer
        return ResumableLoader(
            Numbers(),
            SampleOrder(SAMPLES, seed=5),
            trainer=run,
            batch_size=4,
            rank=run.global_rank,
            world_size=run.world_size,
        )


class Ledger(Callback):
    """Writes a line for every step of every rank, and ends the run some steps after the last change of size.

    Args:
        path: The file.
        attempts: How many attempts there are to be.
        steps: Steps of the last one.
    """

    def __init__(self, path: Path, attempts: int, steps: int = 4) -> None:
        self.path, self.attempts, self.steps, self.done = path, attempts, steps, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        attempt = trainer.strategy.environment.assignment.attempt
        line = {"step": trainer.global_step, "attempt": attempt, "rank": trainer.global_rank}
        with self.path.open("a") as file:
            file.write(json.dumps({**line, "ranks": trainer.world_size, "ids": batch[2].tolist()}) + "\n")
        self.done += 1
        threading.Event().wait(0.05)  # as a GPU's step would: what starts beside it needs the CPU
        if attempt + 1 == self.attempts and self.done == self.steps:
            trainer.should_stop = True


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trained(path: Path) -> list[list[dict]]:
    """Lines of each step, in order, by rank; of a step that was done again after a restart, those that count."""
    last: dict[int, int] = {}
    steps: dict[tuple[int, int], list[dict]] = {}
    for line in lines(path):
        last[line["step"]] = max(line["attempt"], last.get(line["step"], 0))
        steps.setdefault((line["step"], line["attempt"]), []).append(line)
    return [sorted(steps[key], key=lambda line: line["rank"]) for key in sorted(last.items())]
