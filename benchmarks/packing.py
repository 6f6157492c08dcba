"""Packing: how much padding the planners leave, how equal the ranks' work is, and what a training step gains.

    OMP_NUM_THREADS=1 python benchmarks/packing.py

Prints ours, the baseline, the bound and the ratio; the last rows of each table are the cases without gain.
"""

from __future__ import annotations

import random
import time

import torch
from timing import cpu_milliseconds, table
from torch import Tensor, nn
from torch.nn import functional

from lightning_embodied.attention import varlen_attention
from lightning_embodied.packing import balance_packs, padding_share, plan_packs


def mixture(number: int, seed: int = 0) -> list[int]:
    """Token counts of five robot datasets: one to six pictures, an instruction, state and actions."""
    choose = random.Random(seed)  # noqa: S311
    kinds = [(64,), (128, 256, 256, 288), (256,), (256, 512, 512, 768), (768, 1024, 1024, 1024, 1024, 1536)]
    drawn = choose.choices(kinds, weights=[15, 25, 25, 25, 10], k=number)
    return [choose.choice(kind) + choose.randint(4, 21) + 17 for kind in drawn]


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

    def __init__(self, width: int = 256, heads: int = 4) -> None:
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


def train_steps(longest: int = 192, number: int = 16, depth: int = 2) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(depth))
    rows: list[dict[str, object]] = []
    for share in (0.9, 0.6, 0.47, 0.2, 0.0):
        lengths = sorted(lengths_with_padding(share, longest, number))
        padding = 1 - sum(lengths) / (longest * number)
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        here = torch.arange(longest) < torch.tensor(lengths)[:, None]
        tokens = torch.randn(number, longest, 256)

        def packed(rows: Tensor = tokens[here], cu: Tensor = cu) -> Tensor:
            layers.zero_grad()
            for layer in layers:
                rows = layer.packed(rows, cu, longest)
            rows.square().sum().backward()
            return rows

        def padded(rows: Tensor = tokens, here: Tensor = here) -> Tensor:
            layers.zero_grad()
            for layer in layers:
                rows = layer.padded(rows, here[:, None, None])
            rows[here].square().sum().backward()
            return rows[here]

        torch.testing.assert_close(packed(), padded(), rtol=1e-4, atol=1e-4)
        times = cpu_milliseconds({"ours": packed, "padded": padded})
        ratio, bound = times["padded"] / times["ours"], 1 / (1 - padding)
        rows.append(
            {
                "padding": f"{padding:.0%}" + (" (no gain)" if padding < 0.01 else ""),
                "ours ms": f"{times['ours']:.0f}",
                "padded ms": f"{times['padded']:.0f}",
                "bound": f"{bound:.2f}",
                "ratio": f"{ratio:.2f}",
                "of bound": f"{ratio / bound:.2f}",
            }
        )
    table(f"training step, {depth} layers of width 256, {number} samples padded to {longest}, one thread", rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    planners(mixture(20_000), "packs of 20,000 samples of a robot mixture")
    planners([512] * 4000, "all samples equal: no gain")
    ranks(mixture(20_000))
    train_steps()
