"""Attention: packed against padded, pi0.5's blocks against a dense mask, shared prefixes against separate passes.

    OMP_NUM_THREADS=1 python benchmarks/attention.py

Attention alone, forward and backward, fp32. Prints ours, the baseline, the bound (share of the work that is needed)
and the ratio; rows without padding or with one draw are the cases without gain.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from timing import cpu_milliseconds, table
from torch import Tensor
from torch.nn import functional

from lightning_embodied.attention import PrefixSuffixLayout, choose_backend, varlen_attention


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def with_backward(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Tensor]:
    inputs = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    grad = torch.randn_like(function(*inputs).detach())

    def step() -> Tensor:
        out = function(*inputs)
        torch.autograd.grad(out, inputs, grad)
        return out.detach()

    return step


def row(name: str, times: dict[str, float], bound: float) -> dict[str, object]:
    ours, *baselines = times
    return {
        "case": name,
        "ours ms": f"{times[ours]:.1f}",
        **{f"{other} ms": f"{times[other]:.1f}" for other in baselines},
        "bound": f"{bound:.2f}",
        "ratio": f"{times[baselines[-1]] / times[ours]:.2f}",
    }


def packed_against_padded() -> None:
    draw = random.Random(0)  # noqa: S311
    cases = {
        "64 x 42, 4 heads x 32 (no gain)": ([42] * 64, 4, 4, 32),
        "64 of 3 lengths 30..62, sorted": (sorted(draw.choice((30, 46, 62)) for _ in range(64)), 4, 4, 32),
        "64 of 3 lengths 30..62, mixed": ([draw.choice((30, 46, 62)) for _ in range(64)], 4, 4, 32),
        "64 of 10..60, sorted": (sorted(draw.randint(10, 60) for _ in range(64)), 4, 4, 32),
        "16 of 100..700, 8 heads x 64": ([draw.randint(100, 700) for _ in range(16)], 8, 8, 64),
        "16 of 100..700, 8 heads, 1 kv head": ([draw.randint(100, 700) for _ in range(16)], 8, 1, 64),
    }
    rows = []
    for name, (lengths, heads, kv_heads, dim) in cases.items():
        longest, total, cu = max(lengths), sum(lengths), cumulative(lengths)
        packed = [torch.randn(total, n, dim) for n in (heads, kv_heads, kv_heads)]
        here = torch.arange(longest) < torch.tensor(lengths)[:, None]
        padded = [torch.zeros(len(lengths), longest, *tensor.shape[1:]) for tensor in packed]
        for full, part in zip(padded, packed, strict=True):
            full[here] = part

        def ours(q: Tensor, k: Tensor, v: Tensor, cu: Tensor = cu, longest: int = longest) -> Tensor:
            return varlen_attention(q, k, v, cu, cu, longest, longest)

        def baseline(q: Tensor, k: Tensor, v: Tensor, here: Tensor = here) -> Tensor:
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
            mask = here[:, None, None]
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
            return out.transpose(1, 2)

        functions = {"ours": with_backward(ours, *packed), "padded": with_backward(baseline, *padded)}
        torch.testing.assert_close(functions["ours"](), functions["padded"]()[here], rtol=1e-4, atol=1e-5)
        bound = longest**2 * len(lengths) / sum(length**2 for length in lengths)
        rows.append(row(name, cpu_milliseconds(functions, 3.0), bound))
    table(f"varlen_attention ({choose_backend(packed[0]).name}) against SDPA on a padded batch", rows)


def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Dense additive float mask as openpi and LeRobot build it; `[B, T, H, D]`."""
    group = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(group, 2) for tensor in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[3] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", (scores + mask).softmax(-1), value)


def pi05_blocks(text: int = 48, horizon: int = 50, views: int = 3, heads: int = 8, dim: int = 32) -> None:
    rows = []
    for name, cameras in {"cameras missing": [1, 2, 3, 1], "nothing missing (no gain)": [3, 3, 3, 3]}.items():
        image = 128
        used = [n * image + text // 3 for n in cameras] if "missing" in name and len(set(cameras)) > 1 else [432] * 4
        fixed = views * image + text
        layout, cu = PrefixSuffixLayout(used, [horizon]), cumulative(used)
        size, longest = len(used), max(used)
        shapes = [(sum(used), n, dim) for n in (heads, 1, 1)] + [(size * horizon, n, dim) for n in (heads, 1, 1)]
        packed = [torch.randn(shape) for shape in shapes]
        real = torch.arange(fixed) < torch.tensor(used)[:, None]
        valid = torch.cat([real, torch.ones(size, horizon, dtype=torch.bool)], 1)
        block = torch.arange(fixed + horizon) >= fixed
        seen = (block[None, :] <= block[:, None])[None] & valid[:, None]
        mask = torch.where(seen, 0.0, -2.38e38)[:, None]
        dense = []
        for first, second in zip(packed[:3], packed[3:], strict=True):
            full = torch.zeros(size, fixed + horizon, *first.shape[1:])
            full[:, :fixed][real] = first
            full[:, fixed:] = second.view(size, horizon, *second.shape[1:])
            dense.append(full)

        def ours(*p: Tensor, layout: PrefixSuffixLayout = layout, cu: Tensor = cu, longest: int = longest) -> Tensor:
            prefix = varlen_attention(p[0], p[1], p[2], cu, cu, longest, longest)
            return torch.cat([prefix, layout.attend(p[3], (p[1], p[2]), (p[4], p[5]))])

        functions = {
            "ours": with_backward(ours, *packed),
            "masked SDPA": with_backward(
                lambda q, k, v, mask=mask: functional.scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
                ).transpose(1, 2),
                *dense,
            ),
            "dense eager": with_backward(lambda q, k, v, mask=mask: eager(q, k, v, mask), *dense),
        }
        suffix = functions["dense eager"]()[:, fixed:].reshape(-1, heads, dim)
        torch.testing.assert_close(functions["ours"]()[sum(used) :], suffix, rtol=1e-4, atol=1e-5)
        work = sum(n * n + horizon * (n + horizon) for n in used)
        rows.append(row(name, cpu_milliseconds(functions, 4.0), size * (fixed + horizon) ** 2 / work))
    table("pi0.5's blocks against the dense mask of openpi and LeRobot", rows)


def shared_prefixes(horizon: int = 50, heads: int = 8, dim: int = 32) -> None:
    used = [400, 280, 150, 400]
    cu, longest = cumulative(used), max(used)
    prefix = [torch.randn(sum(used), n, dim) for n in (heads, 1, 1)]
    rows = []
    for draws in (4, 1):
        suffix = [torch.randn(len(used) * draws * horizon, n, dim) for n in (heads, 1, 1)]

        def passes(*p: Tensor, shared: bool, draws: int = draws) -> Tensor:
            layout = PrefixSuffixLayout(used, [horizon], draws if shared else 1)
            parts = [p[3:]] if shared else [
                [t.view(len(used), draws, horizon, *t.shape[1:])[:, i].flatten(0, 1) for t in p[3:]]
                for i in range(draws)
            ]  # fmt: skip
            outs = []
            for q, k, v in parts:
                outs.append(varlen_attention(p[0], p[1], p[2], cu, cu, longest, longest))
                outs.append(layout.attend(q, (p[1], p[2]), (k, v)))
            return torch.cat(outs)

        functions = {
            "ours": with_backward(lambda *p, f=passes: f(*p, shared=True), *prefix, *suffix),
            "separate": with_backward(lambda *p, f=passes: f(*p, shared=False), *prefix, *suffix),
        }
        own = sum(n * n for n in used)
        rest = sum(horizon * (n + horizon) for n in used)
        bound = draws * (own + rest) / (own + draws * rest)
        name = f"{draws} draws an observation" if draws > 1 else "1 draw (no gain)"
        rows.append(row(name, cpu_milliseconds(functions, 3.0), bound))
    table("one prefix shared by R suffixes against R passes", rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    packed_against_padded()
    pi05_blocks()
    shared_prefixes()
