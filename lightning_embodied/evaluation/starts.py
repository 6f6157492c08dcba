"""Initial states: named by a hash, counted, and checked to be unseen in training.

A success rate over starts that were trained on, or over one start run twenty times, is worth nothing; two checks keep
it honest. The seeds of `meta/collection.json` say what was intended, and the first frames of the training episodes
say what was recorded: a start counts as seen if either matches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_embodied.errors import DatasetError

STATE_KEYS = ("observation.environment_state", "observation.state")
"""Vectors that tell one initial state from another."""

_TOLERANCE = 1e-5  # two machines' physics may differ in the last bits of float32, starts differ by far more


@dataclass(frozen=True)
class Start:
    """One initial state.

    Attributes:
        task: Task name of the environment.
        seed: Seed of the environment's reset.
        instruction: What the environment says the task is.
        vectors: The vectors of the first observation, by key.
        digest: SHA-256 that names the state.
    """

    task: str
    seed: int
    instruction: str
    vectors: dict[str, NDArray[np.float32]]
    digest: str

    @classmethod
    def of(cls, task: str, seed: int, instruction: str, observation: Mapping[str, NDArray[Any]]) -> Start:
        """Names the state that an environment's first observation shows.

        Args:
            task: Task name.
            seed: Seed of the reset.
            instruction: The environment's instruction.
            observation: LeRobot key to array, without batch axis. Vectors decide; pictures only if there are none,
                because graphics drivers do not agree on pixels.
        """
        vectors = {key: np.asarray(observation[key], np.float32) for key in STATE_KEYS if key in observation}
        digest = hashlib.sha256(task.encode())
        for key in sorted(vectors if vectors else observation):
            array = np.ascontiguousarray(observation[key])
            digest.update(f"\0{key}\0{array.dtype.str}{array.shape}".encode())
            digest.update(array.tobytes())
        return cls(task, seed, instruction, vectors, digest.hexdigest())


def check_unseen(root: str | Path, starts: Sequence[Start], *, allow_seen: bool = False) -> dict[str, Any]:
    """Compares evaluation starts with the starts of a training dataset.

    Args:
        root: The LeRobot dataset the policy was trained on.
        starts: Initial states of the evaluation.
        allow_seen: Report starts seen in training instead of refusing them.

    Returns:
        What was compared and found: `root`, `training_episodes`, `seeds_compared`, `states_compared`, `seen_starts`
        and `seen` (task, seed and reason of each).

    Raises:
        DatasetError: The dataset cannot be read, or a start was seen in training and `allow_seen` is false.
    """
    root = Path(root)
    seeds = _collection_seeds(root)
    first_frames, instructions = _first_frames(root)
    seen = []
    for start in starts:
        if (start.task, start.seed) in seeds:
            seen.append({"task": start.task, "seed": start.seed, "reason": "seed used for a demonstration"})
        elif _same_state(start, first_frames, instructions):
            seen.append({"task": start.task, "seed": start.seed, "reason": "same first frame as a demonstration"})
    if seen and not allow_seen:
        shown = ", ".join(f"{row['task']} seed {row['seed']}" for row in seen[:3])
        raise DatasetError(
            f"{len(seen)} of {len(starts)} evaluation starts were seen in training",
            where=root,
            found=f"{shown}{' …' if len(seen) > 3 else ''} ({seen[0]['reason']})",
            mend="choose another first_seed, or set allow_seen_starts to report them and go on",
        )
    return {
        "root": str(root),
        "training_episodes": len(instructions),
        "seeds_compared": len(seeds),
        "states_compared": sorted(first_frames),
        "seen_starts": len(seen),
        "seen": seen,
    }


def _same_state(start: Start, first_frames: Mapping[str, NDArray[np.float32]], instructions: Sequence[str]) -> bool:
    keys = [
        key for key in start.vectors if key in first_frames and first_frames[key].shape[1:] == start.vectors[key].shape
    ]
    if not keys:
        return False
    same = np.array([text == start.instruction for text in instructions], dtype=bool)
    for key in keys:
        same &= (np.abs(first_frames[key] - start.vectors[key]) <= _TOLERANCE).all(
            axis=tuple(range(1, first_frames[key].ndim))
        )
    return bool(same.any())


def _collection_seeds(root: Path) -> set[tuple[str, int]]:
    path = root / "meta" / "collection.json"
    if not path.is_file():
        return set()
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return {(str(row["task"]), int(row["seed"])) for row in value["episodes"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(
            "the record of how the demonstrations were collected cannot be read", where=path, found=repr(error)
        ) from error


def _first_frames(root: Path) -> tuple[dict[str, NDArray[np.float32]], list[str]]:
    """First frame of each episode: vectors by key `[episodes, …]`, and the instructions."""
    from lightning_embodied.data import LeRobotDataset

    dataset = LeRobotDataset(root)
    lengths = np.asarray(dataset.episode_lengths, dtype=np.int64)
    first = np.cumsum(lengths) - lengths
    frames = {key: np.asarray(dataset.numeric(key)[first], np.float32) for key in STATE_KEYS if key in dataset.features}
    tasks = np.asarray(dataset.numeric("task_index")).reshape(-1)[first]
    return frames, [dataset.tasks[int(task)] for task in tasks]
