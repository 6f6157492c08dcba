"""The writer: LeRobot's exact layout, values that survive, exact statistics, and nothing half-written."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_embodied.data import LeRobotDataset, LeRobotDatasetWriter, compute_stats
from lightning_embodied.errors import ConfigError, DatasetError
from lightning_embodied.features import STATISTICS, Feature
from tests.data.plain_reader import read_all

FIXTURES = Path(__file__).parent.parent / "fixtures"
STATE = {"observation.state": Feature("float32", (2,)), "action": Feature("float32", (3,))}
FULL = {
    "observation.images.top": Feature("video", (48, 64, 3), ["height", "width", "channels"]),
    "observation.images.wrist": Feature("image", (20, 30, 3), ["height", "width", "channels"]),
    **STATE,
    "gripper": Feature("int64", (1,)),
    "done": Feature("bool", (1,)),
    "note": Feature("string", (1,)),
    "matrix": Feature("float64", (2, 3)),
}


def picture(height, width, number):
    """Smooth, and different for each number in a way that a codec keeps."""
    rows, columns = np.mgrid[:height, :width]
    red = (rows + columns + 9 * number) % 200
    return np.stack([red, 2 * rows, np.full_like(rows, 5 * number % 250)], axis=-1).astype(np.uint8)


def frame(features, number, rng, task="open the drawer"):
    values = {"task": task}
    for key, feature in features.items():
        if feature.is_visual:
            values[key] = picture(*feature.shape[:2], number)
        elif feature.dtype == "string":
            values[key] = f"frame {number}"
        elif feature.dtype == "bool":
            values[key] = rng.random(feature.shape) < 0.5
        elif feature.dtype.startswith(("int", "uint")):
            values[key] = rng.integers(0, 100, feature.shape).astype(feature.dtype)
        else:
            values[key] = rng.normal(size=feature.shape).astype(feature.dtype)
    return values


def record(root, lengths, features=STATE, seed=0, **options):
    rng, frames = np.random.default_rng(seed), []
    with LeRobotDatasetWriter(root, fps=10, features=features, robot_type="arm", **options) as writer:
        for episode, length in enumerate(lengths):
            for _ in range(length):
                frames.append(frame(features, len(frames), rng, task=f"task {episode % 2}"))
                writer.add_frame(frames[-1])
            assert writer.save_episode() == episode
    return frames


@pytest.mark.parametrize("codec", ["h264", "hevc", "libsvtav1"])
@pytest.mark.parametrize(
    "limits", [{}, {"data_files_size_in_mb": 0.005, "video_files_size_in_mb": 0.002, "chunks_size": 2}]
)
def test_a_reader_that_is_not_ours_reads_what_was_written(tmp_path, codec, limits):
    written = record(tmp_path / "set", [12, 1, 7, 15, 4], FULL, vcodec=codec, **limits)
    read = read_all(tmp_path / "set")
    ours = LeRobotDataset(tmp_path / "set", video_backend="pyav")
    assert len(read) == len(written) == len(ours)
    for number, (theirs, raw) in enumerate(zip(read, written, strict=True)):
        sample = ours[number]
        assert theirs["task"] == sample["task"] == raw["task"]
        assert theirs["note"] == sample["note"] == raw["note"]
        for key, feature in FULL.items():
            if feature.dtype == "string":
                continue
            value = np.asarray(theirs[key]).reshape(feature.shape)
            found = sample[key].numpy().transpose(1, 2, 0) if feature.is_visual else sample[key].numpy()
            if feature.dtype == "video":
                assert np.abs(value.astype(int) - raw[key].astype(int)).mean() < 8
                assert np.array_equal(found, value)
            else:
                assert np.array_equal(value, np.asarray(raw[key]).reshape(feature.shape)), key
                assert np.array_equal(found, value.astype(found.dtype))
    if limits:
        assert len(list((tmp_path / "set" / "data").rglob("*.parquet"))) > 1
        assert len(list((tmp_path / "set" / "videos").rglob("*.mp4"))) > 1


@pytest.mark.parametrize("name", ["lerobot_v30_video", "lerobot_v30_image", "lerobot_v30_chunks"])
def test_the_files_have_lerobots_columns(tmp_path, name):
    theirs, ours = FIXTURES / name / "dataset", tmp_path / "set"
    info = json.loads((theirs / "meta" / "info.json").read_text())
    features = {key: Feature.from_dict(value) for key, value in info["features"].items()}
    recorded = {
        key: f
        for key, f in features.items()
        if key not in {"timestamp", "frame_index", "episode_index", "index", "task_index"}
    }
    record(ours, [4, 3], recorded, vcodec="libsvtav1")
    for file in ("data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet"):
        a, b = pq.read_schema(theirs / file), pq.read_schema(ours / file)
        assert b.names == a.names, file
        for column in a.names:
            assert b.field(column).type == a.field(column).type, (file, column)
        for kind in (b"huggingface", b"pandas"):
            if kind in (a.metadata or {}):
                left, right = json.loads(a.metadata[kind]), json.loads(b.metadata[kind])
                for volatile in ("fingerprint", "creator", "pandas_version"):
                    left.pop(volatile, None), right.pop(volatile, None)
                assert left == right
    written = json.loads((ours / "meta" / "info.json").read_text())
    assert written.keys() == info.keys()
    assert {k: v.keys() - {"info"} for k, v in written["features"].items()} == {
        k: v.keys() - {"info"} for k, v in info["features"].items()
    }
    groups = pq.ParquetFile(ours / "data/chunk-000/file-000.parquet").metadata
    assert [groups.row_group(n).num_rows for n in range(groups.num_row_groups)] == [4, 3]
    stats = json.loads((ours / "meta" / "stats.json").read_text())
    reference = json.loads((theirs / "meta" / "stats.json").read_text())
    assert stats.keys() == reference.keys()
    for key, value in reference.items():
        assert stats[key].keys() == value.keys()
        assert {k: np.shape(v) for k, v in stats[key].items()} == {k: np.shape(v) for k, v in value.items()}, key


@pytest.mark.parametrize("codec", ["h264", "hevc", "libsvtav1"])
def test_video_has_lerobots_encoding(tmp_path, codec):
    record(tmp_path / "set", [6, 5], FULL, vcodec=codec)
    with av.open(str(next((tmp_path / "set").rglob("*.mp4")))) as container:
        keys = [f.key_frame for f in container.decode(video=0)]
        stream = container.streams.video[0]
        assert stream.codec_context.pix_fmt == "yuv420p"
        assert stream.average_rate == 10
    assert keys[0]
    assert keys[6]  # an episode starts with a key frame
    assert all(any(pair) for pair in itertools.pairwise(keys))  # g = 2


def test_statistics_are_those_of_the_raw_values(tmp_path):
    written = record(tmp_path / "set", [9, 4, 30], FULL)
    stats = json.loads((tmp_path / "set" / "meta" / "stats.json").read_text())
    assert "note" not in stats
    for key, feature in FULL.items():
        if feature.dtype == "string":
            continue
        raw = np.stack([f[key] for f in written]).astype(np.float64)
        if feature.is_visual:
            raw = raw.reshape(-1, 3) / 255
        _same_statistics(stats[key], raw)
    ours = compute_stats(LeRobotDataset(tmp_path / "set"), ["action", "observation.images.wrist"])
    for key, value in ours.items():
        for name in STATISTICS:
            np.testing.assert_allclose(value.to_dict()[name], stats[key][name], rtol=1e-12)


def _same_statistics(found, raw):
    expected = {"min": raw.min(0), "max": raw.max(0), "mean": raw.mean(0), "std": raw.std(0)}
    expected |= {f"q{int(100 * q):02d}": np.quantile(raw, q, axis=0) for q in (0.01, 0.1, 0.5, 0.9, 0.99)}
    for name, value in expected.items():
        np.testing.assert_allclose(
            np.reshape(found[name], -1), np.reshape(value, -1), rtol=1e-6, atol=1e-9, err_msg=name
        )


NUMBERS = st.sampled_from(["float32", "float64", "int64", "int32", "uint8", "bool"])
SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.tuples(NUMBERS, SHAPES), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
    small_files=st.booleans(),
)
def test_numbers_survive_and_are_described_exactly(tmp_path, kinds, lengths, seed, small_files):
    root = tmp_path / "set"
    features = {f"feature.{n}": Feature(dtype, shape) for n, (dtype, shape) in enumerate(kinds)}
    limits = {"data_files_size_in_mb": 0.002, "chunks_size": 2} if small_files else {}
    try:
        written = record(root, lengths, features, seed, **limits)
        dataset = LeRobotDataset(root)
        assert (
            dataset.features.keys() - {"timestamp", "frame_index", "episode_index", "index", "task_index"}
            == features.keys()
        )
        assert dataset.episode_lengths == lengths
        stats = compute_stats(dataset)
        for key, feature in features.items():
            raw = np.stack([f[key] for f in written])
            assert dataset.numeric(key).dtype == np.dtype(feature.dtype)
            assert np.array_equal(dataset.numeric(key), raw)
            _same_statistics(stats[key].to_dict(), raw.astype(np.float64))
    finally:
        shutil.rmtree(root, ignore_errors=True)


def test_nothing_opens_before_it_is_complete(tmp_path):
    root = tmp_path / "set"
    writer = LeRobotDatasetWriter(root, fps=10, features=STATE)
    writer.add_frame(frame(STATE, 0, np.random.default_rng(0)))
    writer.save_episode()
    assert not root.exists()
    (work,) = tmp_path.iterdir()
    with pytest.raises(DatasetError, match="not a whole LeRobot dataset"):
        LeRobotDataset(work)
    writer.finalize()
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert len(LeRobotDataset(root)) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_stop_keeps_complete_episodes(tmp_path, error):
    rng = np.random.default_rng(0)
    with pytest.raises(error), LeRobotDatasetWriter(tmp_path / "set", fps=10, features=FULL) as writer:  # noqa: PT012
        for _ in range(2):
            for number in range(3):
                writer.add_frame(frame(FULL, number, rng))
            writer.save_episode()
        writer.add_frame(frame(FULL, 0, rng))
        raise error
    assert len(read_all(tmp_path / "set")) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_stop_without_complete_episodes_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), LeRobotDatasetWriter(tmp_path / "set", fps=10, features=STATE) as writer:  # noqa: PT012
        writer.add_frame(frame(STATE, 0, np.random.default_rng(0)))
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_ctrl_c_while_an_episode_is_saved_waits_for_it(tmp_path, monkeypatch):
    rng, root = np.random.default_rng(0), tmp_path / "set"
    write_table = pq.ParquetWriter.write_table

    def interrupted(self, *args, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return write_table(self, *args, **options)

    with pytest.raises(KeyboardInterrupt), LeRobotDatasetWriter(root, fps=10, features=STATE) as writer:  # noqa: PT012
        writer.add_frame(frame(STATE, 0, rng))
        with monkeypatch.context() as patch:
            patch.setattr(pq.ParquetWriter, "write_table", interrupted)
            writer.save_episode()
    assert len(read_all(root)) == 1


def test_discarded_episodes_leave_no_trace(tmp_path):
    rng, root = np.random.default_rng(0), tmp_path / "set"
    with LeRobotDatasetWriter(root, fps=10, features=FULL) as writer:
        for number in range(4):
            writer.add_frame(frame(FULL, number, rng, task="failed"))
        writer.discard_episode()
        kept = [frame(FULL, number, rng, task="done") for number in range(10, 13)]
        for one in kept:
            writer.add_frame(one)
        writer.save_episode()
    dataset = LeRobotDataset(root)
    assert dataset.tasks == ["done"]
    assert dataset.episode_lengths == [3]
    raw = np.stack([one["observation.images.wrist"] for one in kept])
    stats = json.loads((root / "meta" / "stats.json").read_text())["observation.images.wrist"]
    np.testing.assert_allclose(np.reshape(stats["mean"], -1), raw.reshape(-1, 3).mean(0) / 255)


def test_nothing_recorded_is_an_error(tmp_path):
    with (
        pytest.raises(DatasetError, match="no episode was recorded"),
        LeRobotDatasetWriter(tmp_path / "set", fps=10, features=STATE),
    ):
        pass
    assert not list(tmp_path.iterdir())


_FULL_DISK = """
import resource, signal, sys
import numpy as np
from lightning_embodied.data import LeRobotDatasetWriter
from lightning_embodied.errors import DatasetError
from lightning_embodied.features import Feature
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
features = {"observation.images.top": Feature("video", (64, 64, 3)), "action": Feature("float32", (500,))}
rng = np.random.default_rng(0)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # a write beyond fails with an OSError, as on a full disk
try:
    with LeRobotDatasetWriter(sys.argv[1], fps=10, features=features, crf=1) as writer:
        while True:
            for _ in range(20):
                writer.add_frame({"observation.images.top": rng.integers(0, 255, (64, 64, 3), dtype=np.uint8),
                                  "action": rng.normal(size=500), "task": "t"})
            writer.save_episode()
except DatasetError as error:
    print(error)
    sys.exit(7)
"""


def test_a_full_disk_is_one_error_and_no_dataset(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path / "set")],
        capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith("the dataset cannot be written")
    assert not list(tmp_path.iterdir())


def test_an_existing_directory_is_left_alone(tmp_path):
    (tmp_path / "keep.txt").write_text("mine")
    with pytest.raises(DatasetError, match="not empty"):
        LeRobotDatasetWriter(tmp_path, fps=10, features=STATE)
    assert (tmp_path / "keep.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": np.zeros(4)}, "another shape"),
        ({"action": np.array([0.0, np.nan, 0.0])}, "not finite"),
        ({"action": np.array(["a", "b", "c"])}, "another type"),
        ({"task": ""}, "not a text"),
        ({"unknown": 1}, "does not hold the features"),
        ({"observation.images.top": np.zeros((48, 64, 3))}, "not uint8"),
        ({"gripper": np.array([1.5])}, "another type"),
        ({"note": 3}, "another type"),
    ],
)
def test_a_frame_that_does_not_fit_adds_nothing(tmp_path, change, message):
    rng = np.random.default_rng(0)
    with LeRobotDatasetWriter(tmp_path / "set", fps=10, features=FULL) as writer:
        writer.add_frame(frame(FULL, 0, rng))
        with pytest.raises(DatasetError, match=message):
            writer.add_frame({**frame(FULL, 1, rng), **change})
        writer.save_episode()
    assert len(read_all(tmp_path / "set")) == 1


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({}, "at least one feature"),
        ({"timestamp": Feature("float32", (1,))}, "cannot be a feature"),
        ({"a/b": Feature("float32", (1,))}, "cannot be a feature"),
        ({"a": Feature("float16", (1,))}, "unknown dtype"),
        ({"a": Feature("video", (48, 64, 1))}, "height, width, 3"),
        ({"a": Feature("string", (2,))}, "string feature"),
        ({"a": Feature("float32", ())}, "one to five"),
        ({"a": Feature("video", (47, 64, 3))}, "even height"),
    ],
)
def test_features_that_cannot_be_written(tmp_path, features, message):
    with pytest.raises((DatasetError, ConfigError), match=message):
        LeRobotDatasetWriter(tmp_path / "set", fps=10, features=features)
    assert not list(tmp_path.iterdir())
