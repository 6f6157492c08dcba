"""What an evaluation found: one row an episode, everything else derived from the rows.

`results.json` is replaced atomically (written beside itself, then renamed), so a reader sees the old or the new
file and never half of one; a stopped evaluation is marked `"complete": false`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_embodied.errors import ConfigError
from lightning_embodied.evaluation.statistics import PairedComparison, SuccessRate

SCHEMA_VERSION = 1
"""Version of `results.json`; raised when a key changes its meaning."""


@dataclass(frozen=True)
class EpisodeResult:
    """One finished episode.

    Attributes:
        policy: Who acted: `checkpoint`, `swapped`, `expert`, `untrained` or a name of the caller's.
        task: Task name of the environment.
        seed: Seed of the environment's reset.
        success: Whether the environment said so before the horizon.
        steps: Environment steps taken, until success or the horizon.
        instruction: What the policy was told.
        initial_state: SHA-256 of the first observation's vectors (of its pictures, if it has no vectors).
    """

    policy: str
    task: str
    seed: int
    success: bool
    steps: int
    instruction: str
    initial_state: str


@dataclass(frozen=True)
class Effort:
    """What one policy's episodes cost.

    Attributes:
        wall_time_s: Seconds from the first reset to the last step.
        env_steps: Environment steps of all episodes.
        inferences: Observations for which the policy predicted an action chunk.
    """

    wall_time_s: float
    env_steps: int
    inferences: int

    @property
    def frames_per_second(self) -> float:
        """Environment steps per second of wall time."""
        return self.env_steps / self.wall_time_s if self.wall_time_s > 0 else 0.0


@dataclass(frozen=True)
class EvaluationResult:
    """Outcome of an evaluation.

    Attributes:
        episodes: The finished episodes, ordered by policy, task and seed.
        settings: What was asked for, plain values (environment, tasks, horizon, slots, first seed …).
        planned_episodes: How many episodes were asked for, over all policies.
        complete: Whether all of them were run.
        effort: What each policy's episodes cost.
        checkpoint: Path and `sha256` of the checkpoint, if there was one.
        training_data: What the check against the training data compared and found, if a dataset was given.
        versions: Versions of what the numbers depend on.
        videos: Task to video file, relative to the results file.
    """

    episodes: list[EpisodeResult]
    settings: dict[str, Any]
    planned_episodes: int
    complete: bool
    effort: dict[str, Effort] = field(default_factory=dict)
    checkpoint: dict[str, str] | None = None
    training_data: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    videos: dict[str, str] = field(default_factory=dict)

    @property
    def policies(self) -> list[str]:
        """Names of the policies, in the order they were run."""
        return list(dict.fromkeys(row.policy for row in self.episodes))

    @property
    def subject(self) -> str | None:
        """The policy that the evaluation is about: the checkpoint's, or else the first that was run."""
        return "checkpoint" if "checkpoint" in self.policies else next(iter(self.policies), None)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in the order they were run."""
        return list(dict.fromkeys(row.task for row in self.episodes))

    @property
    def distinct_initial_states(self) -> int:
        """Number of different starts among all episodes, per task and summed."""
        return len({(row.task, row.initial_state) for row in self.episodes})

    def select(self, policy: str, task: str | None = None) -> list[EpisodeResult]:
        """Episodes of one policy, of one task or of all."""
        return [row for row in self.episodes if row.policy == policy and task in (None, row.task)]

    def success_rate(self, policy: str, task: str | None = None) -> SuccessRate:
        """Success rate of one policy, on one task or over all episodes."""
        return SuccessRate.of([row.success for row in self.select(policy, task)])

    def steps_to_success(self, policy: str, task: str | None = None) -> float | None:
        """Mean number of steps of the episodes that succeeded; None if none did."""
        steps = [row.steps for row in self.select(policy, task) if row.success]
        return sum(steps) / len(steps) if steps else None

    def compare(self, first: str, second: str) -> PairedComparison:
        """Compares two policies on the starts that both were run on."""
        other = {(row.task, row.seed): row.success for row in self.select(second)}
        pairs = [
            (row.success, other[row.task, row.seed]) for row in self.select(first) if (row.task, row.seed) in other
        ]
        return PairedComparison.of(first, second, pairs)

    def summary(self) -> list[dict[str, Any]]:
        """One plain row per policy and task, and per policy over all tasks (`task` None)."""
        rows = []
        for policy in self.policies:
            for task in (*self.tasks, None):
                rate = self.success_rate(policy, task)
                rows.append(
                    {
                        "policy": policy,
                        "task": task,
                        "successes": rate.successes,
                        "episodes": rate.episodes,
                        "success_rate": rate.rate if rate.episodes else None,
                        "wilson_95": list(rate.interval),
                        "mean_steps_to_success": self.steps_to_success(policy, task),
                    }
                )
        return rows

    def comparisons(self) -> list[PairedComparison]:
        """The policy that the evaluation is about against each other one."""
        return [self.compare(self.subject, other) for other in self.policies if self.subject not in (None, other)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in `results.json`; the derived numbers are there for readers without this package."""
        derived = {
            "summary": self.summary(),
            "comparisons": [{**asdict(pair), "mcnemar_p": pair.p_value} for pair in self.comparisons()],
            "distinct_initial_states": self.distinct_initial_states,
        }
        return {"schema_version": SCHEMA_VERSION, **derived, **asdict(self)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> EvaluationResult:
        """Reads what `to_dict` wrote; the derived numbers are derived again.

        Raises:
            ConfigError: Another schema version, or keys missing.
        """
        if value.get("schema_version") != SCHEMA_VERSION:
            raise ConfigError(
                "these evaluation results are of another version",
                found=value.get("schema_version"),
                expected=SCHEMA_VERSION,
                mend="run `lightning-embodied evaluate` again",
            )
        try:
            kept = {name: value[name] for name in cls.__dataclass_fields__}
            kept["episodes"] = [EpisodeResult(**row) for row in value["episodes"]]
            kept["effort"] = {name: Effort(**cost) for name, cost in value["effort"].items()}
        except (KeyError, TypeError) as error:
            raise ConfigError("these evaluation results lack a key", found=str(error)) from error
        return cls(**kept)

    def save(self, path: str | Path) -> Path:
        """Writes the results file in one step: it is there whole, or as it was before."""
        return write_atomically(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> EvaluationResult:
        """Reads a results file.

        Raises:
            ConfigError: There is none, or it is not one.
        """
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                "there are no evaluation results", where=path, mend="run `lightning-embodied evaluate` first"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError("the evaluation results cannot be read", where=path, found=str(error)) from error
        if not isinstance(value, dict):
            raise ConfigError("this is not a file of evaluation results", where=path, found=type(value).__name__)
        return cls.from_dict(value)


def write_atomically(path: Path, text: str) -> Path:
    """Writes a text file beside its place and renames it there, so that it is never seen half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only the owner can read; results and reports are for sharing.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sort_episodes(
    episodes: Sequence[EpisodeResult], policies: Sequence[str], tasks: Sequence[str]
) -> list[EpisodeResult]:
    """Orders episodes as they were planned, whatever order they finished in."""
    return sorted(episodes, key=lambda row: (policies.index(row.policy), tasks.index(row.task), row.seed))
