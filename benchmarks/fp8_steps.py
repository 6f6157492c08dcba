"""FP8 against bfloat16: training steps of the linear layers of GR00T N1.5 and pi0.5, and a quantised policy's latency.

    OMP_NUM_THREADS=1 python benchmarks/fp8_steps.py

Forward and backward of a layer's MLP and projections at the published widths, in every recipe and backend that the
device runs; the others with the reason. The bound is two: FP8 cores multiply twice as fast as bfloat16's. The no-gain
case is a layer too small to pay for its casts. A CPU has no FP8 cores: what it prints is the cost of emulation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pi05_step import SMALL_WIDTHS, Scale, bench_noise, make_batches, make_policy
from timing import Bench, table
from torch import Tensor, nn

from lightning_embodied.errors import EmbodiedError
from lightning_embodied.precision import FP8Precision
from lightning_embodied.precision.recipes import BACKEND_RECIPES
from lightning_embodied.quantization import Recipe, calibrate, quantize_policy

BOUND = 2.0


@dataclass(frozen=True)
class Layer:
    """The linear layers of a transformer layer, one after the other.

    Attributes:
        width: Of the tokens.
        hidden: Of the MLP.
        rows: Tokens of a step.
    """

    width: int
    hidden: int
    rows: int

    def build(self, bench: Bench) -> nn.Sequential:
        """Query, key and value in one, the way out, up and down; weights in float32 as in training."""
        torch.manual_seed(0)
        sides = [(self.width, 3 * self.width), (3 * self.width, self.width), (self.width, self.hidden)]
        return nn.Sequential(*(nn.Linear(*side, bias=False) for side in (*sides, sides[2][::-1]))).to(bench.device)


LAYERS = {
    "pi0.5's language model": Layer(2048, 16_384, 7744),
    "pi0.5's action expert": Layer(1024, 4096, 1600),
    "GR00T N1.5's language model": Layer(2048, 6144, 7744),
    "GR00T N1.5's DiT": Layer(1536, 6144, 1600),
    "256 wide (no gain)": Layer(256, 1024, 256),
}
SMALL_LAYERS = {"32 wide": Layer(32, 64, 24)}


def training_steps(bench: Bench, layers: dict[str, Layer]) -> None:
    """Forward and backward in bfloat16 and in each FP8 recipe, same weights; outputs are compared as well."""
    rows: list[dict[str, object]] = []
    for name, layer in layers.items():
        module = layer.build(bench)
        for backend in ("torchao", "transformer_engine"):
            for recipe in BACKEND_RECIPES[backend]:
                found = compare(bench, module, layer.rows, recipe, backend)
                rows.append({"layers": name, "recipe": recipe, "backend": backend, **found})
    table(f"FP8 training steps ({bench.dtype} on {bench.device})", rows)


def quantized_latency(bench: Bench, scale: Scale = SMALL_WIDTHS) -> None:
    """Ten denoising steps for one observation: as trained, and in each format, with and without FP8 activations."""
    one = Scale(scale.sizes, 1, scale.prompt, scale.used, scale.horizon)
    policy = make_policy(bench, one).eval()
    batch, _ = make_batches(policy, one, 2, one.used)
    noise = bench_noise(bench, one, 1)[:, 0]
    policies = {"as trained": policy}
    for weights in ("fp8_block", "fp8_row", "fp8_tensor", "int8_row"):
        quantized = policies[f"{weights}, weights only"] = copy.deepcopy(policy)
        quantization = quantize_policy(quantized, Recipe(weights))
        if weights in ("fp8_row", "fp8_tensor"):
            calibrated = policies[f"{weights}, activations too"] = copy.deepcopy(quantized)
            calibrate(calibrated, quantization, lambda acting=calibrated: acting.sample_actions(batch, noise=noise))

    def sampler(acting: nn.Module) -> Callable[[], Tensor]:
        acting.to(bench.dtype)

        @torch.no_grad()
        def sample() -> Tensor:
            return acting.sample_actions(batch, noise=noise)

        return sample

    functions = {name: sampler(acting) for name, acting in policies.items()}
    exact = functions["as trained"]().float()
    times = bench.milliseconds(functions)
    rows: list[dict[str, object]] = [
        {
            "pi0.5": name,
            "ms": f"{times[name]:.2f}",
            "ratio": f"{times['as trained'] / times[name]:.2f}",
            "change of actions": f"{float((function().float() - exact).norm() / exact.norm()):.4f}",
        }
        for name, function in functions.items()
    ]
    table(f"quantised policy, one observation, 10 denoising steps ({bench.dtype} on {bench.device})", rows)


def compare(bench: Bench, module: nn.Sequential, tokens: int, recipe: str, backend: str) -> dict[str, object]:
    """Milliseconds and outputs of one recipe beside bfloat16, or why there are none."""
    converted, plugin = copy.deepcopy(module), None
    half = bench.dtype != torch.float32
    try:
        plugin = FP8Precision(recipe, backend, high_precision="bf16-mixed" if half else "32-true")
        plugin.convert_module(converted)
        ours = step(bench, converted, tokens, plugin.forward_context)
        found = ours()
    except (EmbodiedError, RuntimeError, ValueError, NotImplementedError) as problem:
        reason = " ".join(str(getattr(problem, "problem", problem)).split())[:60]
        return {"plain ms": "-", "FP8 ms": "-", "ratio": "-", "bound": BOUND, "error": reason}
    theirs = step(bench, module, tokens, partial(torch.autocast, bench.device, torch.bfloat16, enabled=half))
    expected = theirs()
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    assert error < 0.15, f"{recipe}, {backend}: output off by {error:.2f}"
    times = bench.milliseconds({"plain": theirs, "fp8": ours})
    return {
        "plain ms": f"{times['plain']:.3f}",
        "FP8 ms": f"{times['fp8']:.3f}",
        "ratio": f"{times['plain'] / times['fp8']:.2f}",
        "bound": BOUND,
        "error": f"{error:.4f}",
    }


def step(bench: Bench, module: nn.Sequential, tokens: int, context: Callable[[], Any]) -> Callable[[], Tensor]:
    """A training step without optimizer on random tokens; returns the output."""
    generator = torch.Generator().manual_seed(1)
    width = module[0].in_features
    inputs = torch.randn(tokens, width, generator=generator).to(bench.device).requires_grad_()
    grad = torch.randn(tokens, width, generator=generator).to(bench.device)

    def run() -> Tensor:
        module.zero_grad()
        inputs.grad = None
        with context():
            output = module(inputs)
        output.backward(grad.to(output.dtype))
        return output.detach()

    return run


if __name__ == "__main__":
    size = SMALL_LAYERS | {"256 wide (no gain)": LAYERS["256 wide (no gain)"]}
    training_steps(Bench(seconds=0.5), size)
    quantized_latency(Bench(seconds=2.0))
