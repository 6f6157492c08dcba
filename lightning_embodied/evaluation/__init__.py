"""Closed-loop evaluation: success rates with intervals, and the report."""

from lightning_embodied.evaluation.actors import ChunkPolicy
from lightning_embodied.evaluation.console import success_table
from lightning_embodied.evaluation.evaluate import EvaluationConfig, EvaluationInterrupted, evaluate
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
