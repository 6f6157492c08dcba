"""How long training waits for a sharded checkpoint: ours beside training, ours in its way, and Lightning's own.

Two gloo ranks train the same model and save it with its optimizer. The peer is `ModelParallelStrategy`, which writes
before it returns; the bound is one copy of the shards in memory, which a save beside training cannot do without. A
save that comes while one is being written waits for it, and where ranks have no core to spare, as here, the whole run
gains nothing: writing takes the time that waiting would have.

Run: `python benchmarks/async_checkpoint.py`.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from timing import table
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes
from torch.utils.data import DataLoader

from lightning_embodied.strategies import AsyncShardedCheckpoint, FSDP2Strategy

RANKS, WIDTH = 2, 1024


@dataclass(frozen=True)
class Case:
    """How long a run is and how often it saves."""

    steps: int
    every: int


CASES = (Case(steps=9, every=3), Case(steps=3, every=1))


class Layer(nn.Module):
    """8.4 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return x + self.down(torch.relu(self.up(x)))


class Model(LightningModule):
    """Layers to train."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Layer() for _ in range(depth)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:  # noqa: D102
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class ShardsItself(Model):
    """What Lightning's strategy asks of a module."""

    def configure_model(self) -> None:  # noqa: D102
        for layer in self.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


class Saves(Callback):
    """Saves and keeps the time that training waited."""

    def __init__(self, directory: Path, every: int) -> None:
        self.directory, self.every, self.waited = directory, every, []

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:  # noqa: D102
        if trainer.global_step % self.every == 0:
            dist.barrier()
            start = time.perf_counter()
            trainer.save_checkpoint(self.directory / f"{trainer.global_step}.ckpt")
            self.waited.append(time.perf_counter() - start)


def copy_seconds(trainer: Trainer) -> float:
    """Time to copy this rank's parameters and optimizer state."""
    state = [value for one in trainer.optimizers[0].state.values() for value in one.values()]
    held = [value.to_local() for value in [*trainer.model.parameters(), *state] if isinstance(value, DTensor)]
    start = time.perf_counter()
    copies = [value.clone() for value in held]
    seconds = time.perf_counter() - start
    del copies
    return seconds


STRATEGIES: dict[str, Callable[[], tuple[type[Model], ModelParallelStrategy, list[AsyncShardedCheckpoint]]]] = {
    "beside training": lambda: (Model, FSDP2Strategy(), [AsyncShardedCheckpoint()]),
    "in its way": lambda: (Model, FSDP2Strategy(), [AsyncShardedCheckpoint(asynchronous=False)]),
    "Lightning": lambda: (ShardsItself, ModelParallelStrategy(RANKS, 1), []),
}


def fit(name: str, directory: Path, depth: int, case: Case) -> tuple[float, float, float]:
    """Median seconds that training waited for a save, seconds of the run, seconds of copying the shards."""
    model_class, strategy, plugins = STRATEGIES[name]()
    saves = Saves(directory / name, case.every)
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, plugins=plugins or None, callbacks=[saves],
        max_steps=case.steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    data = DataLoader(torch.randn(RANKS * case.steps, 16, WIDTH), batch_size=1)
    start = time.perf_counter()
    trainer.fit(model_class(depth), data)
    seconds = time.perf_counter() - start
    shutil.rmtree(directory, ignore_errors=True)
    return statistics.median(saves.waited), seconds, copy_seconds(trainer)


def run(rank: int, port: int, directory: str, depth: int) -> None:
    """One rank."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0",
        WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), TORCHELASTIC_RUN_ID="benchmark",
    )  # fmt: skip
    for case in CASES:
        results = {name: fit(name, Path(directory), depth, case) for name in STRATEGIES}
        if rank == 0:
            report(case, results)


def report(case: Case, results: dict[str, tuple[float, float, float]]) -> None:
    """Prints a table."""
    bound = min(copied for *_, copied in results.values())
    ours = results["beside training"][0]
    rows: list[dict[str, object]] = [
        {
            "saved": name,
            "training waits, s": f"{waited:.3f}",
            "by ours": f"{waited / ours:.1f}",
            "by the bound": f"{waited / bound:.1f}",
            "whole run, s": f"{seconds:.1f}",
        }
        for name, (waited, seconds, _) in results.items()
    ]
    table(f"saved every {case.every} of {case.steps} steps; the bound is {bound:.3f} s", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=4, help="layers of 8.4 million parameters")
    options = parser.parse_args()
    size = options.depth * sum(param.numel() for param in Layer().parameters()) * 12 / 1e9
    print(f"{size:.2f} GB of parameters and optimizer state on {RANKS} ranks")
    with tempfile.TemporaryDirectory() as directory:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        start_processes(run, (port, directory, options.depth), nprocs=RANKS, start_method="spawn")


if __name__ == "__main__":
    main()
