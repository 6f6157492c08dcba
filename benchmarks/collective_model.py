"""How well two constants predict collectives: fitted to some sizes on this machine's gloo, asked for the others.

Sizes alternate between those fitted to and those held out, so none is far from a fitted one; times are medians of
interleaved rounds. The case without gain is the smallest sizes, where the spread of the times themselves is as large.
Run: `python benchmarks/collective_model.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_embodied.planning import MeasuredLink, Measurement

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
SIZES = tuple(2**power for power in range(18, 26))  # 256 KiB to 32 MiB


def measure(rank: int, ranks: int, directory: str, rounds: int) -> None:
    """One rank; rank 0 writes the medians."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(directory, "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    whole = torch.zeros(SIZES[-1] // 4)
    share = torch.zeros(SIZES[-1] // 4 // ranks)
    times: dict[tuple[str, int], list[float]] = {(kind, size): [] for kind in KINDS for size in SIZES}
    for _ in range(rounds + 1):
        for (kind, size), seconds in times.items():
            full, part = whole[: size // 4], share[: size // 4 // ranks]
            dist.barrier()
            begin = time.perf_counter()
            if kind == "all_gather":
                dist.all_gather_into_tensor(full, part)
            elif kind == "reduce_scatter":
                dist.reduce_scatter_tensor(part, full)
            else:
                dist.all_reduce(full)
            seconds.append(time.perf_counter() - begin)
    if rank == 0:
        rows = [(kind, size, statistics.median(values[1:])) for (kind, size), values in times.items()]
        (Path(directory) / "times.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def times_of(ranks: int, rounds: int) -> list[Measurement]:
    """Starts the ranks and reads what they measured."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--rounds", str(rounds), "--ranks", str(ranks), "--directory", directory]
        processes = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(ranks)]  # noqa: S603
        assert all(process.wait() == 0 for process in processes)
        return [Measurement(*row) for row in json.loads((Path(directory) / "times.json").read_text())]


def main() -> None:
    """Prints measured and predicted milliseconds of the sizes held out, and the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--directory")
    options = parser.parse_args()
    if options.rank is not None:
        measure(options.rank, options.ranks, options.directory, options.rounds)
        return
    print("ranks  collective        size MiB  measured ms  predicted ms  ratio")
    errors = []
    for ranks in (2, 4):
        measured = times_of(ranks, options.rounds)
        link = MeasuredLink.fit(ranks, [one for one in measured if SIZES.index(one.size) % 2 == 0])
        for one in measured:
            if SIZES.index(one.size) % 2:
                predicted = link.seconds(one.kind, one.size, ranks)
                errors.append(abs(predicted / one.seconds - 1))
                print(
                    f"{ranks:5d}  {one.kind:<16}  {one.size / 2**20:8.2f}  {1e3 * one.seconds:11.3f}"
                    f"  {1e3 * predicted:12.3f}  {predicted / one.seconds:5.2f}"
                )
    print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%} (bound 15 %)")


if __name__ == "__main__":
    main()
