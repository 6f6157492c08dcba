"""What every robot environment here offers beyond gymnasium: an instruction, LeRobot features, an expert.

Stepping and looking are apart (`advance`, `observe`), because rendering costs ten times a physics step: a wrapper that
executes an action chunk looks once.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import gymnasium
import numpy as np
from gymnasium.core import RenderFrame
from numpy.typing import NDArray

from lightning_embodied.errors import ConfigError
from lightning_embodied.features import Feature

Observation = dict[str, NDArray[Any]]
Action = NDArray[np.float32]


class Expert(Protocol):
    """A scripted controller of one environment; it reads the simulator's state."""

    def act(self) -> Action:
        """The action `[A]`, float32, for the state the environment is in now."""


class EmbodiedEnv(gymnasium.Env[Observation, Action], ABC):
    """A gymnasium environment with LeRobot's observation keys.

    Subclasses set `observation_space` and `action_space` and implement the abstract methods. `reset(seed=n)` starts
    an episode that is a pure function of the task and `n`; without a seed, `n` is drawn.

    Args:
        episode_length: Steps after which an episode is truncated.
        terminate_on_success: Whether an episode ends at its first successful step.
        render_mode: `rgb_array` or None; how gymnasium's `render()` answers. Observations do not depend on it.

    Raises:
        ConfigError: An option that cannot work.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012
    fps: ClassVar[int]
    robot_type: ClassVar[str]
    task_names: ClassVar[tuple[str, ...]]

    def __init__(self, *, episode_length: int, terminate_on_success: bool, render_mode: str | None) -> None:
        if episode_length < 1:
            raise ConfigError("an episode needs steps", where="episode_length", found=episode_length)
        if render_mode not in (None, "rgb_array"):
            raise ConfigError("no such render mode", where="render_mode", found=render_mode, expected="rgb_array")
        self.episode_length = episode_length
        self.terminate_on_success = terminate_on_success
        self.render_mode = render_mode
        self.elapsed_steps = 0
        self.success = False

    @property
    @abstractmethod
    def task(self) -> str:
        """Name of the task the environment is set to."""

    @property
    @abstractmethod
    def instruction(self) -> str:
        """The task in plain English."""

    @property
    @abstractmethod
    def features(self) -> dict[str, Feature]:
        """What a recorded frame holds: the observation's entries and `action`."""

    @abstractmethod
    def expert(self) -> Expert:
        """A scripted controller for the episode that is running; ask again after each reset."""

    @abstractmethod
    def observe(self) -> Observation:
        """Renders and returns the observation of the present state."""

    @abstractmethod
    def picture(self) -> NDArray[np.uint8]:
        """A picture `[H, W, 3]` for people, larger than the policy's."""

    @abstractmethod
    def _start(self, seed: int, options: dict[str, Any]) -> None:
        """Puts the simulator into the initial state that belongs to `seed`."""

    @abstractmethod
    def _apply(self, action: Action) -> tuple[float, bool]:
        """Executes one action; returns the reward and whether the task is now done."""

    @abstractmethod
    def _state_bytes(self) -> bytes:
        """The simulator's state, for the hash of the initial state."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: Which initial state; None draws one.
            options: What the environment understands (see its class), such as `task`.

        Returns:
            The observation, and an info with `task`, `instruction`, `seed`, `success` and `initial_state_hash`.
        """
        super().reset(seed=seed)
        episode_seed = int(self.np_random.integers(2**31)) if seed is None else seed
        self._start(episode_seed, dict(options or {}))
        self.elapsed_steps, self.success = 0, False
        info = {
            "task": self.task,
            "instruction": self.instruction,
            "seed": episode_seed,
            "success": False,
            "initial_state_hash": hashlib.blake2b(self._state_bytes(), digest_size=8).hexdigest(),
        }
        return self.observe(), info

    def advance(self, action: Action) -> tuple[float, bool, bool, dict[str, Any]]:
        """Executes one action without rendering.

        Args:
            action: `[A]`, in the bounds of `action_space` (values outside are clipped).

        Returns:
            Reward, terminated, truncated, and an info with `success`.
        """
        clipped = np.clip(np.asarray(action, dtype=np.float32), self._low, self._high)
        reward, success = self._apply(clipped)
        self.elapsed_steps += 1
        self.success = success
        terminated = success and self.terminate_on_success
        truncated = not terminated and self.elapsed_steps >= self.episode_length
        return reward, terminated, truncated, {"success": success}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Executes one action and observes."""
        reward, terminated, truncated, info = self.advance(action)
        return self.observe(), reward, terminated, truncated, info

    def render(self) -> RenderFrame | list[RenderFrame] | None:
        """The picture for people if `render_mode` is `rgb_array`, else None."""
        return self.picture() if self.render_mode == "rgb_array" else None

    @property
    def _low(self) -> Action:
        space = self.action_space
        assert isinstance(space, gymnasium.spaces.Box)  # noqa: S101  for the type checker
        return space.low

    @property
    def _high(self) -> Action:
        space = self.action_space
        assert isinstance(space, gymnasium.spaces.Box)  # noqa: S101  for the type checker
        return space.high


def image_feature(size: int) -> Feature:
    """The feature of a square RGB camera picture."""
    return Feature("video", (size, size, 3), ["height", "width", "channels"])


def observation_space(features: dict[str, Feature]) -> gymnasium.Space[Observation]:
    """The gymnasium space of the observation entries of `features`."""
    spaces: dict[str, gymnasium.Space[Any]] = {}
    for key, feature in features.items():
        if feature.is_visual:
            spaces[key] = gymnasium.spaces.Box(0, 255, feature.shape, dtype=np.uint8)
        elif key.startswith("observation."):
            spaces[key] = gymnasium.spaces.Box(-np.inf, np.inf, feature.shape, dtype=np.float32)
    space: gymnasium.Space[Any] = gymnasium.spaces.Dict(spaces)
    return space
