"""Every value LeRobot returned for its own datasets against ours: samples, windows, pads, pictures, statistics."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_embodied.data import LeRobotDataset, compute_stats

FIXTURES = Path(__file__).parent.parent / "fixtures"
# dataset -> the folder with the values expected of it
REFERENCES = {
    "lerobot_v30_video": "lerobot_v30_video",
    "lerobot_v30_chunks": "lerobot_v30_chunks",
    "lerobot_v30_image": "lerobot_v30_image",
    "lerobot_v30_converted": "lerobot_v21_video",
    "lerobot_v21_video": "lerobot_v21_video",
    "lerobot_v21_image": "lerobot_v21_image",
}
LOSSLESS = {"lerobot_v30_image", "lerobot_v21_image"}


def expected(name):
    folder = FIXTURES / REFERENCES[name]
    return json.loads((folder / "expected.json").read_text()), np.load(folder / "expected.npz")


def dataset_of(name, **options):
    windows = expected(name)[0]["dataset"]["delta_timestamps"]
    return LeRobotDataset(FIXTURES / name / "dataset", delta_timestamps=windows, video_backend="pyav", **options)


def barcode(picture):
    """The frame number drawn into the top row of a picture [C, H, W]: 6x6 blocks, least significant bit left."""
    bits = [int(picture[:, 1:5, 6 * n + 1 : 6 * n + 5].float().mean() > 127) for n in range(picture.shape[2] // 6)]
    return sum(bit << n for n, bit in enumerate(bits[:10]))


@pytest.mark.parametrize("cache_gb", [0.0, 0.1], ids=["decoding", "decoded cache"])
@pytest.mark.parametrize("name", REFERENCES)
def test_every_expected_value(name, cache_gb):
    values, arrays = expected(name)
    dataset = dataset_of(name, decoded_cache_gb=cache_gb)
    assert dataset.fps == values["dataset"]["fps"]
    assert dataset.episode_lengths == values["dataset"]["lengths"]
    for index, scalars in values["samples"].items():
        sample = dataset[int(index)]
        for key, value in scalars.items():
            if key == "task":
                assert sample[key] == value
            elif key == "timestamp":
                assert sample[key].dtype == torch.float32
                assert abs(float(sample[key]) - value) <= 1e-6
            else:
                assert np.array_equal(np.asarray(sample[key]).reshape(-1), np.asarray(value).reshape(-1)), key
    for name_of_array in arrays.files:
        index, key = name_of_array.split("/", 1)
        ours, theirs = dataset[int(index)][key], arrays[name_of_array]
        if theirs.dtype == np.uint8:
            assert ours.dtype == torch.uint8
            difference = np.abs(ours.numpy().astype(int) - theirs.astype(int))
            assert difference.max() <= (0 if name in LOSSLESS else 3), key
            assert difference.mean() <= 0.5
        else:
            assert ours.dtype == torch.float32
            assert np.array_equal(ours.numpy().reshape(theirs.shape), theirs), key


@pytest.mark.parametrize("name", REFERENCES)
def test_keys_of_a_sample_and_all_timestamps(name):
    values, _ = expected(name)
    dataset = dataset_of(name)
    sample = dataset[0]
    assert set(sample) == set(values["keys_of_a_sample"]) | {"dataset"}
    np.testing.assert_allclose(dataset.numeric("timestamp")[:, 0], values["timestamps_all"], atol=1e-6)
    for key, described in values["keys_of_a_sample"].items():
        if not isinstance(sample[key], torch.Tensor):
            continue
        shape, dtype = described
        # a feature of shape (1,) keeps its axis here; LeRobot drops it
        assert list(sample[key].shape) in (shape, [*shape, 1]), key
        if "images" not in key:
            assert str(sample[key].dtype) == dtype, key


@pytest.mark.parametrize("name", REFERENCES)
def test_every_frame_is_the_right_picture(name):
    dataset = dataset_of(name)
    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
    for index in order:
        sample = dataset[index]
        pictures = [
            value for key, value in sample.items() if key.startswith("observation.images") and key[-4:] != "_pad"
        ]
        for picture in pictures:
            assert barcode(picture if picture.ndim == 3 else picture[-1]) == index


@pytest.mark.parametrize("name", REFERENCES)
def test_statistics_are_exact(name):
    exact = json.loads((FIXTURES / REFERENCES[name] / "stats.json").read_text())["exact"]
    ours = compute_stats(dataset_of(name))
    for key, statistics in exact.items():
        if f"{key}#decoded" in exact:  # statistics before encoding; the decoded ones are what a dataset holds
            continue
        found = ours[key.removesuffix("#decoded")].to_dict()
        for statistic, value in statistics.items():
            np.testing.assert_allclose(
                np.reshape(found[statistic], -1),
                np.reshape(value, -1),
                rtol=1e-6,
                atol=1e-9,
                err_msg=f"{key} {statistic}",
            )


def test_chosen_episodes_come_in_the_given_order():
    whole, part = dataset_of("lerobot_v30_chunks"), dataset_of("lerobot_v30_chunks", episodes=[12, 0, 5])
    starts = np.concatenate([[0], np.cumsum(whole.episode_lengths)])
    frames = [n for episode in (12, 0, 5) for n in range(starts[episode], starts[episode + 1])]
    assert len(part) == len(frames)
    assert part.episodes == [12, 0, 5]
    for position, frame in enumerate(frames):
        ours, theirs = part[position], whole[frame]
        for key in theirs:
            if isinstance(theirs[key], torch.Tensor):
                assert torch.equal(ours[key], theirs[key]), key
            else:
                assert ours[key] == theirs[key]


def test_a_camera_left_out_is_absent():
    dataset = dataset_of("lerobot_v30_video", cameras=["observation.images.wrist"])
    assert "observation.images.top" not in dataset[0]
    assert dataset[0]["observation.images.wrist"].shape == (3, 72, 72)


def test_negative_and_outside_indices():
    dataset = dataset_of("lerobot_v30_image")
    assert dataset[-1]["index"] == len(dataset) - 1
    with pytest.raises(IndexError):
        dataset[len(dataset)]


@pytest.mark.parametrize(
    ("name", "context", "cache_gb"),
    [
        ("lerobot_v30_chunks", "fork", 0.0),
        ("lerobot_v30_chunks", "fork", 0.1),
        ("lerobot_v30_image", "fork", 0.0),
        pytest.param("lerobot_v30_chunks", "spawn", 0.0, marks=pytest.mark.slow),
        pytest.param("lerobot_v30_chunks", "spawn", 0.1, marks=pytest.mark.slow),
    ],
)
def test_workers_give_the_same_samples(name, context, cache_gb):
    dataset = dataset_of(name, decoded_cache_gb=cache_gb)
    alone = [dataset[index] for index in range(len(dataset))]  # also opens decoders that a fork would inherit
    workers = 2 if context == "fork" else 1
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=context)
    for ours, theirs in zip(loader, alone, strict=True):
        for key, value in theirs.items():
            assert torch.equal(ours[key], value) if isinstance(value, torch.Tensor) else ours[key] == value, key


def test_a_pickled_dataset_reads_on():
    dataset = dataset_of("lerobot_v30_video")
    dataset[3]
    again = pickle.loads(pickle.dumps(dataset))  # noqa: S301
    assert torch.equal(again[3]["observation.images.top"], dataset[3]["observation.images.top"])


def test_the_decoded_cache_is_deleted_with_its_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dataset = dataset_of("lerobot_v30_video", decoded_cache_gb=0.1)
    assert list(tmp_path.iterdir())
    del dataset
    assert not list(tmp_path.iterdir())
