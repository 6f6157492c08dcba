"""`lightning-embodied quantize`: a checkpoint as a small directory for a robot, and what that costs.

The directory is written first and everything is measured on what is read back from it, on held-out frames of the run's
dataset and in the environment the run was evaluated in, from the same initial states before and after.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_embodied.cli.quantize_inputs import Frames, evaluation_of, frames_of
from lightning_embodied.cli.quantize_output import action_table, size_table, success_comparison
from lightning_embodied.evaluation import EvaluationConfig, EvaluationResult, evaluate
from lightning_embodied.evaluation.closed_loop import run_directory_of
from lightning_embodied.evaluation.result import write_atomically
from lightning_embodied.models import PolicyModule, find_checkpoint, load_policy
from lightning_embodied.quantization import Quantization, Recipe, calibrate, quantize_policy, save_policy
from lightning_embodied.quantization import load_policy as load_quantized
from lightning_embodied.quantization.choice import summary
from lightning_embodied.quantization.comparison import compare_actions, predict_actions
from lightning_embodied.quantization.formats import FormatName
from lightning_embodied.quantization.manifest import MANIFEST, WEIGHTS
from lightning_embodied.quantization.quantizing import KeptDtype
from lightning_embodied.quantization.saving import check_target

REPORT = "report.json"


def quantize(
    checkpoint: str,
    out: str,
    *,
    weights: FormatName = "fp8_block",
    kept: KeptDtype = "bfloat16",
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    safe_defaults: bool = True,
    calibration_frames: int = 0,
    frames: int = 256,
    data_root: str | None = None,
    evaluation: str | None = None,
    episodes_per_task: int | None = None,
    closed_loop: bool = True,
    onnx: str | None = None,
    overwrite: bool = False,
    device: str = "auto",
) -> None:
    """Quantises a trained policy to eight bits, writes it for a robot and measures what it costs.

    Args:
        checkpoint: A checkpoint file, or a run directory for its newest checkpoint.
        out: Directory to write.
        weights: Format of the weights: E4M3 with one scale for each 128 x 128 block, each row or each tensor, or int8
            with one scale for each row, which is more accurate, and as fast where there are no FP8 cores.
        kept: Dtype in which everything else is stored. `int8` stores what only safe defaults keep in int8 with one
            scale for each row, and the rest in bfloat16: for policies so small that most of them is kept.
        include: Patterns of the full names of the layers to quantise.
        exclude: Patterns of layers that stay as they are; stronger than `include`.
        safe_defaults: Also keep the vision tower, embeddings, convolutions, what reads actions, states or flow time,
            what writes actions or tokens, and what modulates norms.
        calibration_frames: Training frames from which scales for the inputs of the layers are taken, so that GPUs with
            FP8 cores multiply in FP8; 0 quantises weights only.
        frames: Held-out frames on which actions are compared.
        data_root: Where the run's dataset lies now; default: where the run found it.
        evaluation: Configuration of an `evaluate` to run before and after; default: the one the run was last evaluated
            with, if it was.
        episodes_per_task: Episodes of each task in closed loop; default: as in that configuration.
        closed_loop: Whether to run the policies in closed loop.
        onnx: Also write the denoising step as `denoising_step.onnx`, for instructions as long as this one.
        overwrite: Replace a quantised policy that is there.
        device: Where to compute; `auto` takes a CUDA device if there is one.
    """
    recipe = Recipe(weights, kept, tuple(include), tuple(exclude), safe_defaults)
    path, target = find_checkpoint(checkpoint), Path(out)
    check_target(target, overwrite=overwrite)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    policy, run = load_policy(path, map_location=device), run_directory_of(path)
    data = frames_of(run, data_root, policy.spec, held_out=frames, training=calibration_frames)
    config = _evaluation(run, evaluation, episodes_per_task) if closed_loop else None
    before = _Measured.of(policy, data, config)
    quantization = _quantized(policy, recipe, data)
    attach = None if onnx is None else partial(_write_onnx, policy, onnx)
    save_policy(policy, quantization, target, overwrite=overwrite, source=_source(path), attach=attach)
    print(f"{summary(quantization.layers, quantization.formats)}\nwritten to {target}")
    _report(before, _Measured.of(load_quantized(target, device=device), data, config), data, policy, target)


@dataclass(frozen=True)
class _Measured:
    """What a policy does: its size in float32, its actions on the held-out frames, and in closed loop."""

    numbers: int
    actions: list[torch.Tensor]
    episodes: EvaluationResult | None

    @classmethod
    def of(cls, policy: PolicyModule, data: Frames, config: EvaluationConfig | None) -> _Measured:
        numbers = sum(tensor.numel() for tensor in policy.parameters())
        actions = predict_actions(policy, data.held_out)
        return cls(numbers, actions, None if config is None else evaluate(policy, config, progress=False))


def _evaluation(run: Path, given: str | None, episodes_per_task: int | None) -> EvaluationConfig | None:
    config = evaluation_of(run, given, episodes_per_task)
    if config is None:
        print("no closed loop: the run was not evaluated, and no --evaluation is given")
    return config


def _source(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        return {"checkpoint": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _quantized(policy: PolicyModule, recipe: Recipe, data: Frames) -> Quantization:
    quantization = quantize_policy(policy, recipe)
    if not data.training:
        return quantization
    return calibrate(policy, quantization, lambda: predict_actions(policy, data.training))


def _write_onnx(policy: PolicyModule, instruction: str, folder: Path) -> None:
    from lightning_embodied.quantization.onnx_export import example_observation, export_denoising_step

    path = folder / "denoising_step.onnx"
    error = export_denoising_step(policy.cpu(), example_observation(policy, instruction), path)
    print(f"{path.name}: {path.stat().st_size / 1e6:.3f} MB; onnxruntime and torch differ by {error:.1e}")


def _report(before: _Measured, after: _Measured, data: Frames, policy: PolicyModule, target: Path) -> None:
    """Prints the tables, and writes their numbers beside the policy."""
    from rich.console import Console

    console = Console()
    sizes = {
        "float32": 4 * before.numbers,
        WEIGHTS: (target / WEIGHTS).stat().st_size,
        MANIFEST: (target / MANIFEST).stat().st_size,
    }
    content: dict[str, Any] = {"bytes": sizes}
    console.print(size_table(sizes))
    if data.held_out:
        comparison = compare_actions(before.actions, after.actions, data.held_out, policy.spec)
        content["actions"] = asdict(comparison)
        console.print(action_table(comparison))
    else:
        console.print(f"actions were not compared: {data.reason}", highlight=False)
    if before.episodes is not None and after.episodes is not None:
        table, content["closed_loop"] = success_comparison(before.episodes, after.episodes)
        console.print(table)
    write_atomically(target / REPORT, json.dumps(content, indent=1) + "\n")
