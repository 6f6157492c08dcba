"""pi0.5: a training step and denoising against what openpi and LeRobot compute, over the same weights.

    OMP_NUM_THREADS=1 python benchmarks/pi05_step.py

Token counts are the published ones (256 a picture, 200 of prompt, 50 actions); widths are small, with the towers'
shares of the work close to those of the 3.4 billion parameters. Losses, gradients and actions are compared before
anything is timed. Bounds count multiplications, those of the masked dense attention included; a ratio passes them where
eager attention is slow for what it multiplies. The last row of each table is the case without gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from pi05_dense import DensePi05, PaddedBatch
from timing import Bench, table
from torch import Tensor
from torch.nn import functional

from lightning_embodied.features import Feature, FeatureStats
from lightning_embodied.models import Pi05Policy, PolicySpec, euler_sample, interpolate, velocity_target
from lightning_embodied.models.pi import GemmaSizes, PiSizes
from lightning_embodied.packing import EncodedSample, PackedBatch, SampleEncoder, pack_samples

VIEWS, DIM = 3, 7
LIBERO = "LIBERO: 2 of 3 views, 50 of 200 words"


@dataclass(frozen=True)
class Scale:
    """How large the policy and its batches are.

    Attributes:
        sizes: Changes to the tiny preset.
        samples: Samples of a batch.
        prompt: Tokens that openpi and LeRobot pad prompts to.
        used: Tokens of a prompt in LIBERO.
        horizon: Actions of a chunk.
    """

    sizes: dict[str, Any]
    samples: int = 3
    prompt: int = 200
    used: int = 50
    horizon: int = 50


SMALL_WIDTHS = Scale(
    {
        "vision": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
                   "image_size": 224, "patch_size": 14},
        "language": {"width": 192, "depth": 3, "heads": 4, "head_dim": 32, "mlp_width": 1536},
        "expert": {"width": 96, "depth": 3, "heads": 4, "head_dim": 32, "mlp_width": 384},
        "max_action_dim": 32,
    }
)  # fmt: skip


def work(sizes: PiSizes, views: int, words: int, horizon: int, dense: bool = False) -> tuple[int, int]:
    """Multiplications of a sample's forward pass: what prefix and suffix cost."""
    vision, language, expert = sizes.vision, sizes.language, sizes.expert
    patches, width, rank = vision.tokens_per_image, vision.hidden_size, language.heads * language.head_dim
    tokens = views * patches + words
    layer = 4 * width**2 + 2 * width * vision.intermediate_size + 2 * patches * width
    tower = views * patches * (vision.num_hidden_layers * layer + width * (3 * vision.patch_size**2 + language.width))

    def gemma(gemma: GemmaSizes, seen: int) -> int:
        keys_values = 2 * gemma.width * gemma.kv_heads * gemma.head_dim
        return 2 * gemma.width * rank + keys_values + 3 * gemma.width * gemma.mlp_width + 2 * rank * seen

    last = 2 * language.width * language.kv_heads * language.head_dim  # ours: its keys and values alone
    seen = tokens + horizon if dense else tokens
    layers = language.depth * gemma(language, seen) if dense else (language.depth - 1) * gemma(language, seen) + last
    return tower + tokens * layers, horizon * expert.depth * gemma(expert, tokens + horizon)


def make_policy(bench: Bench, scale: Scale) -> Pi05Policy:
    """A policy with random weights, modulations included."""
    torch.manual_seed(0)
    zero, one = np.zeros(DIM), np.ones(DIM)
    stats = FeatureStats(min=-one, max=one, mean=zero, std=one, q01=-one, q10=-one, q50=zero, q90=one, q99=one, count=9)
    policy = Pi05Policy(preset="tiny", sizes=scale.sizes)
    vision = policy.network_sizes.vision
    encoder = SampleEncoder(prompt="pi05", image_size=(vision.image_size,) * 2, patch_size=vision.patch_size)
    encoder.use_statistics({"observation.state": stats})
    policy.spec = PolicySpec(
        features={"observation.state": Feature("float32", (DIM,)), "action": Feature("float32", (DIM,))},
        stats={"observation.state": stats, "action": stats},
        encoder=encoder.to_config(),
        action_horizon=scale.horizon,
        fps=10,
        tasks=[],
        robot_type=None,
        dataset_fingerprint="",
    )
    with torch.device(bench.device), torch.no_grad():
        policy.configure_model()
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return policy.to(bench.device)


def make_batches(policy: Pi05Policy, scale: Scale, views: int, words: int) -> tuple[PackedBatch, PaddedBatch]:
    """The same samples packed and padded: `views` pictures a sample and prompts of about `words` tokens."""
    generator = torch.Generator().manual_seed(1)
    vision, count = policy.network_sizes.vision, scale.samples
    lengths = torch.tensor([max(1, min(scale.prompt, words + (-4, 0, 5)[i % 3])) for i in range(count)])
    shape = (count, VIEWS, 3, vision.image_size, vision.image_size)
    pictures = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    pictures[:, views:] = 0
    ids = torch.randint(1, policy.encoder.words, (count, scale.prompt), generator=generator)
    valid = torch.arange(scale.prompt) < lengths[:, None]
    placeholders = torch.full((views * vision.tokens_per_image,), policy.encoder.image_token_id)
    samples = [
        EncodedSample(
            input_ids=torch.cat((placeholders, ids[i][valid[i]])),
            pixel_values=pictures[i, :views],
            state=torch.zeros(DIM),
            actions=torch.randn(scale.horizon, DIM, generator=generator),
            action_is_pad=torch.zeros(scale.horizon, dtype=torch.bool),
        )
        for i in range(count)
    ]
    padded = (pictures, (torch.arange(VIEWS) < views).expand(count, -1), ids, valid)
    device = policy.device
    return pack_samples(samples).to(device), PaddedBatch(*(tensor.to(device) for tensor in padded))


def step(bench: Bench, policy: Pi05Policy, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A training step without optimizer; half precision is that of autocast, weights stay float32."""

    def run() -> Tensor:
        policy.zero_grad()
        with torch.autocast(bench.device, bench.dtype, enabled=bench.dtype != torch.float32):
            total = loss()
        total.backward()
        return total.detach()

    return run


def assert_same_step(bench: Bench, policy: Pi05Policy, steps: dict[str, Callable[[], Tensor]]) -> None:
    """Two steps have the same loss and gradients."""
    found = []
    for run in steps.values():
        loss, gradients = run(), [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
        found.append((loss, torch.cat(gradients)))
    for ours, theirs in zip(*found, strict=True):
        bench.assert_same(ours, theirs)


def row(bench: Bench, name: str, functions: dict[str, Callable[[], object]], bound: float) -> dict[str, object]:
    """Times and peak memory; ours comes first."""
    times = bench.milliseconds(functions)
    memory = {other: bench.peak_mebibytes(function) for other, function in functions.items()}
    ours, *others = functions
    return {
        "case": name,
        **{f"{other} ms": f"{time:.0f}" for other, time in times.items()},
        "bound": f"{bound:.2f}",
        **{f"ratio to {other}": f"{times[other] / times[ours]:.2f}" for other in others},
        **{f"{other} MiB": f"{size:.0f}" for other, size in memory.items()},
    }


def training(bench: Bench, scale: Scale = SMALL_WIDTHS) -> None:
    """A step against the dense mask."""
    policy = make_policy(bench, scale)
    dense, rows = DensePi05(policy), []
    noise = bench_noise(bench, scale, 1)
    time = torch.rand(scale.samples, 1, device=bench.device)
    full = sum(work(policy.network_sizes, VIEWS, scale.prompt, scale.horizon, dense=True))
    for name, views, words in ((LIBERO, 2, scale.used), ("nothing missing", VIEWS, scale.prompt + 5)):
        packed, padded = make_batches(policy, scale, views, words)
        actions = functional.pad(packed.actions, (0, noise.shape[-1] - DIM))
        noisy, target = interpolate(actions, noise[:, 0], time[:, 0]), velocity_target(actions, noise[:, 0])

        def theirs(padded: PaddedBatch = padded, noisy: Tensor = noisy, target: Tensor = target) -> Tensor:
            return (dense.velocity(padded, noisy, time[:, 0]) - target).square()[..., :DIM].sum()

        def ours(packed: PackedBatch = packed) -> Tensor:
            return policy(packed, noise, time).total

        steps = {"ours": step(bench, policy, ours), "dense": step(bench, policy, theirs)}
        assert_same_step(bench, policy, steps)
        bound = full / sum(work(policy.network_sizes, views, min(words, scale.prompt), scale.horizon))
        rows.append(row(bench, name, steps, bound))
    table(f"pi0.5: training step of {scale.samples} samples ({bench.dtype} on {bench.device}), same gradients", rows)


def shared_prefix(bench: Bench, scale: Scale = SMALL_WIDTHS) -> None:
    """Noise draws that share an observation against one pass for each."""
    policy, rows = make_policy(bench, scale), []
    packed, _ = make_batches(policy, scale, 2, scale.used)
    prefix, suffix = work(policy.network_sizes, 2, scale.used, scale.horizon)
    for draws in (4, 1):
        noise = bench_noise(bench, scale, draws)
        time = torch.rand(scale.samples, draws, device=bench.device)

        def separate(draws: int = draws, noise: Tensor = noise, time: Tensor = time) -> Tensor:
            return torch.stack([policy(packed, noise[:, [i]], time[:, [i]]).total for i in range(draws)]).sum()

        def shared(noise: Tensor = noise, time: Tensor = time) -> Tensor:
            return policy(packed, noise, time).total

        steps = {"ours": step(bench, policy, shared), "separate": step(bench, policy, separate)}
        assert_same_step(bench, policy, steps)
        name = f"{draws} draws an observation" if draws > 1 else "1 draw (no gain)"
        rows.append(row(bench, name, steps, draws * (prefix + suffix) / (prefix + draws * suffix)))
    table(f"pi0.5: draws that share a prefix ({bench.dtype} on {bench.device}), same gradients", rows)


@torch.no_grad()
def denoising(bench: Bench, scale: Scale = SMALL_WIDTHS) -> None:
    """Sampling with a cached prefix against its recomputation, and against the padded cache of LeRobot."""
    policy = make_policy(bench, scale)
    dense, rows = DensePi05(policy), []
    packed, padded = make_batches(policy, scale, 2, scale.used)
    noise = bench_noise(bench, scale, 1)[:, 0]
    prefix, suffix = work(policy.network_sizes, 2, scale.used, scale.horizon)
    for steps in (10, 1):
        policy.denoising_steps = steps

        def recomputed(chunks: Tensor, times: Tensor) -> Tensor:
            return policy.observe(packed)(chunks[:, None], times[:, None])[:, 0]

        def lerobot(steps: int = steps) -> Tensor:
            return euler_sample(dense.denoiser(padded, scale.horizon), noise, steps)[..., :DIM]

        samplers = {
            "ours": lambda: policy.sample_actions(packed, noise=noise),
            "recomputed": lambda steps=steps, f=recomputed: euler_sample(f, noise, steps)[..., :DIM],
            "dense with cache": lerobot,
        }
        functions = {name: under_autocast(bench, sampler) for name, sampler in samplers.items()}
        for other in ("recomputed", "dense with cache"):
            bench.assert_same(functions["ours"](), functions[other]())
        bound = steps * (prefix + suffix) / (prefix + steps * suffix)
        rows.append(row(bench, f"{steps} steps" if steps > 1 else "1 step (no gain)", functions, bound))
    table(f"pi0.5: denoising {scale.samples} samples ({bench.dtype} on {bench.device}), same actions", rows)


def bench_noise(bench: Bench, scale: Scale, draws: int) -> Tensor:
    """float32 `[B, R, H, max_action_dim]`."""
    return replace(bench, dtype=torch.float32).randn(scale.samples, draws, scale.horizon, scale.sizes["max_action_dim"])


def under_autocast(bench: Bench, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.autocast(bench.device, bench.dtype, enabled=bench.dtype != torch.float32):
            return function()

    return run


def published_bounds(scale: Scale = SMALL_WIDTHS) -> None:
    """Prints the bounds of the first rows at the published widths, where attention is a smaller share."""
    sizes = PiSizes()
    prefix, suffix = work(sizes, 2, scale.used, scale.horizon)
    dense = sum(work(sizes, VIEWS, scale.prompt, scale.horizon, dense=True))
    rows = {
        "training step": dense / (prefix + suffix),
        "4 draws": 4 * (prefix + suffix) / (prefix + 4 * suffix),
        "10 denoising steps": 10 * (prefix + suffix) / (prefix + 10 * suffix),
    }
    table("bounds at the published sizes", [{name: f"{bound:.2f}" for name, bound in rows.items()}])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in (training, shared_prefix, denoising):
        part(Bench(seconds=4.0))
    published_bounds()
