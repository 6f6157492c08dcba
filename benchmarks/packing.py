"""Packing: how much padding the planners leave, how equal the ranks' work is, and what a training step gains.

    OMP_NUM_THREADS=1 python benchmarks/packing.py [planners] [padding] [mixture]

Prints ours, the baseline, the bound and the ratio; the last rows of each table are the cases without gain. Two
baselines of the training step: padding to the longest sample of the batch, and to a fixed length as openpi and LeRobot
do for pi0 and pi0.5. Packs are sorted by length, as `VarlenPackingCollator(sort_by_length=True)` does. A ratio may be
above the bound 1 / (1 - padding), which counts tokens, because attention grows with their square; with few tokens left
it is below, because reading the weights and writing their gradients costs the same however few there are.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import torch
from robot_mixture import mixture
from timing import Bench, table
from torch import Tensor, nn
from torch.nn import functional

from lightning_embodied.attention import varlen_attention
from lightning_embodied.packing import balance_packs, padding_share, plan_packs


def planners(lengths: list[int], title: str) -> None:
    rows: list[dict[str, object]] = []
    for budget in (2048, 4096, 8192):
        bound = -(-sum(lengths) // budget)
        baseline = len(plan_packs(lengths, budget, "padded"))
        for planner in ("first-fit-decreasing", "best-fit-window", "length-grouped"):
            start = time.process_time()
            packs = plan_packs(lengths, budget, planner)
            seconds = time.process_time() - start
            rows.append(
                {
                    "budget": budget,
                    "planner": planner,
                    "packs": len(packs),
                    "padded": baseline,
                    "bound": bound,
                    "ratio": f"{baseline / len(packs):.2f}",
                    "unfilled": f"{padding_share(lengths, packs, budget):.2%}",
                    "CPU s": f"{seconds:.3f}",
                }
            )
    table(title, rows)


def padded_batches(lengths: list[int]) -> None:
    rows: list[dict[str, object]] = []
    for size in (8, 32):
        batches = [lengths[i : i + size] for i in range(0, len(lengths), size)]
        wasted = 1 - sum(lengths) / sum(max(batch) * len(batch) for batch in batches)
        rows.append({"batch": size, "padding": f"{wasted:.1%}"})
    table("the same samples in batches padded to their longest", rows)


def ranks(lengths: list[int], number: int = 8, quadratic: float = 1e-3) -> None:
    packs = plan_packs(lengths, 4096)
    rows: list[dict[str, object]] = []
    for name, factor in (("linear cost only (no gain)", 0.0), ("with attention's square", quadratic)):

        def excess(steps: list[list[list[int]]], factor: float = factor) -> float:
            costs = [[sum(lengths[i] + factor * lengths[i] ** 2 for i in pack) for pack in step] for step in steps]
            return sum(max(step) * len(step) / sum(step) - 1 for step in costs) / len(costs)

        as_planned = [packs[i : i + number] for i in range(0, len(packs) - number + 1, number)]
        ours, baseline = excess(balance_packs(lengths, packs, number, quadratic_cost=factor)), excess(as_planned)
        rows.append(
            {
                "cost": name,
                "ours": f"{ours:.2%}",
                "as planned": f"{baseline:.2%}",
                "bound": "0",
                "step time ratio": f"{(1 + baseline) / (1 + ours):.3f}",
            }
        )
    table(f"slowest of {number} ranks above the mean", rows)


class Layer(nn.Module):
    """A transformer layer that runs packed (cumulative lengths) or padded (mask), with the same weights."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def packed(self, x: Tensor, cu: Tensor, longest: int) -> Tensor:
        """`[T, width]` with cumulative lengths `[B + 1]`."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        x = x + self.out(varlen_attention(q, k, v, cu, cu, longest, longest).flatten(1))
        return x + self.mlp(self.norm2(x))

    def padded(self, x: Tensor, mask: Tensor) -> Tensor:
        """`[B, L, width]` with a mask of the tokens that exist."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def lengths_with_padding(share: float, longest: int, number: int) -> list[int]:
    """One longest sample, the others around the mean that leaves `share` of the padded batch empty."""
    mean = (number * (1 - share) - 1) * longest / (number - 1)
    spread = min(mean - 1, longest - mean)
    return [longest, *(round(mean + spread * (2 * i / (number - 2) - 1) * 0.6) for i in range(number - 1))]


def steps(bench: Bench, layers: nn.ModuleList, lengths: list[int], longest: int) -> dict[str, Callable[[], Tensor]]:
    """A training step of the same samples, packed and padded; both give the same rows and gradients."""
    cu, most = bench.cumulative(lengths), max(lengths)
    here = torch.arange(longest, device=bench.device) < cu.diff()[:, None]
    tokens = bench.randn(len(lengths), longest, layers[0].norm.weight.shape[0])
    packed_tokens = tokens[here]

    def packed() -> Tensor:
        layers.zero_grad()
        rows = packed_tokens
        for layer in layers:
            rows = layer.packed(rows, cu, most)
        rows.float().square().sum().backward()
        return rows

    def padded() -> Tensor:
        layers.zero_grad()
        rows = tokens
        for layer in layers:
            rows = layer.padded(rows, here[:, None, None])
        rows[here].float().square().sum().backward()
        return rows[here]

    results, gradients = [], []
    for step in (packed, padded):
        results.append(step().detach())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in layers.parameters()]))
    bench.assert_same(*results)
    bench.assert_same(*gradients)
    return {"ours": packed, "padded": padded}


def row(bench: Bench, name: str, layers: nn.ModuleList, lengths: list[int], longest: int) -> dict[str, object]:
    functions = steps(bench, layers, lengths, longest)
    times = bench.milliseconds(functions)
    memory = {name: bench.peak_mebibytes(function) for name, function in functions.items()}
    padding = 1 - sum(lengths) / (longest * len(lengths))
    ratio, bound = times["padded"] / times["ours"], 1 / (1 - padding)
    return {
        "case": name,
        "padding": f"{padding:.0%}",
        "ours ms": f"{times['ours']:.1f}",
        "padded ms": f"{times['padded']:.1f}",
        "bound": f"{bound:.2f}",
        "ratio": f"{ratio:.2f}",
        "of bound": f"{ratio / bound:.2f}",
        "ours MiB": f"{memory['ours']:.0f}",
        "padded MiB": f"{memory['padded']:.0f}",
        "memory ratio": f"{memory['padded'] / memory['ours']:.2f}",
    }


def train_steps(
    bench: Bench, *, width: int = 256, heads: int = 4, depth: int = 2, number: int = 64, longest: int = 192,
    shrink: int = 8, parts: Sequence[str] = ("padding", "mixture"),
) -> None:  # fmt: skip
    """Prints a training step at given paddings, and on the mixture with lengths divided by `shrink`."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(width, heads) for _ in range(depth)).to(bench.device, bench.dtype)
    shape = f"{depth} layers of width {width}, {bench.dtype} on {bench.device}"
    if "padding" in parts:
        given_padding(bench, layers, number, longest, shape)
    if "mixture" in parts:
        on_mixture(bench, layers, shrink, shape)


def given_padding(bench: Bench, layers: nn.ModuleList, number: int, longest: int, shape: str) -> None:
    rows = []
    for share in (0.9, 0.6, 0.47, 0.2, 0.0):
        lengths = sorted(lengths_with_padding(share, longest, number))
        rows.append(row(bench, f"{share:.0%}" if share else "0% (no gain)", layers, lengths, longest))
    few = sorted(lengths_with_padding(0.9, longest, number // 4))
    rows.append(row(bench, f"{len(few)} samples: {sum(few)} tokens", layers, few, longest))
    table(f"training step at a given padding: {number} samples padded to {longest}, {shape}", rows)


def on_mixture(bench: Bench, layers: nn.ModuleList, shrink: int, shape: str) -> None:
    short = [max(1, length // shrink) for length in mixture(2000)]
    rows = []
    for size in (8, 32):
        batch = sorted(short[:size])
        rows.append(row(bench, f"{size} samples, fixed length", layers, batch, max(short)))
        rows.append(row(bench, f"{size} samples, to the longest", layers, batch, max(batch)))
    equal = [max(short) // 4] * 32
    rows.append(row(bench, "32 equal samples (no gain)", layers, equal, equal[0]))
    table(f"training step on the mixture, lengths divided by {shrink}, {shape}", rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or ["planners", "padding", "mixture"]
    if "planners" in chosen:
        planners(mixture(20_000), "packs of 20,000 samples of a robot mixture")
        padded_batches(mixture(20_000))
        planners([512] * 4000, "all samples equal: no gain")
        ranks(mixture(20_000))
    train_steps(Bench(seconds=6.0), parts=chosen)
