"""Records one episode of a scripted expert; runs inside a worker process.

With noise the executed action is disturbed and the recorded one is what the expert wanted (DART, Laskey et al., 2017,
arXiv:1703.09327): the dataset then shows how to come back from states the expert alone would never visit.
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_embodied.envs import EmbodiedEnv, make_env
from lightning_embodied.errors import ConfigError
from lightning_embodied.features import Feature

_KEPT_ENVIRONMENTS = 2


@dataclass(frozen=True)
class EnvironmentDescription:
    """What the dataset's header needs of an environment.

    Attributes:
        features: What a frame holds.
        fps: Steps a second.
        robot_type: Free label.
        task_names: The tasks to record.
    """

    features: dict[str, Feature]
    fps: int
    robot_type: str
    task_names: tuple[str, ...]


@dataclass(frozen=True)
class Episode:
    """One attempt of the expert.

    Attributes:
        task: Name of the task.
        seed: Seed of the initial state.
        instruction: The task in plain English.
        success: Whether the task was done.
        steps: Number of frames.
        initial_state_hash: Identifies the initial state.
        frames: Per feature, its values `[steps, ...]`; empty when the attempt failed.
    """

    task: str
    seed: int
    instruction: str
    success: bool
    steps: int
    initial_state_hash: str
    frames: dict[str, NDArray[Any]]


class EpisodeRecorder:
    """Records episodes of one environment in any of its tasks.

    Args:
        env_id: Gymnasium id of an `EmbodiedEnv`.
        env_kwargs: Its options besides `task`.
        action_noise: Standard deviation of the noise on executed actions, in their units.
        noise_steps: Steps for which one draw of the noise is held.
        steps_after_success: Steps recorded after the first successful one.
    """

    def __init__(
        self,
        env_id: str,
        env_kwargs: Mapping[str, Any],
        *,
        action_noise: float,
        noise_steps: int,
        steps_after_success: int,
    ) -> None:
        self._env_id, self._env_kwargs = env_id, {**env_kwargs, "terminate_on_success": False}
        self._noise, self._noise_steps = action_noise, noise_steps
        self._steps_after_success = steps_after_success
        self._environments: OrderedDict[str, EmbodiedEnv] = OrderedDict()

    def describe(self, tasks: Sequence[str] | None) -> EnvironmentDescription:
        """Checks the tasks and says what will be recorded.

        Args:
            tasks: Names of tasks; None for all the environment has.

        Raises:
            ConfigError: An unknown task, environment or option.
        """
        env = make_env(self._env_id, self._env_kwargs).unwrapped
        if not isinstance(env, EmbodiedEnv):
            raise ConfigError("the environment has no scripted expert", where="env_id", found=self._env_id)
        for task in tasks or ():
            if task not in env.task_names:
                close = difflib.get_close_matches(task, env.task_names, n=3, cutoff=0.0)
                raise ConfigError(f"unknown task {task!r}", where="tasks", found=task, expected=f"such as {close}")
        return EnvironmentDescription(
            env.features, env.fps, env.robot_type, tuple(env.task_names if tasks is None else tasks)
        )

    def record(self, task: str, seed: int) -> Episode:
        """Lets the expert try a task once.

        Args:
            task: Name of the task.
            seed: Seed of the initial state, and of the noise.
        """
        env = self._environment(task)
        observation, info = env.reset(seed=seed)
        expert, random = env.expert(), np.random.default_rng(seed)
        rows: list[dict[str, Any]] = []
        remaining, truncated, success = self._steps_after_success + 1, False, False
        noise: NDArray[Any] = np.zeros(env.action_space.shape or (), dtype=np.float32)
        while remaining and not truncated:
            if rows:
                observation = env.observe()
            if self._noise and len(rows) % self._noise_steps == 0:
                noise = self._noise * random.standard_normal(noise.shape).astype(np.float32)
            action = expert.act()
            rows.append({**observation, "action": action})
            _, _, truncated, step_info = env.advance(action + noise)
            success = success or step_info["success"]
            remaining -= success
        frames = {key: np.stack([row[key] for row in rows]) for key in rows[0]} if success else {}
        return Episode(task, seed, info["instruction"], success, len(rows), info["initial_state_hash"], frames)

    def close(self) -> None:
        """Closes the environments."""
        while self._environments:
            self._environments.popitem()[1].close()

    def _environment(self, task: str) -> EmbodiedEnv:
        if task not in self._environments:
            env = make_env(self._env_id, {**self._env_kwargs, "task": task}).unwrapped
            assert isinstance(env, EmbodiedEnv)  # noqa: S101  `describe` has checked it
            self._environments[task] = env
        self._environments.move_to_end(task)
        if len(self._environments) > _KEPT_ENVIRONMENTS:
            self._environments.popitem(last=False)[1].close()
        return self._environments[task]
