"""The tables of `quantize`: size, actions, and success from the same initial states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from lightning_embodied.evaluation import EvaluationResult
from lightning_embodied.quantization.comparison import ActionComparison

if TYPE_CHECKING:
    from rich.table import Table


def size_table(sizes: Mapping[str, int]) -> Table:
    """Bytes of the weights in float32, of the file and of the manifest, as shares of the first.

    Args:
        sizes: By name; the first one is the whole.
    """
    table = _table("Size", "", "MB", "share")
    whole = next(iter(sizes.values()))
    for name, size in sizes.items():
        table.add_row("weights in float32" if name == "float32" else name, f"{size / 1e6:.3f}", f"{size / whole:.3f}")
    return table


def action_table(comparison: ActionComparison) -> Table:
    """One row for each dimension of the action, in the robot's units."""
    title = f"Actions on {comparison.frames} held-out frames, in the robot's units"
    columns = ("spread of\nthe data", "change,\nroot mean square", "change,\nlargest", "error\nbefore", "error\nafter")
    table = _table(title, "", *columns)
    rows = zip(
        comparison.spread,
        comparison.change_rms,
        comparison.change_max,
        comparison.error_before,
        comparison.error_after,
        strict=True,
    )
    for name, numbers in zip(comparison.names, rows, strict=True):
        table.add_row(name, *(f"{number:.4g}" for number in numbers))
    return table


def success_comparison(before: EvaluationResult, after: EvaluationResult) -> tuple[Table, dict[str, Any]]:
    """Success rates from the same initial states, with the exact paired test.

    Args:
        before: Episodes of the policy as it was trained.
        after: Episodes of the quantised one.

    Returns:
        The table, and the same as plain values.
    """
    rows = [replace(row, policy="before") for row in before.episodes]
    rows += [replace(row, policy="after") for row in after.episodes]
    result = replace(before, episodes=rows)
    pair = result.compare("before", "after")
    table = _table("Success in closed loop, from the same initial states", "task", "before", "after")
    for task in (*result.tasks, None):
        if task is None:
            table.add_section()
        rates = [str(result.success_rate(policy, task)) for policy in ("before", "after")]
        table.add_row(task or "all tasks", *rates)
    table.caption = (
        f"95 % Wilson intervals; only before {pair.only_first}, only after {pair.only_second}: "
        f"exact McNemar p = {pair.p_value:.3g}"
    )
    table.caption_justify = "left"
    return table, {"summary": result.summary(), **asdict(pair), "mcnemar_p": pair.p_value}


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), title_justify="left")
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table
