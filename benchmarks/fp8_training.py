"""Training in FP8 against float32: the quickstart policy, its final loss and its success in closed loop.

    lightning-embodied collect --config configs/collect_metaworld.yaml
    python -m benchmarks.fp8_training --steps 1250

A run of a policy this small cannot be repeated by any other rounding: the bound is what other seeds do to the
float32 run. FP8 runs share the first seed, so weights, noise and the order of samples are those of its float32 run.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.timing import table

SEEDS = (0, 1, 2, 3)
EVALUATION = "configs/evaluate_metaworld.yaml"


def runs(recipe: str) -> dict[str, tuple[int, dict[str, str] | None]]:
    """Seed and options of `FP8Precision`, by the run's name."""
    fp8 = {backend: {"recipe": recipe, "backend": backend} for backend in ("emulated", "torchao")}
    return {f"float32, seed {seed}": (seed, None) for seed in SEEDS} | {
        f"{recipe}, {backend}, seed {SEEDS[0]}": (SEEDS[0], options) for backend, options in fp8.items()
    }


def command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "lightning_embodied", *arguments], check=True)  # noqa: S603


def train(directory: Path, data: str, steps: int, seed: int, fp8: dict[str, str] | None) -> None:
    """Trains, and evaluates from 25 unseen initial states of each task; a run that is there is not run again."""
    if (directory / "evaluation" / "results.json").exists():
        return
    plugins = [] if fp8 is None else [{"class_path": "FP8Precision", "init_args": fp8}]
    options = {
        "seed_everything": seed,
        "wandb": "disabled",
        "data.root": data,
        "trainer.max_steps": steps,
        "trainer.val_check_interval": steps,
        "trainer.limit_val_batches": 1.0,
        "trainer.default_root_dir": directory,
        "trainer.plugins": json.dumps(plugins),
    }
    command("fit", "--config", "configs/quickstart.yaml", *(f"--{key}={value}" for key, value in options.items()))
    evaluation = ["--dataset", data, "--policies", "[checkpoint]", "--videos", "false"]
    command("evaluate", "--checkpoint", str(directory), "--config", EVALUATION, *evaluation)


def results(directory: Path, steps: int) -> dict[str, float]:
    """Mean training loss of the last tenth of the steps, loss on all held-out episodes, and successes."""
    with (directory / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    last = [float(row["train/loss"]) for row in rows if row["train/loss"] and int(row["step"]) >= 0.9 * steps]
    summary = json.loads((directory / "evaluation" / "results.json").read_text())["summary"]
    total = next(row for row in summary if row["task"] is None)
    return {
        "train": statistics.mean(last),
        "held out": float(next(row["val/loss"] for row in reversed(rows) if row["val/loss"])),
        **{name: total[name] for name in ("successes", "episodes")},
        **dict(zip(("low", "high"), total["wilson_95"], strict=True)),
    }


def verdict(found: dict[str, dict[str, float]], loss: str) -> str:
    """Whether the FP8 runs lie in the band of the float32 ones: their mean, give or take two standard deviations."""
    band = [values[loss] for name, values in found.items() if name.startswith("float32")]
    mean, spread = statistics.mean(band), statistics.stdev(band)
    inside = {n: abs(v[loss] - mean) <= 2 * spread for n, v in found.items() if not n.startswith("float32")}
    return f"{loss}: band {mean - 2 * spread:.4f} to {mean + 2 * spread:.4f}; " + "; ".join(
        f"{name} {'inside' if yes else 'OUTSIDE'}" for name, yes in inside.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/metaworld")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--recipe", default="rowwise")
    parser.add_argument("--out", type=Path, default=Path("runs/fp8_training"))
    arguments = parser.parse_args()
    found = {}
    for name, (seed, fp8) in runs(arguments.recipe).items():
        directory = arguments.out / name.replace(", ", "-").replace(" ", "")
        train(directory, arguments.data, arguments.steps, seed, fp8)
        found[name] = results(directory, arguments.steps)
    rows = [
        {
            "run": name,
            "training loss": f"{values['train']:.4f}",
            "held-out loss": f"{values['held out']:.4f}",
            "success": f"{values['successes']:.0f} of {values['episodes']:.0f}",
            "95 %": f"{values['low']:.0%} to {values['high']:.0%}",
        }
        for name, values in found.items()
    ]
    table(f"quickstart policy, {arguments.steps} steps", rows)
    for loss in ("train", "held out"):
        print("  " + verdict(found, loss))


if __name__ == "__main__":
    main()
