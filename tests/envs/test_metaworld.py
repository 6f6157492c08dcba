from __future__ import annotations

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from lightning_embodied.envs import METAWORLD_CAMERAS, METAWORLD_INSTRUCTIONS, MetaWorldEnv
from lightning_embodied.errors import ConfigError

pytestmark = pytest.mark.sim

TASKS = ("drawer-open-v3", "button-press-v3", "reach-v3", "window-close-v3")


def test_gymnasiums_own_checker_passes() -> None:
    env = gymnasium.make("lightning_embodied/MetaWorld-v0", task="reach-v3", image_size=16, render_mode="rgb_array")
    check_env(env.unwrapped, skip_render_check=False)


def test_the_observation_has_lerobot_keys_and_fits_its_space() -> None:
    env = MetaWorldEnv("drawer-open-v3", image_size=32, cameras=("workspace", "topview"))
    observation, info = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    assert set(observation) == set(env.features) - {"action"}
    assert observation["observation.images.topview"].shape == (32, 32, 3)
    assert info["instruction"] == "open the drawer"
    for key, feature in env.features.items():
        assert feature.names is not None
        if not feature.is_visual:
            assert len(feature.names) == feature.shape[0], key


def test_every_task_of_the_package_has_an_instruction() -> None:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    assert set(METAWORLD_INSTRUCTIONS) == set(ALL_V3_ENVIRONMENTS)
    assert len(set(METAWORLD_INSTRUCTIONS.values())) == 50


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_is_one_initial_state_whatever_happened_before(task: str) -> None:
    fresh, used = MetaWorldEnv(task, image_size=32), MetaWorldEnv("door-open-v3", image_size=32)
    used.reset(seed=5)
    used.reset(seed=9, options={"task": task})
    for _ in range(7):
        used.advance(used.action_space.sample())
    wanted, wanted_info = fresh.reset(seed=4)
    found, found_info = used.reset(seed=4)
    assert wanted_info == found_info
    for key, value in wanted.items():
        np.testing.assert_array_equal(value, found[key], err_msg=key)


@pytest.mark.parametrize("task", TASKS)
def test_other_seeds_are_other_initial_states(task: str) -> None:
    env = MetaWorldEnv(task, cameras=())
    resets = [env.reset(seed=seed) for seed in range(12)]
    assert len({info["initial_state_hash"] for _, info in resets}) == 12
    assert len({observation["observation.environment_state"].tobytes() for observation, _ in resets}) == 12


def test_the_first_observation_shows_objects_and_goal_where_they_are() -> None:
    env = MetaWorldEnv("drawer-open-v3", cameras=())
    first, _ = env.reset(seed=8)
    env.advance(np.zeros(4, dtype=np.float32))
    second = env.observe()
    key = "observation.environment_state"
    np.testing.assert_allclose(first[key], second[key], atol=2e-3)
    assert np.abs(first[key][-3:]).max() > 0


@pytest.mark.parametrize("task", TASKS)
def test_the_scripted_expert_succeeds(task: str) -> None:
    env = MetaWorldEnv(task, cameras=())
    successes = 0
    for seed in range(100, 105):
        env.reset(seed=seed)
        expert, over = env.expert(), False
        while not over:
            action = expert.act()
            assert env.action_space.contains(action)
            _, terminated, truncated, info = env.advance(action)
            over = terminated or truncated
        successes += info["success"]
    assert successes == 5


def test_random_actions_do_not_succeed_and_the_episode_is_truncated() -> None:
    env = MetaWorldEnv("drawer-open-v3", cameras=(), episode_length=30)
    env.reset(seed=0)
    env.action_space.seed(0)
    ends = [env.advance(env.action_space.sample())[1:3] for _ in range(30)]
    assert ends == [(False, False)] * 29 + [(False, True)]


def _marker_pixels(env: MetaWorldEnv, camera: str, x: float, z: float) -> np.ndarray:
    """Where the goal marker shows in a view when it is at `(x, 0.7, z)`: what differs from a picture without it."""
    pictures = []
    for height in (z, 10.0):
        env.simulator.data.site("goal").xpos = np.array([x, 0.7, height])
        pictures.append(env.view(camera, 96).astype(int))
    return np.argwhere(np.abs(pictures[0] - pictures[1]).sum(-1) > 30)


@pytest.mark.parametrize("camera", [c for c in METAWORLD_CAMERAS if c not in ("topview", "gripperPOV")])
def test_what_is_higher_in_the_world_is_higher_in_the_picture(camera: str) -> None:
    env = MetaWorldEnv("reach-v3", cameras=(camera,))
    env.reset(seed=0)
    pairs = [[_marker_pixels(env, camera, x, z) for z in (0.08, 0.22)] for x in (-0.12, 0.0, 0.12)]
    seen = [(low, high) for low, high in pairs if len(low) and len(high)]  # the arm hides some
    assert seen
    for low, high in seen:
        assert high[:, 0].mean() < low[:, 0].mean() - 3


@pytest.mark.parametrize("camera", METAWORLD_CAMERAS)
def test_no_view_is_mirrored(camera: str) -> None:
    """MuJoCo's own renderer, turned by half a turn where the camera hangs upside down, shows the same picture."""
    env = MetaWorldEnv("button-press-v3", cameras=())
    import mujoco  # after our environment has chosen the OpenGL

    env.reset(seed=0)
    ours = env.view(camera, 96).astype(float)
    model, data = env.simulator.model, env.simulator.data
    renderer = mujoco.Renderer(model, 96, 96)
    for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
        renderer.scene.flags[flag] = False
    renderer.update_scene(data, env._camera(camera))
    theirs = renderer.render().astype(float)
    renderer.close()
    if camera.startswith("corner"):  # the scene file mounts all four upside down
        theirs = theirs[::-1, ::-1]
    error = np.abs(ours - theirs).mean()
    assert error < 6, "simplified meshes may differ at edges only"
    assert error < 0.5 * min(np.abs(turned - theirs).mean() for turned in (ours[::-1], ours[:, ::-1], ours[::-1, ::-1]))


def test_the_hand_is_in_the_default_view_and_moves_up_with_the_gripper() -> None:
    env = MetaWorldEnv("reach-v3")
    env.reset(seed=0)
    down, up = np.array([0, 0, -1, 0], dtype=np.float32), np.array([0, 0, 1, 0], dtype=np.float32)
    centres = []
    for action in (down, up):
        for _ in range(12):
            env.advance(action)
        picture = env.view("workspace", 96).astype(int)
        cyan = (picture[..., 1] - picture[..., 0] > 60) & (picture[..., 2] - picture[..., 0] > 60)  # a finger
        assert cyan.sum() >= 3
        centres.append(np.argwhere(cyan)[:, 0].mean())
    assert centres[1] < centres[0] - 2


def test_state_only_environments_need_no_opengl() -> None:
    script = (
        "import os; os.environ['MUJOCO_GL'] = 'disable'\n"
        "from lightning_embodied.envs import MetaWorldEnv\n"
        "env = MetaWorldEnv('reach-v3', cameras=())\n"
        "print(sorted(env.reset(seed=0)[0]))\n"
        "MetaWorldEnv('reach-v3')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "['observation.environment_state', 'observation.state']" in done.stdout
    assert "MissingExtraError" in done.stderr
    assert "libegl1 libegl-mesa0" in done.stderr
    assert "libosmesa6" in done.stderr


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"task": "drawer-opne-v3"}, "drawer-open-v3"),
        ({"cameras": ("corner9",)}, "corner"),
        ({"image_size": 4000}, "image_size"),
        ({"episode_length": 0}, "episode_length"),
        ({"episode_length": 501}, "episode_length"),
        ({"render_mode": "human"}, "rgb_array"),
    ],
)
def test_bad_options_are_named_with_what_would_have_been_right(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MetaWorldEnv(**kwargs)  # type: ignore[arg-type]


def test_importing_the_package_is_cheap() -> None:
    script = (
        "import sys, lightning_embodied.envs; print([m for m in ('torch', 'mujoco', 'metaworld') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
