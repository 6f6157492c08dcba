"""Closed-loop evaluation: success rates with intervals, and the report.

Names are imported when they are first used, so that worker processes, which need none of them, start without torch.
"""

from typing import TYPE_CHECKING

from lightning_embodied.lazy import on_first_use

if TYPE_CHECKING:
    from lightning_embodied.evaluation.actors import ChunkPolicy
    from lightning_embodied.evaluation.closed_loop import EvaluationConfig, EvaluationInterrupted, evaluate
    from lightning_embodied.evaluation.console import success_table
    from lightning_embodied.evaluation.report import build_report
    from lightning_embodied.evaluation.result import EpisodeResult, EvaluationResult
    from lightning_embodied.evaluation.statistics import PairedComparison, SuccessRate, mcnemar_exact, wilson_interval

__all__ = [
    "ChunkPolicy",
    "EpisodeResult",
    "EvaluationConfig",
    "EvaluationInterrupted",
    "EvaluationResult",
    "PairedComparison",
    "SuccessRate",
    "build_report",
    "evaluate",
    "mcnemar_exact",
    "success_table",
    "wilson_interval",
]

__getattr__ = on_first_use(
    __name__,
    {
        "ChunkPolicy": "actors",
        "EpisodeResult": "result",
        "EvaluationConfig": "closed_loop",
        "EvaluationInterrupted": "closed_loop",
        "EvaluationResult": "result",
        "PairedComparison": "statistics",
        "SuccessRate": "statistics",
        "build_report": "report",
        "evaluate": "closed_loop",
        "mcnemar_exact": "statistics",
        "success_table": "console",
        "wilson_interval": "statistics",
    },
)
