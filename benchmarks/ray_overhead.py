"""What Ray costs a training run: seconds to start, time of a step, seconds from a lost worker to the next step.

    python benchmarks/ray_overhead.py [--restart warm] [--runs 4] [--steps 200] [--width 512]

Lightning's own `ddp_spawn` is the baseline; runs alternate, so that a noisy machine disturbs all alike. A step is the
wall time between two batches of rank 0; there is nothing to gain in it, for both run the same DDP.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_embodied.strategies import RayDDPStrategy

WARM_UP = 20


class Net(LightningModule):
    """Three layers and no data worth the name."""

    def __init__(self, width: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def training_step(self, batch, batch_idx):  # noqa: D102
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):  # noqa: D102
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(Callback):
    """Rank 0 notes when each batch begins; rank 1 may be killed once, at a step.

    Args:
        path: File for the times.
        kill_at: The step; None for an undisturbed run.
    """

    def __init__(self, path: Path, kill_at: int | None = None):
        self.path, self.kill_at = path, kill_at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        """Called by Lightning."""
        note = self.path.with_suffix(".killed")
        if trainer.global_rank == 1 and trainer.global_step == self.kill_at and not note.exists():
            note.write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_rank == 0:
            with self.path.open("a") as file:
                file.write(json.dumps(time.time()) + "\n")


def run(strategy, width: int, steps: int, kill_at: int | None = None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        clock = Clock(Path(directory) / "times", kill_at)
        data = TensorDataset(torch.randn(64 * steps, 64))
        callbacks = [clock]
        if kill_at is not None:
            callbacks.append(ModelCheckpoint(directory, every_n_train_steps=10, save_top_k=1))
        trainer = Trainer(
            strategy=strategy,
            devices=2,
            accelerator="cpu",
            max_steps=steps,
            max_epochs=-1,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=kill_at is not None,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory,
        )
        begun = time.time()
        trainer.fit(Net(width), DataLoader(data, batch_size=32))
        ended = time.time()
        times = [json.loads(line) for line in clock.path.read_text().splitlines()]
        found = {"start": times[0] - begun, "call": ended - begun}
        if kill_at is not None:
            killed = float(clock.path.with_suffix(".killed").read_text())
            return {**found, "recovery": next(moment for moment in times if moment > killed + 0.1) - killed}
        gaps = [b - a for a, b in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]
        return {**found, "step": statistics.median(gaps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restart", choices=("warm", "cold"), default="warm")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()

    def ours(steps: int, kill_at: int | None = None) -> dict[str, float]:
        strategy = RayDDPStrategy(num_workers=2, address="local", restart=args.restart)
        return run(strategy, args.width, steps, kill_at)

    first = ours(args.steps)
    pairs = [(run("ddp_spawn", args.width, args.steps), ours(args.steps)) for _ in range(args.runs)]
    killed = ours(80, kill_at=40)
    (their_step, our_step), (their_start, our_start) = (
        [statistics.median(pair[side][what] for pair in pairs) for side in (0, 1)] for what in ("step", "start")
    )
    ratio = statistics.median(b["step"] / a["step"] for a, b in pairs)
    print(f"restart: {args.restart}, {torch.get_num_threads()} threads in the driver, two ranks")
    print(
        f"step: ddp_spawn {their_step * 1e3:.2f} ms, ray_ddp {our_step * 1e3:.2f} ms, median paired ratio {ratio:.3f}"
    )
    print(f"seconds to the first batch: ddp_spawn {their_start:.1f}, ray_ddp {our_start:.1f}", end=" ")
    print(f"({first['start']:.1f} the first time, with starting Ray)")
    print(f"seconds from SIGKILL of a worker to the next step: {killed['recovery']:.1f}")


if __name__ == "__main__":
    main()
