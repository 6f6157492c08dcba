"""Starts seen in training are refused: by the seeds that were recorded and by the first frames themselves."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lightning_embodied.data import LeRobotDataset
from lightning_embodied.errors import DatasetError
from lightning_embodied.evaluation.starts import Start, check_unseen

FIXTURE = Path(__file__).parents[1] / "fixtures" / "lerobot_v30_chunks" / "dataset"


@pytest.fixture(scope="module")
def dataset():
    return LeRobotDataset(FIXTURE)


def start_at(dataset, frame, *, seed=1, shift=0.0, instruction=None):
    state = dataset.numeric("observation.state")[frame].astype(np.float32) + np.float32(shift)
    task = dataset.tasks[int(dataset.numeric("task_index").reshape(-1)[frame])]
    return Start.of("drawer", seed, instruction or task, {"observation.state": state})


def test_a_first_frame_of_a_demonstration_is_seen(dataset):
    first = int(np.cumsum(dataset.episode_lengths)[0])  # of the second episode
    with pytest.raises(DatasetError, match=r"1 of 2 evaluation starts were seen[\s\S]*drawer seed 1[\s\S]*first frame"):
        check_unseen(FIXTURE, [start_at(dataset, first), start_at(dataset, first, seed=2, shift=0.01)])


def test_what_was_compared_is_reported(dataset):
    report = check_unseen(FIXTURE, [start_at(dataset, 0), start_at(dataset, 0, seed=2, shift=0.5)], allow_seen=True)
    assert report["seen"] == [{"task": "drawer", "seed": 1, "reason": "same first frame as a demonstration"}]
    assert report["seen_starts"] == 1
    assert report["training_episodes"] == len(dataset.episodes)
    assert report["states_compared"] == ["observation.state"]
    assert json.loads(json.dumps(report)) == report


def test_later_frames_and_other_instructions_are_no_starts(dataset):
    starts = [start_at(dataset, 1), start_at(dataset, 0, instruction="something else")]
    assert check_unseen(FIXTURE, starts)["seen_starts"] == 0


def test_a_seed_of_a_demonstration_is_seen(dataset, tmp_path):
    root = shutil.copytree(FIXTURE, tmp_path / "dataset")
    (root / "meta" / "collection.json").write_text(json.dumps({"episodes": [{"task": "drawer", "seed": 7}]}))
    fresh = [start_at(dataset, 0, seed=seed, shift=0.5) for seed in (6, 7, 8)]
    with pytest.raises(DatasetError, match="drawer seed 7"):
        check_unseen(root, fresh)
    assert check_unseen(root, [fresh[0], fresh[2]])["seeds_compared"] == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"episodes": [{"seed": 1}]}'])
def test_a_damaged_record_is_said(tmp_path, text):
    root = shutil.copytree(FIXTURE, tmp_path / "dataset")
    (root / "meta" / "collection.json").write_text(text)
    with pytest.raises(DatasetError, match=r"cannot be read[\s\S]*collection\.json"):
        check_unseen(root, [])


def test_digests_tell_states_apart():
    state = {"observation.state": np.zeros(3, np.float32)}
    assert Start.of("a", 1, "x", state).digest == Start.of("a", 2, "y", state).digest
    assert Start.of("a", 1, "x", state).digest != Start.of("b", 1, "x", state).digest
    pictures = {"observation.images.top": np.zeros((4, 4, 3), np.uint8)}
    assert Start.of("a", 1, "x", {**state, **pictures}).digest == Start.of("a", 1, "x", state).digest
    assert (
        Start.of("a", 1, "x", pictures).digest
        != Start.of("a", 1, "x", {"observation.images.top": np.ones_like(pictures["observation.images.top"])}).digest
    )
