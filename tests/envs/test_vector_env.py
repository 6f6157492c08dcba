from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from lightning_embodied.envs import (
    ActionChunkWrapper,
    SlotVectorEnv,
    TabletopEnv,
    WorkerProcess,
    make_vector_env,
)
from lightning_embodied.errors import ConfigError, EmbodiedError

TABLETOP = "lightning_embodied/Tabletop-v0"
METAWORLD = "lightning_embodied/MetaWorld-v0"
SHORT = {"episode_length": 12}


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def envs(request: pytest.FixtureRequest) -> Iterator[SlotVectorEnv]:
    vector = make_vector_env(TABLETOP, 5, SHORT, asynchronous=request.param, num_workers=2, chunk_steps=4)
    yield vector
    vector.close()


def _actions(vector: SlotVectorEnv, value: float) -> np.ndarray:
    return np.full(vector.action_space.shape, value, dtype=np.float32)


def _assert_equal(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key], err_msg=key)


def test_slots_have_their_own_seed_and_options(envs: SlotVectorEnv) -> None:
    tasks = ["red-block-blue-pad", "green-block-white-pad"]
    slots: list[dict[str, Any] | None] = [{"task": tasks[i % 2]} for i in range(5)]
    observations, infos = envs.reset(seed=[7, 7, 8, 9, 10], options={"slots": slots})
    assert envs.observation_space.contains(observations)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    assert list(infos["task"]) == [tasks[i % 2] for i in range(5)]
    pictures = observations["observation.images.top"]
    np.testing.assert_array_equal(pictures[0], pictures[1])
    assert (pictures[0] != pictures[2]).any()
    assert list(infos["seed"]) == [7, 7, 8, 9, 10]


def test_a_partial_reset_touches_the_masked_slots_only(envs: SlotVectorEnv) -> None:
    envs.reset(seed=0)
    before, *_ = envs.step(_actions(envs, 1.0))
    mask = np.array([False, True, False, True, False])
    after, infos = envs.reset(seed=[None, 1, None, 44, None], options={"reset_mask": mask})
    np.testing.assert_array_equal(infos["_task"], mask)
    for key, value in after.items():
        np.testing.assert_array_equal(value[~mask], before[key][~mask])
    fresh, _ = TabletopEnv(**SHORT).reset(seed=44)
    for key, value in fresh.items():
        np.testing.assert_array_equal(value, after[key][3])


def test_a_slot_whose_episode_is_over_idles_until_it_is_reset(envs: SlotVectorEnv) -> None:
    envs.reset(seed=0)
    envs.step(_actions(envs, 0.1))
    envs.reset(seed=1, options={"reset_mask": np.array([False, True, True, True, True])})
    envs.step(_actions(envs, 0.1))
    ended, _, _, truncated, _ = envs.step(_actions(envs, 0.1))
    assert list(truncated) == [True, False, False, False, False]
    idle, rewards, _, still, infos = envs.step(_actions(envs, 0.1))
    assert rewards[0] == 0
    assert list(still) == [True] * 5
    assert list(infos["_steps"]) == [False, True, True, True, True]
    for key, value in idle.items():
        np.testing.assert_array_equal(value[0], ended[key][0])
    envs.reset(seed=5, options={"reset_mask": np.array([True, False, False, False, False])})
    _, _, _, truncated, infos = envs.step(_actions(envs, 0.1))
    assert list(truncated) == [False, True, True, True, True]
    assert list(infos["_steps"]) == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        pytest.param(TABLETOP, {}, id="tabletop"),
        pytest.param(
            METAWORLD,
            [{"task": task, "image_size": 16} for task in ("reach-v3", "drawer-open-v3", "reach-v3")],
            id="metaworld",
            marks=pytest.mark.sim,
        ),
    ],
)
def test_worker_processes_change_nothing_but_the_speed(env_id: str, kwargs: Any) -> None:
    vectors = [
        make_vector_env(env_id, 3, kwargs, asynchronous=asynchronous, num_workers=2, chunk_steps=5)
        for asynchronous in (False, True)
    ]
    random = np.random.default_rng(0)
    (first, first_info), (second, second_info) = (vector.reset(seed=[3, 4, 5]) for vector in vectors)
    _assert_equal(first, second)
    assert list(first_info["initial_state_hash"]) == list(second_info["initial_state_hash"])
    for _ in range(3):
        actions = random.uniform(-1, 1, vectors[0].action_space.shape).astype(np.float32)
        left, right = (vector.step(actions) for vector in vectors)
        _assert_equal(left[0], right[0])
        for i in (1, 2, 3):
            np.testing.assert_array_equal(left[i], right[i])
    for vector in vectors:
        vector.close()


def test_a_chunk_is_its_actions_one_after_the_other() -> None:
    chunked, single = ActionChunkWrapper(TabletopEnv(), 6), TabletopEnv()
    chunked.reset(seed=2, options={"record": True})
    single.reset(seed=2)
    actions = np.random.default_rng(0).uniform(-1, 1, (6, 3)).astype(np.float32)
    last, _, _, _, info = chunked.step(actions)
    for action in actions:
        wanted, *_ = single.step(action)
    _assert_equal(wanted, last)
    assert info["steps"] == 6
    assert info["frames"].shape == (4, 192, 192, 3)  # the initial state, and every second step
    np.testing.assert_array_equal(info["frames"][-1], single.picture())


def test_a_chunk_stops_where_the_episode_ends_and_looks_once() -> None:
    class Counting(TabletopEnv):
        looks = 0

        def observe(self) -> dict[str, np.ndarray]:
            self.looks += 1
            return super().observe()

    inner = Counting(episode_length=9)
    env = ActionChunkWrapper(inner, 4)
    env.reset(seed=0)
    looks = inner.looks
    steps = [env.step(np.zeros((4, 3), dtype=np.float32)) for _ in range(3)]
    assert [info["steps"] for *_, info in steps] == [4, 4, 1]
    assert [truncated for _, _, _, truncated, _ in steps] == [False, False, True]
    assert inner.looks - looks == 3


def test_an_expert_reaches_success_through_single_actions_in_a_vector() -> None:
    vector = make_vector_env(TABLETOP, 3, asynchronous=False)
    vector.reset(seed=0)
    experts = vector.call("expert")
    done = np.zeros(3, dtype=bool)
    while not done.all():
        _, _, terminated, truncated, _ = vector.step(np.stack([expert.act() for expert in experts]))
        done = terminated | truncated
    assert terminated.all()


def test_a_task_switches_in_a_running_slot_of_metaworld() -> None:
    pytest.importorskip("metaworld")
    vector = make_vector_env(METAWORLD, 2, {"cameras": ()}, asynchronous=False)
    _, infos = vector.reset(seed=0, options={"slots": [{"task": "door-open-v3"}, {"task": "drawer-open-v3"}]})
    assert list(infos["instruction"]) == ["open the door", "open the drawer"]


def test_workers_start_while_torch_threads_run_in_the_parent() -> None:
    torch = pytest.importorskip("torch")
    torch.randn(400, 400) @ torch.randn(400, 400)  # starts torch's thread pool
    vector = make_vector_env(TABLETOP, 2, num_workers=2)
    observations, _ = vector.reset(seed=0)
    assert torch.from_numpy(observations["observation.state"]).shape == (2, 3)
    vector.close()


def test_what_a_factory_raises_in_a_worker_is_raised_here() -> None:
    with pytest.raises(ConfigError, match="red-block-blue-pad") as caught:
        make_vector_env(TABLETOP, 2, {"task": "red-block-blue-pat"})
    assert "in worker process" in caught.value.__notes__[0]
    with pytest.raises(ConfigError, match="no such environment"):
        make_vector_env("lightning_embodied/Nothing-v0", 1, asynchronous=False)
    with pytest.raises(ConfigError, match="episode_length"):
        make_vector_env(TABLETOP, 1, {"max_episode_steps": 3}, asynchronous=False)
    with pytest.raises(ConfigError, match="refuses its options"):
        make_vector_env(TABLETOP, 1, {"colour": 3}, asynchronous=False)


def test_wrong_lengths_are_named() -> None:
    vector = make_vector_env(TABLETOP, 2, asynchronous=False)
    for where, call in {
        "seed": partial(vector.reset, seed=[1]),
        "slots": partial(vector.reset, options={"slots": [None]}),
        "reset_mask": partial(vector.reset, options={"reset_mask": np.array([True])}),
        "env_kwargs": partial(make_vector_env, TABLETOP, 3, [{}]),
    }.items():
        with pytest.raises(ConfigError, match=where):
            call()


def test_a_worker_that_dies_is_one_clear_error() -> None:
    vector = make_vector_env(TABLETOP, 2, num_workers=1)
    vector.reset(seed=0)
    (worker,) = vector._workers
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(EmbodiedError, match="ended unexpectedly"):
        vector.step(vector.action_space.sample())
    vector.close()


def test_close_ends_the_processes_and_a_dead_parent_leaves_none() -> None:
    worker = WorkerProcess(dict)
    assert worker.call("get", "x", 3) == 3
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)
    script = (
        "import os, signal\n"
        "from lightning_embodied.envs import WorkerProcess\n"
        "worker = WorkerProcess(dict)\n"
        "worker.call('get', 1)\n"
        "print(worker.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The worker inherits the pipe of stdout: reading it to its end waits until the worker, too, has ended.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert int(done.stdout) > 0


def test_environments_of_one_vector_must_have_the_same_spaces() -> None:
    factories = [partial(gymnasium.make, TABLETOP, image_size=size) for size in (32, 48)]
    with pytest.raises(ConfigError, match="same spaces"):
        SlotVectorEnv(factories)
    with pytest.raises(ConfigError, match="same spaces"):
        SlotVectorEnv(factories, num_workers=2)
