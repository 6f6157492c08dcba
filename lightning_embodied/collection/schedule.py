"""Which seed of which task is tried next, and which results are kept, whatever the number of workers.

Of `n` tasks the first tries seeds 0, n, 2n …, the second 1, n + 1, 2n + 1 …: no seed, and so no scene of an environment
whose tasks share their scenes, is shown twice. A task tries as many as episodes are wanted plus one for each that
failed; so the kept episodes are the successful ones among its first seeds, handed on in order of task and seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_embodied.collection.recorder import Episode
from lightning_embodied.errors import EmbodiedError


@dataclass
class TaskTally:
    """How one task's attempts went.

    Attributes:
        kept: Successful episodes handed on.
        failed_seeds: Seeds the expert failed on.
    """

    kept: int = 0
    failed_seeds: list[int] = field(default_factory=list)


class SeedSchedule:
    """Hands out attempts and takes their results, in any order.

    Args:
        tasks: Names of the tasks.
        episodes_per_task: Successful episodes wanted of each.
        first_seed: The first seed tried, of the first task.
    """

    def __init__(self, tasks: Sequence[str], episodes_per_task: int, first_seed: int) -> None:
        self.tallies = {task: TaskTally() for task in tasks}
        self._wanted = episodes_per_task
        self._stride = len(tasks)
        self._next_seed = {task: first_seed + number for number, task in enumerate(tasks)}
        self._todo: deque[str] = deque(task for task in tasks for _ in range(episodes_per_task))
        self._results: dict[tuple[str, int], Episode] = {}
        self._unfinished: deque[str] = deque(tasks)
        self._turn = dict(self._next_seed)

    @property
    def finished(self) -> bool:
        """Whether everything wanted was handed on."""
        return not self._unfinished

    def next_attempt(self) -> tuple[str, int] | None:
        """A task and a seed to try now; None when the rest is under way."""
        if not self._todo:
            return None
        task = self._todo.popleft()
        seed = self._next_seed[task]
        self._next_seed[task] += self._stride
        return task, seed

    def finish(self, episode: Episode) -> None:
        """Takes a result.

        Raises:
            EmbodiedError: The expert fails too often for the wanted number of episodes.
        """
        self._results[episode.task, episode.seed] = episode
        if not episode.success:
            tally = self.tallies[episode.task]
            tally.failed_seeds = sorted([*tally.failed_seeds, episode.seed])
            if len(tally.failed_seeds) > max(10, self._wanted):
                raise EmbodiedError(
                    "the scripted expert fails too often",
                    where=episode.task,
                    found=f"{len(tally.failed_seeds)} failures, {tally.kept} kept episodes",
                    mend="use less action_noise, longer episodes (episode_length), or another task",
                )
            self._todo.appendleft(episode.task)

    def ready(self) -> list[Episode]:
        """Successful episodes whose turn has come."""
        episodes = []
        while self._unfinished:
            task = self._unfinished[0]
            episode = self._results.pop((task, self._turn[task]), None)
            if episode is None:
                break
            self._turn[task] += self._stride
            if episode.success:
                self.tallies[task].kept += 1
                episodes.append(episode)
            if self.tallies[task].kept == self._wanted:
                self._unfinished.popleft()
        return episodes
