"""Which checkpoints of a run are complete, so that a restart never resumes from one that was being written."""

from __future__ import annotations

import json

import fsspec

_COMMITTED = "COMMITTED"  # of AsyncShardedCheckpoint
_METADATA = ".metadata"  # of torch's distributed checkpoints


class CheckpointLog:
    """Checkpoints in the order they were completed."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def add(self, path: str, step: int) -> None:
        """Records a checkpoint as written.

        Args:
            path: File or directory, local or any fsspec address.
            step: Optimizer steps done when it was taken.
        """
        self._steps.pop(path, None)
        self._steps[path] = step

    def discard(self, path: str) -> None:
        """Forgets a checkpoint that is overwritten or deleted."""
        self._steps.pop(path, None)

    def newest(self) -> tuple[str, int] | None:
        """The complete checkpoint with the most steps, the one written last among equals; its path and steps."""
        order = {path: place for place, path in enumerate(self._steps)}
        found = ((path, complete_step(path, step)) for path, step in self._steps.items())
        complete = [(step, order[path], path) for path, step in found if step is not None]
        if not complete:
            return None
        step, _, path = max(complete)
        return path, step


def complete_step(path: str, step: int) -> int | None:
    """Steps of what is at a path; None unless a file is there, or a directory with the mark that is written last.

    Args:
        path: File or directory, local or any fsspec address.
        step: Steps of what was being written there; a directory may still hold what was there before.
    """
    system, place = fsspec.core.url_to_fs(path)
    if system.isfile(place):
        return step
    if system.isfile(f"{place}/{_COMMITTED}"):
        found = json.loads(system.cat_file(f"{place}/{_COMMITTED}")).get("global_step")
        return step if found is None else int(found)
    return step if system.isfile(f"{place}/{_METADATA}") else None


class KeptGenerators:
    """The ranks' random generators as they were when checkpoints were taken, which hold none."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, int], dict[int, bytes]] = {}

    def keep(self, path: str, step: int, rank: int, state: bytes) -> None:
        """Keeps those of one rank for the checkpoint that was written at a path after so many steps."""
        self._states.setdefault((path, step), {})[rank] = state

    def of(self, path: str, step: int) -> dict[int, bytes]:
        """What is kept for a checkpoint, by rank."""
        return self._states.get((path, step), {})

    def forget(self, path: str, before: float = float("inf")) -> None:
        """Drops what was kept for a path, of fewer steps than these."""
        for key in [key for key in self._states if key[0] == path and key[1] < before]:
            del self._states[key]
