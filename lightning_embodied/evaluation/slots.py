"""Slots of a gymnasium vector environment that run planned episodes, each slot any task.

The vector environment never resets by itself (autoreset disabled); finished slots are reset by mask. Action chunks and
the scripted expert are stepped inside the worker, so a step of the vector environment costs one message a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_embodied.errors import ConfigError, import_extra
from lightning_embodied.evaluation.plan import EpisodePlan
from lightning_embodied.evaluation.rollout import SlotStep
from lightning_embodied.features import Feature


class VectorSlots:
    """Runs episodes side by side; see `Slots` for what its methods mean.

    Args:
        env_id: Gymnasium id.
        tasks: Task names that episodes may have.
        env_kwargs: Options of the environment besides `task`.
        num_slots: Episodes at once.
        asynchronous: Step the slots in worker processes, one a usable core, else in this process.
        execute_steps: Steps of a chunk.
        horizon: Steps after which an episode has failed; None for the environment's own limit.

    Raises:
        ConfigError: An unknown environment, task or camera.
        MissingExtraError: gymnasium or the simulator is not installed.
    """

    def __init__(
        self,
        env_id: str,
        tasks: Sequence[str],
        env_kwargs: Mapping[str, Any],
        *,
        num_slots: int,
        asynchronous: bool,
        execute_steps: int,
        horizon: int | None,
    ) -> None:
        import_extra("gymnasium", "sim")
        from lightning_embodied.envs import SlotVectorEnv, default_workers
        from lightning_embodied.evaluation.worker import EpisodeWorker

        self.num_slots = num_slots
        self.execute_steps = execute_steps
        factory = partial(
            EpisodeWorker,
            env_id=env_id,
            tasks=list(tasks),
            env_kwargs=dict(env_kwargs),
            execute_steps=execute_steps,
            horizon=horizon,
        )
        self._envs = SlotVectorEnv([factory] * num_slots, default_workers(num_slots) if asynchronous else 0)
        self._observations: dict[str, NDArray[Any]] = {}

    def reset(self, plans: Mapping[int, EpisodePlan]) -> dict[int, str]:
        """Starts episodes in some slots."""
        mask = np.zeros(self.num_slots, dtype=bool)
        mask[list(plans)] = True
        options = [{"plan": plans[slot]} if slot in plans else None for slot in range(self.num_slots)]
        self._observations, infos = self._envs.reset(options={"reset_mask": mask, "slots": options})
        return {slot: str(infos["instruction"][slot]) for slot in plans}

    def observe(self, slots: Sequence[int]) -> dict[str, NDArray[Any]]:
        """The latest observations of some slots."""
        return {key: array[list(slots)] for key, array in self._observations.items()}

    def step(self, chunks: Mapping[int, NDArray[Any] | None]) -> dict[int, SlotStep]:
        """Executes a chunk in some slots."""
        space = self._envs.single_action_space
        actions = np.zeros((self.num_slots, *(space.shape or ())), dtype=np.float32)
        for slot, chunk in chunks.items():
            if chunk is not None:
                actions[slot] = chunk
        self._observations, _, done, _, infos = self._envs.step(actions)
        success, steps = infos["success"], infos["steps"]
        return {slot: SlotStep(bool(done[slot]), bool(success[slot]), int(steps[slot])) for slot in chunks}

    def frames(self, slot: int) -> list[NDArray[np.uint8]]:
        """Recorded frames of a slot's episode."""
        recorded: list[NDArray[np.uint8]] = self._envs.call("recorded_frames")[slot]
        return recorded

    def describe(self) -> tuple[dict[str, Feature], float]:
        """Features and frames per second of the environment.

        Raises:
            ConfigError: The environment does not say them.
        """
        features, fps = self._envs.call("features")[0], self._envs.call("fps")[0]
        if not features or not fps:
            raise ConfigError("the environment does not say its features and fps", found=(features, fps))
        return dict(features), float(fps)

    def close(self) -> None:
        """Closes the environments and ends the worker processes."""
        self._envs.close()
