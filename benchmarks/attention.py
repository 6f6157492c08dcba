"""Attention: packed against padded, pi0.5's blocks against a dense mask, shared prefixes against separate passes.

    OMP_NUM_THREADS=1 python benchmarks/attention.py

Attention alone, forward and backward. Prints ours, the baseline, the bound (share of the work that is needed), the
ratio and peak memory; rows without padding or with one draw are the cases without gain.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from timing import Bench, table
from torch import Tensor
from torch.nn import functional

from lightning_embodied.attention import PrefixSuffixLayout, choose_backend, varlen_attention


def with_backward(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Tensor]:
    inputs = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    grad = torch.randn_like(function(*inputs).detach())

    def step() -> Tensor:
        out = function(*inputs)
        torch.autograd.grad(out, inputs, grad)
        return out.detach()

    return step


def row(bench: Bench, name: str, functions: dict[str, Callable[[], Tensor]], bound: float) -> dict[str, object]:
    """Our function comes first, the baseline of the ratios last."""
    times = bench.milliseconds(functions)
    ours, *baselines = times
    memory = [bench.peak_mebibytes(functions[name]) for name in (ours, baselines[-1])]
    return {
        "case": name,
        "ours ms": f"{times[ours]:.2f}",
        **{f"{other} ms": f"{times[other]:.2f}" for other in baselines},
        "bound": f"{bound:.2f}",
        "ratio": f"{times[baselines[-1]] / times[ours]:.2f}",
        "ours MiB": f"{memory[0]:.0f}",
        f"{baselines[-1]} MiB": f"{memory[1]:.0f}",
    }


def cases() -> dict[str, tuple[list[int], int, int, int]]:
    """Name to lengths, heads, key heads and width of a head."""
    draw = random.Random(0)  # noqa: S311
    return {
        "64 x 42, 4 heads x 32 (no gain)": ([42] * 64, 4, 4, 32),
        "64 of 3 lengths 30..62, sorted": (sorted(draw.choice((30, 46, 62)) for _ in range(64)), 4, 4, 32),
        "64 of 3 lengths 30..62, mixed": ([draw.choice((30, 46, 62)) for _ in range(64)], 4, 4, 32),
        "64 of 10..60, sorted": (sorted(draw.randint(10, 60) for _ in range(64)), 4, 4, 32),
        "16 of 100..700, 8 heads x 64": ([draw.randint(100, 700) for _ in range(16)], 8, 8, 64),
        "16 of 100..700, 8 heads, 1 kv head": ([draw.randint(100, 700) for _ in range(16)], 8, 1, 64),
    }


def packed_against_padded(
    bench: Bench, shapes: dict[str, tuple[list[int], int, int, int]], backend: str | None = None
) -> None:
    rows = []
    for name, (lengths, heads, kv_heads, dim) in shapes.items():
        longest, total, cu = max(lengths), sum(lengths), bench.cumulative(lengths)
        packed = [bench.randn(total, n, dim) for n in (heads, kv_heads, kv_heads)]
        here = torch.arange(longest, device=bench.device) < cu.diff()[:, None]
        padded = [torch.zeros(len(lengths), longest, *tensor.shape[1:]).to(tensor) for tensor in packed]
        for full, part in zip(padded, packed, strict=True):
            full[here] = part

        def ours(q: Tensor, k: Tensor, v: Tensor, cu: Tensor = cu, longest: int = longest) -> Tensor:
            return varlen_attention(q, k, v, cu, cu, longest, longest, backend=backend)

        def baseline(q: Tensor, k: Tensor, v: Tensor, here: Tensor = here) -> Tensor:
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
            group = q.shape[1] // k.shape[1]
            if group > 1 and bench.device == "cuda":  # with a mask, only kernels without groups are fast there
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            mask = here[:, None, None]
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
            return out.transpose(1, 2)

        functions = {"ours": with_backward(ours, *packed), "padded": with_backward(baseline, *padded)}
        bench.assert_same(functions["ours"](), functions["padded"]()[here])
        bound = longest**2 * len(lengths) / sum(length**2 for length in lengths)
        rows.append(row(bench, name, functions, bound))
    name = choose_backend(packed[0], backend).name
    table(f"varlen_attention ({name}, {bench.dtype} on {bench.device}) against SDPA on a padded batch", rows)


def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Dense additive float mask as openpi and LeRobot build it; `[B, T, H, D]`."""
    group = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(group, 2) for tensor in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[3] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", (scores + mask).softmax(-1).to(value.dtype), value)


def dense_mask(real: Tensor, horizon: int) -> Tensor:
    """Float `[B, 1, T, T]` of prefixes, whose tokens exist where `real [B, P]` says, and `horizon` actions behind."""
    valid = torch.cat([real, real.new_ones(real.shape[0], horizon)], 1)
    block = torch.arange(valid.shape[1], device=real.device) >= real.shape[1]
    seen = (block[None, :] <= block[:, None])[None] & valid[:, None]
    return torch.where(seen, 0.0, -2.38e38)[:, None]


def padded(prefix: Tensor, suffix: Tensor, real: Tensor, horizon: int) -> Tensor:
    """Packed rows of prefixes and suffixes to `[B, T, heads, D]`, zeros where there is no token."""
    size, fixed = real.shape
    full = prefix.new_zeros(size, fixed + horizon, *prefix.shape[1:])
    full[:, :fixed][real] = prefix
    full[:, fixed:] = suffix.view(size, horizon, *suffix.shape[1:])
    return full


def pi05_blocks(
    bench: Bench, *, image: int = 128, text: int = 48, horizon: int = 50, heads: int = 8, dim: int = 32
) -> None:
    """Three views of `image` tokens and `text` tokens of instruction are the fixed length of openpi and LeRobot."""
    fixed = 3 * image + text
    rows = []
    for name, cameras in {"cameras missing": [1, 2, 3, 1], "nothing missing (no gain)": [3, 3, 3, 3]}.items():
        used = [n * image + (text // 3 if "missing" in name and len(set(cameras)) > 1 else text) for n in cameras]
        layout, cu = PrefixSuffixLayout(used, [horizon], device=bench.device), bench.cumulative(used)
        size, longest = len(used), max(used)
        shapes = [(sum(used), n, dim) for n in (heads, 1, 1)] + [(size * horizon, n, dim) for n in (heads, 1, 1)]
        packed = [bench.randn(*shape) for shape in shapes]
        real = torch.arange(fixed, device=bench.device) < cu.diff()[:, None]
        mask = dense_mask(real, horizon).to(bench.dtype)
        dense = [padded(*rows, real, horizon) for rows in zip(packed[:3], packed[3:], strict=True)]

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
        bench.assert_same(functions["ours"]()[sum(used) :], suffix)
        work = sum(n * n + horizon * (n + horizon) for n in used)
        rows.append(row(bench, name, functions, size * (fixed + horizon) ** 2 / work))
    table(f"pi0.5's blocks ({bench.dtype} on {bench.device}) against the dense mask of openpi and LeRobot", rows)


def shared_prefixes(
    bench: Bench, *, used: tuple[int, ...] = (400, 280, 150, 400), horizon: int = 50, heads: int = 8, dim: int = 32
) -> None:
    cu, longest = bench.cumulative(list(used)), max(used)
    prefix = [bench.randn(sum(used), n, dim) for n in (heads, 1, 1)]
    rows = []
    for draws in (4, 1):
        suffix = [bench.randn(len(used) * draws * horizon, n, dim) for n in (heads, 1, 1)]

        def passes(*p: Tensor, shared: bool, draws: int = draws) -> Tensor:
            layout = PrefixSuffixLayout(used, [horizon], draws if shared else 1, bench.device)
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
        rows.append(row(bench, name, functions, bound))
    table(f"one prefix shared by R suffixes against R passes ({bench.dtype} on {bench.device})", rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    packed_against_padded(Bench(), cases())
    pi05_blocks(Bench())
    shared_prefixes(Bench())
