"""What a person sees while demonstrations are recorded: a bar in a terminal, a line now and then in a log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lightning_embodied.collection.recorder import Episode
from lightning_embodied.collection.schedule import TaskTally


class CollectionProgress:
    """Shows how far a collection is; a context manager.

    Args:
        root: Directory that is written.
        total: Episodes wanted.
    """

    def __init__(self, root: Path, total: int) -> None:
        self._console = Console(stderr=True)
        self._root, self._total, self._done, self._frames = root, total, 0, 0
        self._bar = Progress(
            TextColumn("recording {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._line = self._bar.add_task("", total=total, failed=0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, episode: Episode, tallies: Mapping[str, TaskTally]) -> None:
        """Counts a written episode."""
        self._done, self._frames = self._done + 1, self._frames + episode.steps
        failed = sum(len(tally.failed_seeds) for tally in tallies.values())
        self._bar.update(self._line, completed=self._done, description=episode.task, failed=failed)
        if self._bar.disable and (
            self._done == 1 or self._done * 10 // self._total > (self._done - 1) * 10 // self._total
        ):
            self._print(f"recorded {self._done} of {self._total} episodes ({episode.task}), {failed} failed")

    def summarize(self, tallies: Mapping[str, TaskTally], *, complete: bool) -> None:
        """Shows what was written."""
        table = Table("task", "kept", "failed attempts")
        for task, tally in tallies.items():
            table.add_row(task, str(tally.kept), str(len(tally.failed_seeds)))
        self._console.print(table)
        stopped = "" if complete else "stopped early; complete episodes were kept: "
        self._print(f"{stopped}{self._done} episodes, {self._frames:,} frames in {self._root}")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)
