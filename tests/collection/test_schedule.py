from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_embodied.collection.recorder import Episode
from lightning_embodied.collection.schedule import SeedSchedule
from lightning_embodied.errors import EmbodiedError


def _episode(task: str, seed: int, success: bool) -> Episode:
    return Episode(task, seed, task, success, 1, f"{task}{seed}", {"action": np.zeros((1, 2))} if success else {})


def _run(schedule: SeedSchedule, fails: set[tuple[str, int]], workers: int, seed: int) -> list[tuple[str, int]]:
    """Hands attempts to workers that finish in a random order."""
    random, busy, kept = np.random.default_rng(seed), list[tuple[str, int]](), list[tuple[str, int]]()
    while not schedule.finished:
        while len(busy) < workers and (attempt := schedule.next_attempt()):
            busy.append(attempt)
        done = busy.pop(int(random.integers(len(busy))))
        schedule.finish(_episode(*done, success=done not in fails))
        kept += [(episode.task, episode.seed) for episode in schedule.ready()]
    assert not busy
    return kept


@given(
    st.integers(1, 5),
    st.sets(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(10, 36)), max_size=9),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_kept_episodes_do_not_depend_on_workers_and_are_the_first_successes(
    wanted: int, fails: set[tuple[str, int]], workers: int, order: int
) -> None:
    tasks = ["a", "b", "c"]
    kept = _run(SeedSchedule(tasks, wanted, 10), fails, workers, order)
    expected = []
    for number, task in enumerate(tasks):
        good = [seed for seed in range(10 + number, 100, 3) if (task, seed) not in fails][:wanted]
        expected += [(task, seed) for seed in good]
    assert kept == expected
    assert len({seed for _, seed in kept}) == len(kept)  # no scene is shown in two tasks


@given(st.integers(1, 4), st.integers(0, 99))
def test_failures_are_counted_and_no_seed_is_tried_beyond_need(workers: int, order: int) -> None:
    fails = {("a", 0), ("a", 4), ("b", 3)}
    schedule = SeedSchedule(["a", "b"], 3, 0)
    assert _run(schedule, fails, workers, order) == [("a", 2), ("a", 6), ("a", 8), ("b", 1), ("b", 5), ("b", 7)]
    assert schedule.tallies["a"].failed_seeds == [0, 4]
    assert schedule.tallies["b"].failed_seeds == [3]
    assert [tally.kept for tally in schedule.tallies.values()] == [3, 3]


def test_an_expert_that_always_fails_ends_in_an_error_not_in_an_endless_loop() -> None:
    schedule = SeedSchedule(["a"], 2, 0)
    with pytest.raises(EmbodiedError, match="fails too often"):
        _run(schedule, {("a", seed) for seed in range(100)}, 2, 0)
