"""Share of a training step that waits for data: our loader, decoded cache off and on, against a plain DataLoader.

All read the same dataset through the same `LeRobotDataset`, in this run, alternating; the peer is
`torch.utils.data.DataLoader(shuffle=True)` without the cache. A step is a sleep, as of a host whose accelerator
works; the long step is the case without gain, where loading hides behind it. Run: `python benchmarks/data_wait.py`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from lightning_embodied.data import LeRobotDataset, LeRobotDatasetWriter, ResumableLoader, SampleOrder
from lightning_embodied.features import Feature
from lightning_embodied.packing import SampleEncoder, VarlenPackingCollator

CAMERAS = ("observation.images.top", "observation.images.wrist")


def record(root: Path, episodes: int, frames: int, size: int) -> None:
    """Writes moving gradients, which compress as camera pictures do."""
    features = {camera: Feature("video", (size, size, 3)) for camera in CAMERAS}
    features |= {"observation.state": Feature("float32", (8,)), "action": Feature("float32", (7,))}
    ramp = np.add.outer(np.arange(size), np.arange(size))[..., None] * np.array([1, 2, 3])
    random = np.random.default_rng(0)
    with LeRobotDatasetWriter(root, fps=10, features=features) as writer:
        for episode in range(episodes):
            for frame in range(frames):
                picture = ((ramp + 4 * frame + 31 * episode) % 256).astype(np.uint8)
                numbers = {"observation.state": random.random(8), "action": random.random(7)}
                writer.add_frame(
                    {
                        **dict.fromkeys(CAMERAS, picture),
                        **{key: value.astype(np.float32) for key, value in numbers.items()},
                        "task": "move the gradient",
                    }
                )
            writer.save_episode()


def wait_share(loader: Iterable[Any], step: float, batches: int) -> float:
    """Waiting over all time, after two batches to start up."""
    iterator = iter(loader)
    waited = total = 0.0
    for number in range(batches + 2):
        begin = time.perf_counter()
        next(iterator)
        ready = time.perf_counter()
        time.sleep(step)
        if number >= 2:
            waited += ready - begin
            total += time.perf_counter() - begin
    del iterator
    return waited / total


def main() -> None:
    """Prints one row a case: the medians, and ours by the peer's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=8, help="batches measured in each repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps-ms", type=float, nargs="+", default=[20.0, 1000.0], help="length of a step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "dataset"
        record(root, episodes=8, frames=60, size=96)
        windows = {"action": [frame / 10 for frame in range(16)]}
        plain = LeRobotDataset(root, delta_timestamps=windows)
        cached = LeRobotDataset(root, delta_timestamps=windows, decoded_cache_gb=1.0)
        collator = VarlenPackingCollator(SampleEncoder(image_size=(96, 96)))
        print(f"{len(plain)} frames, {len(CAMERAS)} cameras of 96 px, batch {options.batch_size}")
        print("step ms  workers  ours    ours, cache  peer    ours/peer  ours, cache/peer")
        for step, workers in itertools.product(options.steps_ms, (0, 2)):
            common = {"batch_size": options.batch_size, "num_workers": workers, "collate_fn": collator}
            shares: dict[str, list[float]] = {"ours": [], "cache": [], "peer": []}
            for _ in range(options.repeats):
                order = SampleOrder(len(plain))
                loaders = {
                    "ours": ResumableLoader(plain, order, **common),
                    "cache": ResumableLoader(cached, order, **common),
                    "peer": DataLoader(plain, shuffle=True, **common),
                }
                for name, loader in loaders.items():
                    shares[name].append(wait_share(loader, step / 1000, options.batches))
            ours, cache, peer = (statistics.median(shares[name]) for name in ("ours", "cache", "peer"))
            print(
                f"{step:7.0f}  {workers:7d}  {ours:6.3f}  {cache:11.3f}  {peer:6.3f}"
                f"  {ours / peer:9.2f}  {cache / peer:16.2f}"
            )


if __name__ == "__main__":
    main()
