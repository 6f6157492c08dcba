"""Closed-loop evaluation: success rates with intervals, and the report."""

from lightning_embodied.evaluation.report import build_report
from lightning_embodied.evaluation.result import EpisodeResult, EvaluationResult
from lightning_embodied.evaluation.statistics import PairedComparison, SuccessRate, mcnemar_exact, wilson_interval

__all__ = [
    "EpisodeResult",
    "EvaluationResult",
    "PairedComparison",
    "SuccessRate",
    "build_report",
    "mcnemar_exact",
    "wilson_interval",
]
