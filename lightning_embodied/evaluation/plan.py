"""What travels to a worker process: the plan of an episode. Without torch, so that workers start fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EpisodePlan:
    """An episode to run.

    Attributes:
        task: Task name of the environment.
        seed: Seed of its reset, which together with the task decides the initial state.
        expert: Whether the environment's scripted expert acts instead of a policy.
        swapped: Whether the policy is told another goal than the environment's.
        record: Whether to keep its frames for a video.
    """

    task: str
    seed: int
    expert: bool = False
    swapped: bool = False
    record: bool = False
