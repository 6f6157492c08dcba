"""A queue of episodes run through the slots of a vector environment.

A slot that finishes takes the next episode while the others go on, so slots are busy until the queue is empty. What an
episode does depends on nothing outside it, and results are ordered as planned, whatever order they finish in.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_embodied.evaluation.actors import ChunkPolicy, as_tensors, chunk_seed, predict
from lightning_embodied.evaluation.console import OnEpisode
from lightning_embodied.evaluation.plan import EpisodePlan
from lightning_embodied.evaluation.result import Effort, EpisodeResult
from lightning_embodied.evaluation.starts import Start


@dataclass(frozen=True)
class SlotStep:
    """What became of a slot after an action chunk.

    Attributes:
        done: The episode is over, by success or at the horizon.
        success: The environment said so at any step.
        steps: Steps taken since the reset.
    """

    done: bool
    success: bool
    steps: int


class Slots(Protocol):
    """Environments that run episodes side by side; see `VectorSlots`."""

    @property
    def num_slots(self) -> int:
        """How many episodes run at once."""

    def reset(self, plans: Mapping[int, EpisodePlan]) -> dict[int, str]:
        """Starts an episode in each of the given slots and leaves the others alone; returns their instructions."""

    def observe(self, slots: Sequence[int]) -> dict[str, NDArray[Any]]:
        """The latest observations of some slots, `[len(slots), …]` by LeRobot key."""

    def step(self, chunks: Mapping[int, NDArray[Any] | None]) -> dict[int, SlotStep]:
        """Executes an action chunk `[K, A]`, or K steps of the scripted expert (None), in each of the given slots."""

    def frames(self, slot: int) -> list[NDArray[np.uint8]]:
        """The recorded frames of the slot's episode."""


@dataclass
class Rollouts:
    """What a run of episodes leaves behind; filled while it runs, so that an interrupted run keeps what is finished.

    Attributes:
        episodes: Finished episodes in the order they finished.
        frames: Frames of the recorded episodes, by task.
        effort: Cost of each policy that was run.
        training_data: What `check_unseen` found, if it was asked.
    """

    episodes: list[EpisodeResult] = field(default_factory=list)
    frames: dict[str, list[NDArray[np.uint8]]] = field(default_factory=dict)
    effort: dict[str, Effort] = field(default_factory=dict)
    training_data: dict[str, Any] | None = None


@dataclass(frozen=True)
class Inference:
    """How a policy is asked for actions.

    Attributes:
        execute_steps: Steps executed of each action chunk before the policy looks again.
        seed: Seed of the policy's sampling noise.
        batched: Whether observations share a forward pass (see `predict`).
    """

    execute_steps: int
    seed: int
    batched: bool


@dataclass
class _Running:
    plan: EpisodePlan
    instruction: str
    initial_state: str
    chunks: int = 0


def run_episodes(
    name: str,
    policy: ChunkPolicy | None,
    plans: Sequence[EpisodePlan],
    slots: Slots,
    into: Rollouts,
    *,
    inference: Inference,
    on_episode: OnEpisode,
) -> None:
    """Runs episodes to their ends.

    Args:
        name: What the policy is called in the results.
        policy: Who acts; None for the environment's scripted expert.
        plans: The episodes; their order decides who starts first and nothing else.
        slots: Where they run.
        into: Where results go, episode by episode.
        inference: How the policy is asked.
        on_episode: Called with each finished episode.
    """
    queue, running = deque(plans), dict[int, _Running]()
    began, env_steps, inferences = time.perf_counter(), 0, 0
    while queue or running:
        free = [slot for slot in range(slots.num_slots) if slot not in running]
        _start(dict(zip(free, [queue.popleft() for _ in free[: len(queue)]], strict=False)), slots, running)
        active = sorted(running)
        chunks: dict[int, NDArray[Any] | None] = dict.fromkeys(active)
        if policy is not None:
            chunks = dict(zip(active, _infer(policy, slots, running, inference), strict=True))
            inferences += len(active)
        outcome = slots.step({slot: None if c is None else c[: inference.execute_steps] for slot, c in chunks.items()})
        for slot in active:
            running[slot].chunks += 1
            if outcome[slot].done:
                env_steps += outcome[slot].steps
                finished = running.pop(slot)
                into.episodes.append(_episode(name, finished, outcome[slot]))
                if finished.plan.record:
                    into.frames[finished.plan.task] = slots.frames(slot)
                on_episode(into.episodes[-1])
    into.effort[name] = Effort(time.perf_counter() - began, env_steps, inferences)


def survey_starts(plans: Sequence[EpisodePlan], slots: Slots) -> list[Start]:
    """Resets to every planned start without running the episodes, to know the starts before spending time on them."""
    starts: list[Start] = []
    for i in range(0, len(plans), slots.num_slots):
        starts += _reset(dict(enumerate(plans[i : i + slots.num_slots])), slots)
    return starts


def _reset(plans: Mapping[int, EpisodePlan], slots: Slots) -> list[Start]:
    instructions = slots.reset(plans)
    observations = slots.observe(list(plans))
    firsts = [{key: array[i] for key, array in observations.items()} for i in range(len(plans))]
    return [
        Start.of(plan.task, plan.seed, instructions[slot], first)
        for (slot, plan), first in zip(plans.items(), firsts, strict=True)
    ]


def _start(plans: Mapping[int, EpisodePlan], slots: Slots, running: dict[int, _Running]) -> None:
    if plans:
        for (slot, plan), start in zip(plans.items(), _reset(plans, slots), strict=True):
            running[slot] = _Running(plan, start.instruction, start.digest)


def _infer(policy: ChunkPolicy, slots: Slots, running: Mapping[int, _Running], inference: Inference) -> NDArray[Any]:
    active = sorted(running)
    instructions = [running[slot].instruction for slot in active]
    observations = as_tensors(slots.observe(active), instructions)
    plans = [(running[slot].plan, running[slot].chunks) for slot in active]
    seeds = [chunk_seed(inference.seed, plan.task, plan.seed, chunk) for plan, chunk in plans]
    return predict(policy, observations, seeds, batched=inference.batched)


def _episode(name: str, running: _Running, step: SlotStep) -> EpisodeResult:
    plan = running.plan
    return EpisodeResult(
        policy=name,
        task=plan.task,
        seed=plan.seed,
        success=step.success,
        steps=step.steps,
        instruction=running.instruction,
        initial_state=running.initial_state,
    )
