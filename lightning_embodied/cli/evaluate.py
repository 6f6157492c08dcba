"""`lightning-embodied evaluate`: success rates with intervals, in closed loop, from starts nobody has trained on."""

from __future__ import annotations

import sys
from typing import Any

from lightning_embodied.evaluation import EvaluationConfig, EvaluationInterrupted, success_table
from lightning_embodied.evaluation import evaluate as run_evaluation


def evaluate(checkpoint: str, *, output_dir: str | None = None, **settings: Any) -> None:
    """Measures a policy's success rate in closed loop, next to the expert and an untrained policy.

    Args:
        checkpoint: A checkpoint file, a run directory for its newest checkpoint, or what `quantize` wrote.
        output_dir: Where `results.json` and `videos/` go; default: `evaluation` in the checkpoint's run directory.
        settings: Of `EvaluationConfig`.
    """
    from rich.console import Console

    console = Console()
    try:
        result = run_evaluation(
            checkpoint, EvaluationConfig(**settings), output_dir=output_dir, progress=sys.stdout.isatty()
        )
    except EvaluationInterrupted as stop:
        console.print(success_table(stop.result))
        raise
    console.print(success_table(result))
