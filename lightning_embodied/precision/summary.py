"""The verdicts on a model's linear layers as a few lines, for the log."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_embodied.precision.selection import LayerVerdict


def summary(report: Mapping[str, LayerVerdict], recipe: str, backend: str) -> str:
    """What computes in FP8, and for each reason to stay in high precision how many layers, with the first names.

    Args:
        report: Verdicts by name.
        recipe: Name of the recipe.
        backend: Name of the backend.
    """
    converted = [verdict for verdict in report.values() if verdict.fp8]
    weights = sum(verdict.weights for verdict in report.values())
    share = sum(verdict.weights for verdict in converted) / max(1, weights)
    lines = [
        f"FP8 ({recipe}, {backend}): {len(converted)} of {len(report)} linear layers, {share:.1%} of their weights"
    ]
    kept: dict[str, list[str]] = {}
    for verdict in report.values():
        if not verdict.fp8:
            kept.setdefault(verdict.reason, []).append(verdict.name)
    for reason, names in kept.items():
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        lines.append(f"  {len(names)} in high precision, {reason}: {shown}")
    return "\n".join(lines)
