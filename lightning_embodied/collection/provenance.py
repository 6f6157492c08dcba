"""Where each episode of a collected dataset came from, in `meta/collection.json`.

Evaluation reads it to make sure that no initial state it tries was demonstrated.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_embodied.collection.recorder import Episode
from lightning_embodied.collection.schedule import TaskTally
from lightning_embodied.errors import DatasetError
from lightning_embodied.version import __version__

PROVENANCE_FILE = Path("meta") / "collection.json"


@dataclass(frozen=True)
class EpisodeOrigin:
    """Where one episode came from.

    Attributes:
        episode_index: Its number in the dataset.
        task: Name of the task in the environment.
        instruction: The task in plain English, as in the dataset.
        seed: Seed of the initial state.
        steps: Frames.
        initial_state_hash: Identifies the initial state, as the environment's reset reports it.
    """

    episode_index: int
    task: str
    instruction: str
    seed: int
    steps: int
    initial_state_hash: str

    @classmethod
    def of(cls, index: int, episode: Episode) -> EpisodeOrigin:
        """The origin of a recorded episode."""
        return cls(index, episode.task, episode.instruction, episode.seed, episode.steps, episode.initial_state_hash)


@dataclass
class Provenance:
    """How a dataset was collected.

    Attributes:
        env_id: Gymnasium id.
        env_kwargs: Options of the environment.
        action_noise: Standard deviation of the noise on executed actions.
        noise_steps: Steps one draw was held.
        steps_after_success: Steps recorded after success.
        episodes: Origin of each episode.
    """

    env_id: str
    env_kwargs: dict[str, Any]
    action_noise: float
    noise_steps: int
    steps_after_success: int
    episodes: list[EpisodeOrigin] = field(default_factory=list)


def write_provenance(root: Path, provenance: Provenance, tallies: Mapping[str, TaskTally], *, complete: bool) -> None:
    """Writes `meta/collection.json` of a dataset, whole or not at all.

    Args:
        root: Directory of the dataset.
        provenance: What to write.
        tallies: Kept and failed attempts of each task.
        complete: Whether all episodes asked for were recorded.

    Raises:
        DatasetError: The file cannot be written.
    """
    value = {
        "complete": complete,
        **asdict(provenance),
        "tasks": {
            task: {"kept": tally.kept, "failed": len(tally.failed_seeds), "failed_seeds": tally.failed_seeds}
            for task, tally in tallies.items()
        },
        "versions": _versions(),
    }
    path = root / PROVENANCE_FILE
    temporary = path.with_suffix(".json.new")
    try:
        temporary.write_text(json.dumps(value, indent=1) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DatasetError(
            "the dataset is complete, but its provenance cannot be written", where=path, found=error
        ) from error


def read_provenance(root: str | Path) -> dict[str, Any] | None:
    """The content of `meta/collection.json`, or None when a dataset has none.

    Args:
        root: Directory of the dataset.

    Raises:
        DatasetError: The file is damaged.
    """
    path = Path(root) / PROVENANCE_FILE
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DatasetError("the provenance of a dataset cannot be read", where=path, found=error) from error
    if not isinstance(value, dict) or not isinstance(value.get("episodes"), list):
        raise DatasetError("the provenance of a dataset is damaged", where=path, expected="an object with episodes")
    return value


def _versions() -> dict[str, str]:
    versions = {"lightning-embodied": __version__}
    for package in ("gymnasium", "metaworld", "mujoco", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
