from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pyarrow.parquet as pq
import pytest

from lightning_embodied.collection import PROVENANCE_FILE, collect, read_provenance
from lightning_embodied.collection.recorder import EpisodeRecorder
from lightning_embodied.data import LeRobotDataset
from lightning_embodied.envs import TABLETOP_INSTRUCTIONS, TabletopEnv
from lightning_embodied.errors import ConfigError, DatasetError, EmbodiedError

TABLETOP = "lightning_embodied/Tabletop-v0"
TASKS = ("red-block-blue-pad", "green-block-white-pad")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recorded") / "tabletop"
    result = collect(root, TABLETOP, TASKS, episodes_per_task=3, first_seed=5, image_size=32, num_workers=2)
    assert (result.episodes, result.root) == (6, root)
    return root


def test_the_dataset_holds_what_the_expert_saw_and_did(recorded: Path) -> None:
    dataset = LeRobotDataset(recorded)
    assert dataset.fps == TabletopEnv.fps
    assert dataset.robot_type == "tabletop"
    assert dataset.tasks == [TABLETOP_INSTRUCTIONS[task] for task in TASKS]
    env = TabletopEnv(TASKS[0], image_size=32)
    observation, _ = env.reset(seed=5)
    expert = env.expert()
    for i in range(dataset.episode_lengths[0]):
        sample, action = dataset[i], expert.act()
        np.testing.assert_array_equal(sample["action"], action)
        for key in ("observation.state", "observation.environment_state"):
            np.testing.assert_array_equal(sample[key], observation[key])
        picture = sample["observation.images.top"].permute(1, 2, 0).numpy().astype(int)
        assert np.abs(picture - observation["observation.images.top"]).mean() < 6  # a lossy video
        observation, _, terminated, *_ = env.step(action)
    assert terminated


def test_every_episode_has_its_origin(recorded: Path) -> None:
    provenance = read_provenance(recorded)
    assert provenance is not None
    assert provenance["complete"] is True
    assert provenance["env_id"] == TABLETOP
    assert provenance["env_kwargs"] == {"image_size": 32}
    assert {"lightning-embodied", "numpy", "gymnasium"} <= set(provenance["versions"])
    lengths = LeRobotDataset(recorded).episode_lengths
    for index, origin in enumerate(provenance["episodes"]):
        env = TabletopEnv(origin["task"])
        _, info = env.reset(seed=origin["seed"])
        assert origin["episode_index"] == index
        assert origin["steps"] == lengths[index]
        assert origin["instruction"] == info["instruction"]
        assert origin["initial_state_hash"] == info["initial_state_hash"]
    assert [origin["seed"] for origin in provenance["episodes"]] == [5, 7, 9, 6, 8, 10]


def _columns(root: Path) -> list[object]:
    return [pq.read_table(path).to_pydict() for path in sorted((root / "data").rglob("*.parquet"))]


def test_the_number_of_workers_does_not_change_the_dataset(recorded: Path, tmp_path: Path) -> None:
    root = tmp_path / "again"
    collect(root, TABLETOP, TASKS, episodes_per_task=3, first_seed=5, image_size=32, num_workers=1)
    assert _columns(root) == _columns(recorded)
    assert read_provenance(root) == read_provenance(recorded)
    for video in sorted((recorded / "videos").rglob("*.mp4")):
        assert (root / video.relative_to(recorded)).read_bytes() == video.read_bytes()


def _recorder(**options: float) -> EpisodeRecorder:
    settings = {"action_noise": 0.0, "noise_steps": 1, "steps_after_success": 0, **options}
    return EpisodeRecorder(TABLETOP, {"image_size": 16}, **settings)  # type: ignore[arg-type]


def test_noise_disturbs_the_motion_but_the_recorded_action_is_the_experts() -> None:
    noisy = _recorder(action_noise=0.4).record(TASKS[0], 3)
    assert noisy.success
    clean = _recorder().record(TASKS[0], 3)
    np.testing.assert_array_equal(noisy.frames["action"][0], clean.frames["action"][0])
    states = noisy.frames["observation.state"]
    executed = np.diff(states[:, :2], axis=0) / 0.08
    wanted = noisy.frames["action"][:-1, :2]
    assert np.abs(executed - wanted).max() > 0.1
    env = TabletopEnv(TASKS[0])
    env.reset(seed=3)
    for i in range(noisy.steps):  # in the very state of each frame the expert would do what was recorded
        env.gripper, env.blocks = (
            states[i, :2].astype(float),
            noisy.frames["observation.environment_state"][i, :4].reshape(2, 2).astype(float),
        )
        env.held = env.goal_block if states[i, 2] else None
        np.testing.assert_allclose(env.expert().act(), noisy.frames["action"][i], atol=1e-4)
    again = _recorder(action_noise=0.4).record(TASKS[0], 3)
    np.testing.assert_array_equal(again.frames["observation.state"], states)


def test_an_episode_ends_with_success_or_a_given_number_of_steps_later() -> None:
    assert _recorder(steps_after_success=4).record(TASKS[0], 1).steps == _recorder().record(TASKS[0], 1).steps + 4


def test_failed_attempts_are_not_kept_and_are_counted(tmp_path: Path) -> None:
    lengths = {}
    for seed in range(12):
        lengths[seed] = _recorder().record(TASKS[0], seed).steps
    limit = sorted(lengths.values())[6]  # about half of the first attempts are too slow for this episode length
    good = [seed for seed, steps in lengths.items() if steps <= limit][:4]
    result = collect(
        tmp_path / "d",
        TABLETOP,
        TASKS[:1],
        episodes_per_task=4,
        image_size=32,
        env_kwargs={"episode_length": limit},
        num_workers=2,
    )
    failed = [seed for seed in range(good[-1] + 1) if seed not in good]
    assert result.tallies[TASKS[0]].failed_seeds == failed
    provenance = json.loads((tmp_path / "d" / PROVENANCE_FILE).read_text())
    assert [origin["seed"] for origin in provenance["episodes"]] == good
    assert provenance["tasks"] == {TASKS[0]: {"kept": 4, "failed": len(failed), "failed_seeds": failed}}


def test_an_expert_that_cannot_succeed_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(EmbodiedError, match="fails too often"):
        collect(
            tmp_path / "d", TABLETOP, TASKS[:1], episodes_per_task=2, env_kwargs={"episode_length": 2}, num_workers=1
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["red-block-blue-pat"]}, "red-block-blue-pad"),
        ({"tasks": []}, "tasks"),
        ({"tasks": [TASKS[0], TASKS[0]]}, "once"),
        ({"env_id": "lightning_embodied/Table-v0"}, "Tabletop-v0"),
        ({"env_id": "CartPole-v1"}, "options|expert"),
        ({"episodes_per_task": 0}, "episodes_per_task"),
        ({"action_noise": -1.0}, "action_noise"),
        ({"cameras": ["top"]}, "cameras"),
    ],
)
def test_bad_options_name_the_mend_and_leave_nothing(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        collect(**{"root": tmp_path / "d", "env_id": TABLETOP, "episodes_per_task": 1, "num_workers": 1, **options})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_an_existing_dataset_is_replaced_only_when_asked_and_only_by_a_complete_one(tmp_path: Path) -> None:
    root = tmp_path / "d"
    few = {"env_id": TABLETOP, "tasks": TASKS[:1], "episodes_per_task": 1, "image_size": 32, "num_workers": 1}
    collect(root, **few)  # type: ignore[arg-type]
    before = read_provenance(root)
    with pytest.raises(DatasetError, match="not empty"):
        collect(root, **few, first_seed=3)  # type: ignore[arg-type]
    with pytest.raises(EmbodiedError, match="too often"):
        collect(root, **few, if_exists="overwrite", env_kwargs={"episode_length": 2})  # type: ignore[arg-type]
    assert read_provenance(root) == before
    collect(root, **few, first_seed=3, if_exists="overwrite")  # type: ignore[arg-type]
    provenance = read_provenance(root)
    assert provenance is not None
    assert [origin["seed"] for origin in provenance["episodes"]] == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_something_that_is_not_a_dataset_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(DatasetError, match="not a dataset"):
        collect(tmp_path, TABLETOP, TASKS[:1], episodes_per_task=1, if_exists="overwrite", num_workers=1)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_ctrl_c_keeps_the_complete_episodes_and_leaves_no_process(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from lightning_embodied.collection import collect\n"
        f"collect(sys.argv[1], {TABLETOP!r}, [{TASKS[0]!r}], episodes_per_task=100000, image_size=32, num_workers=2)\n"
    )
    root = tmp_path / "d"
    process = subprocess.Popen([sys.executable, "-c", script, str(root)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "recorded 1 of" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()  # ends only when the workers, which inherit the pipe, have ended too
    assert process.wait(60) != 0
    assert "KeyboardInterrupt" in rest
    assert "complete episodes were kept" in rest
    provenance = read_provenance(root)
    assert provenance is not None
    assert provenance["complete"] is False
    dataset = LeRobotDataset(root)
    assert dataset.episode_lengths == [origin["steps"] for origin in provenance["episodes"]]
    assert len(dataset.episode_lengths) >= 1
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_full_disk_is_one_clear_error_and_leaves_what_was_there(tmp_path: Path) -> None:
    root = tmp_path / "d"
    collect(root, TABLETOP, TASKS[:1], episodes_per_task=1, image_size=32, num_workers=1)
    before = read_provenance(root)
    script = (
        "import resource, sys\n"
        "from lightning_embodied.collection import collect\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        f"collect(sys.argv[1], {TABLETOP!r}, episodes_per_task=200, num_workers=1, if_exists='overwrite')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, check=False)
    assert "DatasetError: the dataset cannot be written" in done.stderr
    assert read_provenance(root) == before
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_damaged_provenance_is_one_clear_error(tmp_path: Path) -> None:
    assert read_provenance(tmp_path) is None
    (tmp_path / "meta").mkdir()
    (tmp_path / PROVENANCE_FILE).write_text('{"episodes": 3}')
    with pytest.raises(DatasetError, match="damaged"):
        read_provenance(tmp_path)
    (tmp_path / PROVENANCE_FILE).write_text("{")
    with pytest.raises(DatasetError, match="cannot be read"):
        read_provenance(tmp_path)


@pytest.mark.sim
def test_metaworld_is_recorded_with_its_object_state_and_goal(tmp_path: Path) -> None:
    tasks = ("reach-v3", "coffee-button-v3")
    root = tmp_path / "d"
    collect(root, tasks=tasks, episodes_per_task=1, image_size=32, cameras=("workspace", "topview"), num_workers=2)
    dataset = LeRobotDataset(root)
    assert dataset.fps == 80
    assert dataset.tasks == ["reach the goal position", "push the button on the coffee machine"]
    env = gymnasium.make("lightning_embodied/MetaWorld-v0", task=tasks[0], image_size=32, cameras=("topview",))
    observation, _ = env.reset(seed=0)
    sample = dataset[0]
    key = "observation.environment_state"
    np.testing.assert_array_equal(sample[key], observation[key])
    picture = sample["observation.images.topview"].permute(1, 2, 0).numpy().astype(int)
    seen = observation["observation.images.topview"]
    assert np.abs(picture - seen).mean() < 0.5 * np.abs(picture - seen[::-1, ::-1]).mean()  # a lossy video
