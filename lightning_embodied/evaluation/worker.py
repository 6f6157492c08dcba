"""What runs in a slot: an environment per task, stepped by action chunks or by its scripted expert.

A worker adds to the environment what a comparison needs: the expert in the policy's place, another goal's instruction,
a horizon, and pictures of the episode. It looks at the world at chunk boundaries only.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import gymnasium
import numpy as np
from numpy.typing import NDArray

import lightning_embodied.envs  # noqa: F401  registers our environments
from lightning_embodied.errors import ConfigError

_KEPT_ENVIRONMENTS = 4


def make_environment(env_id: str, task: str, env_kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    """Makes one environment.

    Raises:
        ConfigError: The environment is not registered, or refuses its options.
    """
    try:
        return gymnasium.make(env_id, task=task, **env_kwargs)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ConfigError("there is no such environment", where="env_id", found=env_id, expected=error) from error
    except TypeError as error:
        raise ConfigError("the environment refuses its options", where=env_id, found=error) from error


def takes_option(env_id: str, name: str) -> bool:
    """Whether an environment's constructor has an option; false for an unknown environment."""
    try:
        entry = gymnasium.spec(env_id).entry_point
    except (gymnasium.error.Error, ModuleNotFoundError):
        return False
    creator = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    return creator is not None and name in inspect.signature(creator).parameters


@runtime_checkable
class LooksApart(Protocol):
    """An environment that can step without rendering, as `lightning_embodied.envs.EmbodiedEnv` can."""

    def advance(self, action: NDArray[Any]) -> tuple[float, bool, bool, dict[str, Any]]:
        """Steps: reward, terminated, truncated, info."""

    def observe(self) -> dict[str, Any]:
        """Renders the observation."""

    def picture(self) -> NDArray[np.uint8]:
        """A picture `[H, W, 3]` for people."""


class EpisodeWorker(gymnasium.Env[dict[str, Any], NDArray[Any]]):
    """One slot.

    Args:
        env_id: Gymnasium id.
        tasks: Task names; the first one's spaces are those of all.
        env_kwargs: Options of the environment besides `task`.
        execute_steps: Actions in a chunk.
        horizon: Steps after which an episode has failed; None for the environment's own limit.
    """

    def __init__(
        self,
        *,
        env_id: str,
        tasks: Sequence[str],
        env_kwargs: dict[str, Any],
        execute_steps: int,
        horizon: int | None,
    ) -> None:
        self._env_id, self._env_kwargs, self._horizon = env_id, env_kwargs, horizon
        self._environments: OrderedDict[str, gymnasium.Env[Any, Any]] = OrderedDict()
        self._env = self._environment(tasks[0])
        self.observation_space = self._env.observation_space
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Box):
            raise ConfigError("only continuous actions are supported", where=env_id, found=space)
        low, high = (np.broadcast_to(bound, (execute_steps, *space.shape)) for bound in (space.low, space.high))
        self.action_space = gymnasium.spaces.Box(low, high, dtype=np.float32)
        self._bounds = (space.low, space.high)
        self.features = getattr(self._env.unwrapped, "features", None)
        self.fps = getattr(self._env.unwrapped, "fps", None)
        self._plan: Any = None
        self._expert: Any = None
        self._observation: dict[str, Any] = {}
        self._done, self._success, self._steps = True, False, 0
        self._frames: list[NDArray[np.uint8]] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Starts the episode that `options["plan"]` describes."""
        self._plan = (options or {})["plan"]
        self._env = self._environment(self._plan.task)
        self._observation, _ = self._env.reset(seed=self._plan.seed)
        unwrapped = self._unwrapped
        self._expert = unwrapped.expert() if self._plan.expert else None
        self._done, self._success, self._steps, self._frames = False, False, 0, []
        self._record()
        instruction = unwrapped.instruction
        if self._plan.swapped:
            instruction = getattr(unwrapped, "other_instruction", None)
        if instruction is None:
            raise ConfigError("the environment has no other goal to swap in", where=self._env_id, found="swapped")
        return self._observation, {"instruction": instruction}

    def step(self, action: NDArray[Any]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Executes a chunk `[K, A]` (which the expert ignores) until the episode ends."""
        for row in action:
            if self._advance(np.clip(row, *self._bounds) if self._expert is None else self._expert.act()):
                break
        if self._looks_apart:
            self._observation = self._unwrapped.observe()
        self._record()
        return self._observation, 0.0, self._done, False, {"success": self._success, "steps": self._steps}

    def recorded_frames(self) -> list[NDArray[np.uint8]]:
        """Pictures `[H, W, 3]` at the chunk boundaries of the episode, if its plan asked for them."""
        return self._frames

    def close(self) -> None:
        """Closes all environments."""
        while self._environments:
            self._environments.popitem()[1].close()

    def _environment(self, task: str) -> gymnasium.Env[Any, Any]:
        if task not in self._environments:
            self._environments[task] = make_environment(self._env_id, task, self._env_kwargs)
        self._environments.move_to_end(task)
        if len(self._environments) > _KEPT_ENVIRONMENTS:
            self._environments.popitem(last=False)[1].close()
        return self._environments[task]

    def _advance(self, action: NDArray[Any]) -> bool:
        if self._looks_apart:
            _, terminated, truncated, info = self._unwrapped.advance(action)
        else:
            self._observation, _, terminated, truncated, info = self._env.step(action)
        self._steps += 1
        self._success |= bool(info.get("success", False))
        late = self._horizon is not None and self._steps >= self._horizon
        self._done = bool(self._success or terminated or truncated or late)
        return self._done

    @property
    def _unwrapped(self) -> Any:  # noqa: ANN401  what gymnasium calls any environment
        return self._env.unwrapped

    @property
    def _looks_apart(self) -> bool:
        # Rendering costs far more than a physics step: an environment that can step without looking looks once a chunk.
        return isinstance(self._env.unwrapped, LooksApart)

    def _record(self) -> None:
        if self._plan.record and self._looks_apart:
            self._frames.append(self._unwrapped.picture())
        elif self._plan.record:
            camera = next((key for key in sorted(self._observation) if key.startswith("observation.images.")), None)
            if camera is not None:
                self._frames.append(np.array(self._observation[camera]))
