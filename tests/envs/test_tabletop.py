from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

from lightning_embodied.envs import TABLETOP_INSTRUCTIONS, TabletopEnv
from lightning_embodied.envs.tabletop_drawing import draw_scene
from lightning_embodied.errors import ConfigError

seeds = st.integers(0, 2**31 - 1)


def _run_expert(env: TabletopEnv) -> int:
    expert, over, steps = env.expert(), False, 0
    while not over:
        _, terminated, truncated, _ = env.advance(expert.act())
        steps, over = steps + 1, terminated or truncated
    return steps


@pytest.mark.filterwarnings("ignore:.*Box observation space")
def test_gymnasiums_own_checker_passes() -> None:
    env = gymnasium.make("lightning_embodied/Tabletop-v0", render_mode="rgb_array")
    check_env(env.unwrapped, skip_render_check=False)


@given(seeds)
def test_the_expert_succeeds_from_every_start(seed: int) -> None:
    env = TabletopEnv()
    env.reset(seed=seed)
    steps = _run_expert(env)
    assert env.success
    assert 5 <= steps <= 30


@given(seeds, st.sampled_from(sorted(TABLETOP_INSTRUCTIONS)), st.sampled_from(sorted(TABLETOP_INSTRUCTIONS)))
def test_the_scene_depends_on_the_seed_alone_and_the_goal_on_the_instruction(seed: int, task: str, other: str) -> None:
    env, changed = TabletopEnv(task), TabletopEnv()
    first, info = env.reset(seed=seed)
    second, swapped = changed.reset(seed=seed, options={"instruction": TABLETOP_INSTRUCTIONS[other]})
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key])
    assert info["initial_state_hash"] == swapped["initial_state_hash"]
    assert (info["task"], swapped["task"]) == (task, other)


@given(seeds)
def test_following_the_other_instruction_does_not_fulfil_the_first(seed: int) -> None:
    env, judge = TabletopEnv(), TabletopEnv(terminate_on_success=False)
    env.reset(seed=seed)
    env.reset(seed=seed, options={"instruction": env.other_instruction})
    judge.reset(seed=seed)
    assert env.goal_block != judge.goal_block
    assert env.goal_pad != judge.goal_pad
    expert = env.expert()
    while not env.success:
        action = expert.act()
        env.advance(action)
        judge.advance(action)
        assert not judge.success


def test_seeds_give_distinct_starts_and_all_goals() -> None:
    env = TabletopEnv()
    infos = [env.reset(seed=seed)[1] for seed in range(200)]
    assert len({info["initial_state_hash"] for info in infos}) == 200
    assert {info["task"] for info in infos} == set(TABLETOP_INSTRUCTIONS)


def test_success_needs_the_block_released_on_the_pad() -> None:
    env = TabletopEnv("red-block-blue-pad", terminate_on_success=False)
    env.reset(seed=0)
    expert = env.expert()
    while not env.success:
        assert not (env.held is None and np.linalg.norm(env.blocks[0] - env.pads[0]) <= 0.08)
        action = expert.act()
        env.advance(action)
    assert action[2] < 0


@given(st.floats(0.1, 0.9), st.floats(0.1, 0.9), st.integers(32, 96))
def test_pictures_show_positions_to_a_fraction_of_a_pixel(x: float, y: float, size: int) -> None:
    pads, blocks = np.full((2, 2), 5.0), np.array([[x, y], [5.0, 5.0]])
    gripper = np.full(2, 5.0)
    empty = draw_scene(size, pads, np.full((2, 2), 5.0), gripper, closed=False).astype(float)
    changed = np.abs(draw_scene(size, pads, blocks, gripper, closed=False) - empty).sum(-1)
    rows, columns = np.mgrid[:size, :size] + 0.5
    total = changed.sum()
    assert abs((columns * changed).sum() / total - x * size) < 0.15
    assert abs((rows * changed).sum() / total - (1 - y) * size) < 0.15  # y is upwards


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_gripper_can_be_drawn_anywhere_on_the_table(x: float, y: float) -> None:
    env = TabletopEnv(image_size=48)
    env.reset(seed=0)
    env.gripper = np.array([x, y])
    picture = env.observe()["observation.images.top"].astype(int)
    assert ((picture[..., 1] > 120) & (picture[..., 2] > 120) & (picture[..., 0] < 120)).any()


@pytest.mark.parametrize(
    ("kwargs", "options", "message"),
    [
        ({"task": "red-block-blue-pat"}, {}, "red-block-blue-pad"),
        ({}, {"instruction": "put the red block on the blue pat"}, "on the blue pad"),
        ({"image_size": 4}, {}, "image_size"),
    ],
)
def test_bad_options_are_named(kwargs: dict[str, object], options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TabletopEnv(**kwargs).reset(options=options)  # type: ignore[arg-type]
