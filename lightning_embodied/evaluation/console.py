"""The evaluation in the terminal: a progress bar while it runs and one table of what it found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from lightning_embodied.evaluation.report import POLICY_LABELS
from lightning_embodied.evaluation.result import EpisodeResult, EvaluationResult

if TYPE_CHECKING:
    from rich.table import Table


class OnEpisode(Protocol):
    """Called with each finished episode."""

    def __call__(self, episode: EpisodeResult, /) -> None:
        """Takes the episode."""


@contextmanager
def progress_bar(total: int, *, show: bool) -> Iterator[OnEpisode]:
    """A bar over episodes with the running success rate of each policy.

    Args:
        total: Number of episodes that will be run.
        show: Whether to draw it.

    Yields:
        What to call with each finished episode.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rates]}"),
    )
    outcomes: dict[str, list[bool]] = {}
    with Progress(*columns, disable=not show, transient=True) as progress:
        bar = progress.add_task("Evaluating", total=total, rates="")

        def advance(episode: EpisodeResult, /) -> None:
            outcomes.setdefault(episode.policy, []).append(episode.success)
            rates = "  ".join(f"{name} {sum(done)}/{len(done)}" for name, done in outcomes.items())
            progress.update(bar, advance=1, rates=rates)

        yield advance


def success_table(result: EvaluationResult) -> Table:
    """The table of success rates with intervals, one row per task and one for all tasks."""
    from rich.table import Table

    caption = "95 % Wilson intervals; all policies start from the same initial states"
    table = Table(title="Success rate", caption=caption, title_justify="left", caption_justify="left")
    table.add_column("task")
    for policy in result.policies:
        table.add_column(POLICY_LABELS.get(policy, policy), justify="right")
    table.add_column("steps to success", justify="right")
    for task in (*result.tasks, None):
        rates = [str(result.success_rate(policy, task)) for policy in result.policies]
        steps = result.steps_to_success(result.subject, task) if result.subject else None
        if task is None:
            table.add_section()
        table.add_row(task or "all tasks", *rates, "-" if steps is None else f"{steps:.0f}")
    return table
