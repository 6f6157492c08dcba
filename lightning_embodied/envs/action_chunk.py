"""Executes a chunk of actions as one step and looks once at its end.

A chunked policy (ACT, pi0, pi0.5) answers with H actions and sees nothing in between; stepping them inside the worker
saves the rendering and the messages of K - 1 steps. Source of the idea: Zhao et al., 2023, arXiv:2304.13705.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from lightning_embodied.envs.embodied_env import Action, EmbodiedEnv, Observation
from lightning_embodied.errors import ConfigError


class ActionChunkWrapper(gymnasium.Wrapper[Observation, Action, Observation, Action]):
    """Takes actions `[K, A]` and executes them until the episode ends.

    `info` of a step is the last action's, and besides `steps` (how many were executed), `success` (whether one of them
    was successful) and, for an episode that was reset with `options={"record": True}`, `frames`: pictures uint8
    `[F, H, W, 3]` of the way. The first chunk's frames begin with the initial state.

    Args:
        env: An environment whose innermost one is an `EmbodiedEnv`.
        chunk_steps: Actions in a chunk, K.
        frame_stride: Steps between recorded frames.

    Raises:
        ConfigError: The environment cannot step without rendering, or a number below one.
    """

    def __init__(self, env: gymnasium.Env[Observation, Action], chunk_steps: int = 8, *, frame_stride: int = 2) -> None:
        super().__init__(env)
        inner = env.unwrapped
        if not isinstance(inner, EmbodiedEnv):
            raise ConfigError("the environment cannot step without rendering", found=inner, expected="an EmbodiedEnv")
        if chunk_steps < 1 or frame_stride < 1:
            raise ConfigError(
                "must be at least 1", where="chunk_steps, frame_stride", found=(chunk_steps, frame_stride)
            )
        self._inner, self.chunk_steps, self.frame_stride = inner, chunk_steps, frame_stride
        space = env.action_space
        assert isinstance(space, gymnasium.spaces.Box)  # noqa: S101  every EmbodiedEnv's is
        low, high = (np.broadcast_to(bound, (chunk_steps, *space.shape)) for bound in (space.low, space.high))
        self.action_space = gymnasium.spaces.Box(low, high, dtype=np.float32)
        self._recording = False
        self._frames: list[NDArray[np.uint8]] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode; `options["record"]` asks for frames, the other options are the environment's."""
        rest = dict(options or {})
        self._recording = bool(rest.pop("record", False))
        observation, info = self.env.reset(seed=seed, options=rest)
        self._frames = [self._inner.picture()] if self._recording else []
        return observation, info

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Executes the chunk `[K, A]`; the reward is the sum."""
        total, success, steps = 0.0, False, 0
        terminated = truncated = False
        info: dict[str, Any] = {}
        for one in action:
            reward, terminated, truncated, info = self._inner.advance(one)
            total, success, steps = total + reward, success or info["success"], steps + 1
            over = terminated or truncated
            if self._recording and (over or self._inner.elapsed_steps % self.frame_stride == 0):
                self._frames.append(self._inner.picture())
            if over:
                break
        info = {**info, "success": success, "steps": steps}
        if self._recording:
            info["frames"] = np.stack(self._frames) if self._frames else np.empty((0, 0, 0, 3), dtype=np.uint8)
            self._frames = []
        return self._inner.observe(), total, terminated, truncated, info
