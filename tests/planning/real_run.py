"""A small model trained on real gloo ranks, with the most memory that torch's allocator held in a step.

Run as a process of its own for each of four ranks: `python real_run.py RANK DIRECTORY`. Rank 0 writes `peaks.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

from lightning_embodied.planning import Sharding

BATCH, TOKENS, WIDTH = 12, 48, 128
HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
CASES = {
    "1 rank": (Sharding("ddp", 1), "32-true"),
    "ddp": (Sharding("ddp", 2), "32-true"),
    "ddp, buckets beside": (Sharding("ddp", 2, bucket_view=False), "bf16-mixed"),
    "fsdp, 2 ranks": (Sharding("fsdp", 2, 2, ("Block",)), "32-true"),
    "fsdp": (Sharding("fsdp", 4, 4, ("Block",)), "32-true"),
    "fsdp, bf16": (Sharding("fsdp", 4, 4, ("Block",), **HALF), "bf16-mixed"),
    "hsdp": (Sharding("hsdp", 4, 2, ("Block",)), "32-true"),
}


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Network(nn.Module):
    """Layers between two projections; the last one has 7 rows, so that shards are padded."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(24, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def peak_bytes(sharding: Sharding, precision: str) -> int:
    """Most bytes during a step whose optimizer states exist already."""
    network: nn.Module = Network()
    sharding.apply(network)
    trained, buckets = network, 0
    if sharding.strategy == "ddp" and sharding.ranks > 1:
        trained = DistributedDataParallel(network, gradient_as_bucket_view=sharding.bucket_view)
        buckets = sum(parameter.nbytes for parameter in network.parameters())
    optimizer = AdamW(network.parameters(), foreach=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = trained(torch.randn(BATCH, TOKENS, 24)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()  # DDP makes its buckets anew after the first
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in (*network.parameters(), *states)]
    # gloo's threads may hold a buffer a moment longer, in some steps
    most = sorted(_most_allocated(step) for _ in range(3))[1]
    return sum(tensor.nbytes for tensor in held) + buckets + most


def _most_allocated(step) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def main(rank: int, directory: Path) -> None:
    """Runs the cases of four ranks, then those of the first two, then that of the first."""
    torch.set_num_threads(1)
    peaks = {}
    for ranks in (4, 2, 1):
        if rank < ranks:
            store = dist.FileStore(str(directory / f"store{ranks}"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            for name, (sharding, precision) in CASES.items():
                if sharding.ranks == ranks:
                    peaks[name] = peak_bytes(sharding, precision)
            dist.barrier()
            dist.destroy_process_group()
    if rank == 0:
        (directory / "peaks.json").write_text(json.dumps(peaks))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
