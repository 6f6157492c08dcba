"""Closed-loop evaluation: success rates with intervals, and the report.

Names are imported when they are first used, so that worker processes, which need none of them, start without torch.
"""

import importlib
from typing import TYPE_CHECKING

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

_MODULES = {
    "actors": ("ChunkPolicy",),
    "closed_loop": ("EvaluationConfig", "EvaluationInterrupted", "evaluate"),
    "console": ("success_table",),
    "report": ("build_report",),
    "result": ("EpisodeResult", "EvaluationResult"),
    "statistics": ("PairedComparison", "SuccessRate", "mcnemar_exact", "wilson_interval"),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            value: object = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
