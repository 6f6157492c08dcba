"""Attention, packing and FP8 with real kernels: correct against fp64, then timed. One run of less than six minutes.

    python benchmarks/gpu_check.py

Every attention backend that the machine has is compared with dense attention in fp64, forward and backward, on the
shapes that break kernels; then attention, pi0.5's blocks, shared prefixes and a packed training step are timed against
what they replace, then pi0.5's training step and denoising, with peak memory, then FP8's training steps and a quantised
policy's latency. Without a CUDA device it says so and
succeeds; it fails if a comparison does.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from attention import packed_against_padded, pi05_blocks, shared_prefixes
from fp8_steps import LAYERS, SMALL_LAYERS, Layer, quantized_latency, training_steps
from packing import train_steps
from pi05_step import SMALL_WIDTHS, Scale, denoising, shared_prefix, training
from robot_mixture import mixture
from timing import Bench, table
from torch import Tensor

from lightning_embodied.attention import AttentionBackend, attention_backends, varlen_attention
from lightning_embodied.errors import ConfigError

LIMITS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest error relative to the largest value, by dtype."""


@dataclass(frozen=True)
class Size:
    """How large the check is.

    Attributes:
        attention: Samples of the mixture in the timing of attention, and what their lengths are divided by.
        step: Arguments of the training step.
        block: Arguments of pi0.5's blocks.
        draws: Arguments of the shared prefixes.
        policy: Of pi0.5.
        layers: Linear layers to train in FP8.
        seconds: Of each timing.
        deadline: Seconds after which no further timing is begun.
    """

    attention: tuple[int, int]
    step: dict[str, int]
    block: dict[str, int]
    draws: dict[str, tuple[int, ...] | int]
    policy: Scale
    layers: dict[str, Layer]
    seconds: float
    deadline: float


FULL = Size(
    attention=(48, 1),
    step={"width": 1024, "heads": 16, "depth": 4, "number": 64, "longest": 1024, "shrink": 1},
    block={"image": 256, "text": 200, "heads": 8, "dim": 256},
    draws={"used": (968, 712, 300, 968), "heads": 8, "dim": 256},
    policy=Scale(  # the published widths, four layers of each tower: 0.6 billion parameters
        {
            "vision": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 4,
                       "num_attention_heads": 16, "image_size": 224, "patch_size": 14},
            "language": {"width": 2048, "depth": 4, "heads": 8, "head_dim": 256, "mlp_width": 16_384},
            "expert": {"width": 1024, "depth": 4, "heads": 8, "head_dim": 256, "mlp_width": 4096},
            "max_action_dim": 32,
        },
        samples=8,
    ),
    layers=LAYERS,
    seconds=2.0,
    deadline=240.0,
)  # fmt: skip
SMALL = Size(
    attention=(3, 50),
    step={"width": 16, "heads": 2, "depth": 1, "number": 64, "longest": 24, "shrink": 100},
    block={"image": 4, "text": 6, "horizon": 3, "heads": 2, "dim": 8},
    draws={"used": (5, 3), "horizon": 3, "heads": 2, "dim": 8},
    policy=Scale(
        {
            "vision": {**SMALL_WIDTHS.sizes["vision"], "hidden_size": 16, "intermediate_size": 16, "image_size": 28},
            "max_action_dim": 8,
        },
        samples=2, prompt=6, used=3, horizon=3,
    ),
    layers=SMALL_LAYERS,
    seconds=0.0,
    deadline=600.0,
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """One comparison: lengths of queries and keys, heads, key heads, width of a head and mask."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 4
    dim: int = 64
    causal: bool = False


def shapes(scale: int) -> dict[str, Shape]:
    """What variable-length kernels get wrong first; lengths of ordinary cases are multiplied by `scale`."""
    plain = tuple(scale * n for n in (7, 1, 30, 30, 12))
    longer = tuple(n + 3 * scale for n in plain)
    return {
        "self": Shape(plain, plain),
        "causal": Shape(plain, plain, causal=True),
        "cross": Shape(plain, longer),
        "causal, more keys": Shape(plain, longer, causal=True),
        "causal, more queries": Shape(longer, plain, causal=True),
        "multi-query, 256 wide": Shape(plain, longer, heads=8, kv_heads=1, dim=256),
        "grouped-query, 128 wide": Shape(plain, plain, heads=8, kv_heads=2, dim=128, causal=True),
        "8 wide": Shape(plain, plain, dim=8),
        "one token each": Shape((1,) * 5, (1,) * 5),
        "empty segments": Shape((0, 5, 0, 9, 3, 0), (4, 0, 0, 9, 6, 0)),
        "one segment": Shape((33 * scale,), (33 * scale,)),
        "many segments": Shape(tuple(n % 4 for n in range(200 * scale)), tuple(n % 3 for n in range(200 * scale))),
        "no queries": Shape((0, 0), (3, 4)),
        "no keys": Shape((3, 4), (0, 0)),
    }  # fmt: skip


def dense(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """One masked softmax over all tokens, written out; nothing of the package in it."""

    def segments(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        counts = torch.tensor(lengths, device=query.device)
        number = torch.repeat_interleave(torch.arange(len(lengths), device=query.device), counts)
        return number, torch.arange(len(number), device=query.device) - counts.cumsum(0)[number]

    (sample_q, from_end_q), (sample_k, from_end_k) = segments(shape.queries), segments(shape.keys)
    seen = sample_q[:, None] == sample_k[None]
    if shape.causal:
        seen &= from_end_k[None] <= from_end_q[:, None]
    group = shape.heads // shape.kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * shape.dim**-0.5
    weights = torch.where(
        seen, (scores - scores.detach().amax(-1, keepdim=True) if seen.numel() else scores).exp(), 0.0
    )
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    return torch.einsum("hqk,khd->qhd", weights, value)  # fmt: skip


def compare(bench: Bench, backend: AttentionBackend, shape: Shape) -> tuple[float, float, bool]:
    """Largest relative error of output and gradients, and whether other samples stay bitwise the same."""
    torch.manual_seed(0)
    sizes = [(sum(shape.queries), shape.heads), (sum(shape.keys), shape.kv_heads), (sum(shape.keys), shape.kv_heads)]
    inputs = [bench.randn(rows, heads, shape.dim).requires_grad_() for rows, heads in sizes]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    cu = bench.cumulative(list(shape.queries)), bench.cumulative(list(shape.keys))
    longest = max(shape.queries), max(shape.keys)

    def attend(*tensors: Tensor) -> Tensor:
        return varlen_attention(*tensors, *cu, *longest, causal=shape.causal, backend=backend.name)

    out, expected = attend(*inputs), dense(*exact, shape)
    grad = torch.randn_like(expected)
    grads = torch.autograd.grad(out, inputs, grad.to(out.dtype)), torch.autograd.grad(expected, exact, grad)
    changed = [tensor.detach().clone() for tensor in inputs]
    for tensor, rows in zip(changed, (shape.queries[0], shape.keys[0], shape.keys[0]), strict=True):
        tensor[:rows] = 3 * tensor[:rows] + 7
    alone = torch.equal(attend(*changed)[shape.queries[0] :], out[shape.queries[0] :])
    return error(out, expected), max(error(*pair) for pair in zip(*grads, strict=True)), alone


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value, or 1 if that is smaller."""
    if not expected.numel():
        return 0.0
    return float(((found.double() - expected).abs().max() / expected.abs().max().clamp_min(1.0)).detach())


def check_backends(device: str, dtypes: tuple[torch.dtype, ...], scale: int, stop: float) -> list[str]:
    """Compares every backend that takes tensors of this device with dense fp64; prints, and returns what failed.

    No comparison is begun after `stop`: some kernels are compiled for every new shape.
    """
    rows: list[dict[str, object]] = []
    failed = []
    for backend in attention_backends():
        for dtype in dtypes:
            bench, worst = Bench(device, dtype), [0.0, 0.0]
            ran = 0
            for name, shape in shapes(scale).items():
                if not backend.takes(torch.empty(0, 1, shape.dim, device=device, dtype=dtype)):
                    continue
                if time.monotonic() > stop:
                    failed.append(f"{backend.name}, {dtype}, {name}: not begun, the time is up")
                    continue
                ran += 1
                try:
                    *errors, alone = compare(bench, backend, shape)
                except Exception as problem:  # a kernel that cannot launch must not end the check of the others
                    failed.append(f"{backend.name}, {dtype}, {name}: {type(problem).__name__}: {str(problem)[:200]}")
                    continue
                worst = [max(pair) for pair in zip(worst, errors, strict=True)]
                if not (max(errors) <= LIMITS[dtype] and alone):  # NaN fails, too
                    failed.append(f"{backend.name}, {dtype}, {name}: errors {errors}, others unchanged: {alone}")
            rows.append(
                {
                    "backend": backend.name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "shapes": ran or backend.reason,
                    "output": f"{worst[0]:.1e}" if ran else "-",
                    "gradients": f"{worst[1]:.1e}" if ran else "-",
                    "limit": f"{LIMITS[dtype]:.0e}",
                }
            )
    table("largest error against dense attention in fp64", rows)
    return failed


def time_all(bench: Bench, size: Size, stop: float) -> list[str]:
    """Prints the tables; returns what failed. No table is begun after `stop`."""
    samples, shrink = size.attention
    lengths = sorted(max(1, length // shrink) for length in mixture(samples))
    attention = {
        "the mixture, 16 heads x 64": (lengths, 16, 16, 64),
        "8 heads x 256, 1 kv head": (lengths, 8, 1, 256),
        "equal lengths (no gain)": ([max(lengths) // 2] * (samples // 2), 16, 16, 64),
    }
    parts: dict[str, tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]] = {}
    for backend in attention_backends():
        queries = {name: torch.empty(0, 1, case[3]).to(bench.device, bench.dtype) for name, case in attention.items()}
        taken = {name: attention[name] for name, query in queries.items() if backend.takes(query)}
        if taken and backend.name != "reference":
            parts[f"attention by {backend.name}"] = packed_against_padded, (taken, backend.name), {}
    parts |= {
        "pi0.5's blocks": (pi05_blocks, (), size.block),
        "shared prefixes": (shared_prefixes, (), size.draws),
        "training step": (train_steps, (), size.step),
        "pi0.5's training step": (training, (size.policy,), {}),
        "pi0.5's draws": (shared_prefix, (size.policy,), {}),
        "pi0.5's denoising": (denoising, (size.policy,), {}),
        "FP8's training steps": (training_steps, (size.layers,), {}),
        "the quantised policy's latency": (quantized_latency, (size.policy,), {}),
    }
    failed = []
    for name, (part, arguments, options) in parts.items():
        if time.monotonic() > stop:
            failed.append(f"{name}: not begun, the time is up")
            continue
        try:
            part(bench, *arguments, **options)
        except (AssertionError, RuntimeError, ConfigError) as problem:
            failed.append(f"{name}: {type(problem).__name__}: {str(problem)[:300]}")
    return failed


def run(device: str, dtype: torch.dtype, size: Size, scale: int) -> list[str]:
    """The whole check.

    Args:
        device: `cuda`, or `cpu` to try the check itself.
        dtype: Of the timings.
        size: How large they are.
        scale: How long the compared segments are.

    Returns:
        What failed, one line each.
    """
    start = time.monotonic()
    dtypes = (torch.float32, dtype) if dtype != torch.float32 else (dtype,)
    failed = check_backends(device, dtypes, scale, start + size.deadline / 2)
    failed += time_all(Bench(device, dtype, size.seconds), size, start + size.deadline)
    print(f"\n{time.monotonic() - start:.0f} s, {len(failed)} failures")
    for line in failed:
        print(f"  FAILED {line}")
    return failed


def main() -> int:
    """Runs it where there is a GPU."""
    if not torch.cuda.is_available():
        print("skipped: this check needs a CUDA device")
        return 0
    faulthandler.dump_traceback_later(350, exit=True)  # a kernel that hangs ends here, and says where
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    print(f"{torch.cuda.get_device_name()}, compute capability {capability}, torch {torch.__version__}")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # with a mask its gradients may be NaN on Hopper (torch 2.11 to 2.13)
    return int(bool(run("cuda", torch.bfloat16, FULL, scale=10)))


if __name__ == "__main__":
    sys.exit(main())
