"""A gymnasium vector environment whose worker processes host several environments each, reset slot by slot.

gymnasium's AsyncVectorEnv takes a process for each environment. Twenty slots of three Meta-World tasks then need 7.3 GB
and 39 CPU-seconds to start; two processes that share imports and graphics contexts need 1.4 GB and 7.
Episodes never restart by themselves (autoreset disabled): a slot whose episode is over idles until it is reset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from numpy.typing import NDArray

from lightning_embodied.envs.action_chunk import ActionChunkWrapper
from lightning_embodied.envs.embodied_env import Action, Observation
from lightning_embodied.envs.processes import WorkerProcess, default_workers
from lightning_embodied.errors import ConfigError

_T = TypeVar("_T")
EnvFactory = Callable[[], gymnasium.Env[Any, Any]]
Transition = tuple[Observation, float, bool, bool, dict[str, Any]]
BatchTransition = tuple[Observation, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


class EnvGroup:
    """Some slots of a vector environment, in the process that steps them.

    Args:
        factories: One for each slot.
    """

    def __init__(self, factories: Sequence[EnvFactory]) -> None:
        self.envs = [factory() for factory in factories]

    def describe(self) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any], dict[str, Any]]:
        """Observation space, action space and metadata of the first environment.

        Raises:
            ConfigError: The environments differ in a space.
        """
        first = self.envs[0]
        for env in self.envs[1:]:
            if (env.observation_space, env.action_space) != (first.observation_space, first.action_space):
                raise ConfigError("environments of one vector environment must have the same spaces", found=env)
        return first.observation_space, first.action_space, dict(first.metadata)

    def reset(
        self, slots: dict[int, tuple[int | None, dict[str, Any]]]
    ) -> dict[int, tuple[Observation, dict[str, Any]]]:
        """Resets slots, each with its own seed and options."""
        return {slot: self.envs[slot].reset(seed=seed, options=options) for slot, (seed, options) in slots.items()}

    def step(self, actions: dict[int, Action]) -> dict[int, Transition]:
        """Steps slots."""
        return {slot: _transition(self.envs[slot].step(action)) for slot, action in actions.items()}

    def call(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
        """Calls a method of each environment, or reads an attribute."""
        values = [env.get_wrapper_attr(name) for env in self.envs]
        return [value(*arguments, **keywords) if callable(value) else value for value in values]

    def close(self) -> None:
        """Closes the environments."""
        for env in self.envs:
            env.close()


class SlotVectorEnv(VectorEnv[Observation, Action, NDArray[Any]]):
    """Environments side by side.

    `reset(seed, options)`: `options["reset_mask"]` (bool `[num_envs]`) resets some slots only; `options["slots"]` is a
    list with a dict (or None) of options for each slot, such as `{"task": ..., "record": True}`; all other options go
    to every slot. `seed` is one integer (slot i gets `seed + i`), or a list. `step` leaves slots whose episode is over
    as they are: the same observation and flags, reward zero, no info.

    Args:
        factories: Makes each slot's environment. With workers, importable functions or `functools.partial` of them.
        num_workers: Processes the slots are spread over in contiguous blocks; 0 steps them in this process.

    Raises:
        ConfigError: No slots, or environments with different spaces.
        Exception: What a factory raises, also in a worker.
    """

    def __init__(self, factories: Sequence[EnvFactory], num_workers: int = 0) -> None:
        if not factories:
            raise ConfigError("a vector environment needs at least one slot", found=0)
        self.num_envs = len(factories)
        blocks = [
            block.tolist() for block in np.array_split(np.arange(self.num_envs), max(1, num_workers)) if len(block)
        ]
        self._blocks: list[list[int]] = blocks
        groups = [[factories[slot] for slot in block] for block in blocks]
        self._local = EnvGroup(groups[0]) if num_workers == 0 else None
        self._workers = [WorkerProcess(EnvGroup, group) for group in groups] if num_workers else []
        try:
            described = self._request("describe", dict.fromkeys(range(len(blocks)), ()))
        except BaseException:
            self.close()
            raise
        self.single_observation_space, self.single_action_space, metadata = described[0]
        if any(other[:2] != described[0][:2] for other in described.values()):
            self.close()
            raise ConfigError("environments of one vector environment must have the same spaces")
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**metadata, "autoreset_mode": AutoresetMode.DISABLED}
        nothing: Any = create_empty_array(self.single_observation_space, n=1)
        self._observations: list[Any] = [{key: value[0] for key, value in nothing.items()}] * self.num_envs
        self._terminated, self._truncated = np.ones(self.num_envs, dtype=bool), np.zeros(self.num_envs, dtype=bool)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Resets all slots, or those of `options["reset_mask"]`; see the class.

        Raises:
            ConfigError: A mask, seed list or slot list of another length.
        """
        common = dict(options or {})
        mask = np.asarray(common.pop("reset_mask", np.ones(self.num_envs, dtype=bool)))
        each: list[dict[str, Any] | None] = list(common.pop("slots", None) or [None] * self.num_envs)
        seeds = (
            [None if seed is None else seed + i for i in range(self.num_envs)] if not isinstance(seed, list) else seed
        )
        for where, length in (("reset_mask", mask.size), ("slots", len(each)), ("seed", len(seeds))):
            if length != self.num_envs:
                raise ConfigError(
                    "one value for each slot is needed", where=where, found=length, expected=self.num_envs
                )
        chosen = {int(slot): (seeds[slot], {**common, **(each[slot] or {})}) for slot in np.flatnonzero(mask)}
        infos: dict[str, Any] = {}
        for slot, (observation, info) in self._spread("reset", chosen).items():
            self._observations[slot] = observation
            infos = self._add_info(infos, info, slot)
        self._terminated[mask.astype(bool)] = False
        self._truncated[mask.astype(bool)] = False
        return self._batch(), infos

    def step(self, actions: Action) -> BatchTransition:
        """Steps every slot whose episode is running.

        Args:
            actions: `[num_envs, ...]`; the rows of idle slots are ignored.
        """
        running = np.flatnonzero(~(self._terminated | self._truncated))
        rewards, infos = np.zeros(self.num_envs), dict[str, Any]()
        for slot, transition in self._spread("step", {int(slot): actions[slot] for slot in running}).items():
            self._observations[slot], rewards[slot], self._terminated[slot], self._truncated[slot], info = transition
            infos = self._add_info(infos, info, slot)
        return self._batch(), rewards, self._terminated.copy(), self._truncated.copy(), infos

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:  # noqa: ANN401  as gymnasium's own
        """Calls a method of every environment, or reads an attribute; one value a slot."""
        answers = self._request("call", dict.fromkeys(range(len(self._blocks)), (name, args, kwargs)))
        return tuple(value for index in sorted(answers) for value in answers[index])

    def close_extras(self, **kwargs: Any) -> None:  # noqa: ANN401  as gymnasium's own
        """Closes the environments and ends the workers."""
        if self._local is not None:
            self._local.close()
        for worker in self._workers:
            worker.close()

    def _spread(self, method: str, values: dict[int, _T]) -> dict[int, Any]:
        """Sends each slot's value to the process that hosts it; answers by slot, in order of slots."""
        requests: dict[int, tuple[dict[int, _T]]] = {}
        for index, block in enumerate(self._blocks):
            mine = {position: values[slot] for position, slot in enumerate(block) if slot in values}
            if mine:
                requests[index] = (mine,)
        answers = self._request(method, requests)
        return {
            self._blocks[index][position]: answer
            for index in sorted(answers)
            for position, answer in answers[index].items()
        }

    def _request(self, method: str, requests: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        if self._local is not None:
            return {index: getattr(self._local, method)(*arguments) for index, arguments in requests.items()}
        for index, arguments in requests.items():
            self._workers[index].send(method, *arguments)
        return {index: self._workers[index].receive() for index in requests}

    def _batch(self) -> Observation:
        out: Any = create_empty_array(self.single_observation_space, n=self.num_envs)
        batch: Any = concatenate(self.single_observation_space, self._observations, out)
        return dict(batch)


def make_vector_env(
    env_id: str,
    num_envs: int,
    env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    asynchronous: bool = True,
    num_workers: int | None = None,
    chunk_steps: int | None = None,
    frame_stride: int = 2,
) -> SlotVectorEnv:
    """Makes environments side by side; see `SlotVectorEnv` for how to reset and step them.

    Args:
        env_id: Gymnasium id, such as `lightning_embodied/MetaWorld-v0`, or `module:id`.
        num_envs: Number of slots.
        env_kwargs: Options of the environment, the same for all slots or one mapping for each.
        asynchronous: Whether worker processes step the slots.
        num_workers: How many; None for one a usable core.
        chunk_steps: Actions in a chunk (see `ActionChunkWrapper`); None steps single actions.
        frame_stride: Steps between recorded frames, with chunks.

    Raises:
        ConfigError: An unknown environment or option.
    """
    each = [env_kwargs or {}] * num_envs if env_kwargs is None or isinstance(env_kwargs, Mapping) else list(env_kwargs)
    if len(each) != num_envs:
        raise ConfigError("one mapping for each slot is needed", where="env_kwargs", found=len(each), expected=num_envs)
    factories = [partial(_make, env_id, dict(kwargs), chunk_steps, frame_stride) for kwargs in each]
    return SlotVectorEnv(factories, (num_workers or default_workers(num_envs)) if asynchronous else 0)


def _make(
    env_id: str, env_kwargs: dict[str, Any], chunk_steps: int | None, frame_stride: int
) -> gymnasium.Env[Any, Any]:
    env = make_env(env_id, env_kwargs)
    return env if chunk_steps is None else ActionChunkWrapper(env, chunk_steps, frame_stride=frame_stride)


def make_env(env_id: str, env_kwargs: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """`gymnasium.make` with this project's errors.

    Args:
        env_id: Gymnasium id.
        env_kwargs: Options of the environment.

    Raises:
        ConfigError: An unknown environment or option.
    """
    if "max_episode_steps" in env_kwargs:  # gymnasium would take it for a wrapper that action chunks step past
        raise ConfigError("gymnasium keeps this option to itself", where="max_episode_steps", mend="use episode_length")
    try:
        return gymnasium.make(env_id, **env_kwargs)
    except gymnasium.error.Error as error:
        known = sorted(name for name in gymnasium.registry if name.startswith("lightning_embodied/"))
        raise ConfigError("there is no such environment", where="env_id", found=env_id, expected=known) from error
    except TypeError as error:
        raise ConfigError("the environment refuses its options", where=env_id, found=error) from error


def _transition(step: tuple[Any, Any, Any, Any, Any]) -> Transition:
    observation, reward, terminated, truncated, info = step
    return observation, float(reward), bool(terminated), bool(truncated), info
