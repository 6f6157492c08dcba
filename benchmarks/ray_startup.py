"""Seconds until many Ray workers train together, and their memory, against their number.

    python benchmarks/ray_startup.py [--workers 2 8 16 32] [--nodes 4] [--steps 5]

Each worker is a process of its own with torch and Lightning, spread over several of Ray's nodes on this machine, and a
rank of gloo's group. The first `fit` starts them, the second finds them there. Memory is that of all processes below
this one, pages that several share counted once (PSS).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import ray
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from ray.cluster_utils import Cluster
from timing import table
from torch import nn
from torch.utils.data import DataLoader

from lightning_embodied.strategies import RayDDPStrategy
from lightning_embodied.strategies.on_ray.warm import close_warm_workers

PATIENCE = 900.0


class Net(LightningModule):
    """One layer; every rank counts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:  # noqa: D102
        self.log("ranks", 1.0, sync_dist=True, reduce_fx="sum")
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(Callback):
    """Rank 0 notes when each batch begins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:  # noqa: D102
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(json.dumps(time.time()) + "\n")


def fit(workers: int, steps: int) -> tuple[float, float, float]:
    """Seconds to the first batch, of a step, and of the whole call."""
    with tempfile.TemporaryDirectory() as directory:
        clock = Clock(Path(directory) / "times")
        strategy = RayDDPStrategy(
            num_workers=workers, restart="warm", placement="spread", resources_per_worker={"seat": 1},
            start_timeout=PATIENCE,
        )  # fmt: skip
        trainer = Trainer(
            strategy=strategy, accelerator="cpu", max_steps=steps, callbacks=[clock], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        begun = time.time()
        trainer.fit(Net(), DataLoader(torch.randn(workers * steps, 8), batch_size=1))
        ended = time.time()
        times = [json.loads(line) for line in clock.path.read_text().splitlines()]
    counted = float(trainer.callback_metrics["ranks"])
    if counted != workers or trainer.global_step != steps:
        raise SystemExit(f"{counted:g} of {workers} ranks did {trainer.global_step} of {steps} steps")
    return times[0] - begun, statistics.median(b - a for a, b in itertools.pairwise(times)), ended - begun


def gibibytes_below(process: int) -> float:
    """Memory of all descendants of a process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended meanwhile
    family = {process}
    while found := {child for child, parent in parents.items() if parent in family} - family:
        family |= found
    return sum(map(_proportional, family - {process})) / 2**20


def _proportional(process: int) -> int:
    """Kibibytes of a process, shared pages by its part in them; none of one that has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def measure(workers: int, nodes: int, steps: int) -> dict[str, object]:
    """One size: a cluster of its own, so that nothing is there before."""
    begun = time.time()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(nodes):
        cluster.add_node(num_cpus=0, resources={"seat": -(-workers // nodes)})
    ray.init(address=cluster.address, log_to_driver=False)
    up = time.time() - begun
    try:
        bare = gibibytes_below(os.getpid())
        start, _, _ = fit(workers, steps)
        held = gibibytes_below(os.getpid())
        again, step, call = fit(workers, steps)
        close_warm_workers()
    finally:
        ray.shutdown()
        cluster.shutdown()
    return {
        "workers": workers,
        "Ray's nodes up, s": f"{up:.1f}",
        "first fit to first batch, s": f"{start:.1f}",
        "second fit to first batch, s": f"{again:.1f}",
        "second fit in all, s": f"{call:.1f}",
        "step, ms": f"{step * 1e3:.0f}",
        "GiB": f"{held:.1f}",
        "GiB before workers": f"{bare:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 16, 32])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")
    rows = []
    for workers in args.workers:
        rows.append(measure(workers, args.nodes, args.steps))
        print(json.dumps(rows[-1]), flush=True)
    table(f"{args.nodes} of Ray's nodes on one machine with {os.cpu_count()} CPU cores", rows)


if __name__ == "__main__":
    main()
