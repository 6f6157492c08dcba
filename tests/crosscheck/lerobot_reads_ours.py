"""LeRobot itself opens a dataset that our writer wrote, and every value is compared.

Not part of the test suite: LeRobot needs its own environment (Python 3.12, about 6 GB), which `make crosscheck` makes.
Where the two packages cannot share an environment, the two steps run apart:

    python tests/crosscheck/lerobot_reads_ours.py write DIRECTORY      records datasets and what they should hold
    python tests/crosscheck/lerobot_reads_ours.py compare DIRECTORY    opens them with LeRobotDataset and compares
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

FPS = 10
LENGTHS = (17, 1, 9, 23)
CASES = {
    # name: (codec of the cameras, options of the writer)
    "h264": ("h264", {}),
    "hevc": ("hevc", {}),
    "av1": ("libsvtav1", {}),
    "chunks": ("h264", {"data_files_size_in_mb": 0.003, "video_files_size_in_mb": 0.005, "chunks_size": 2}),
    "png": (None, {}),
}
WINDOWS = {"action": [n / FPS for n in range(-2, 9)], "observation.state": [-0.1, 0.0]}
BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")


def write(directory: Path) -> None:
    """Records one dataset a case, and beside it what samples our reader gives."""
    from lightning_embodied.data import LeRobotDataset, LeRobotDatasetWriter
    from lightning_embodied.features import Feature

    for name, (codec, options) in CASES.items():
        camera = Feature("image" if codec is None else "video", (64, 96, 3), ["height", "width", "channels"])
        features = {
            "observation.images.top": camera,
            "observation.images.wrist": camera,
            "observation.state": Feature("float32", (5,), [f"joint_{n}" for n in range(5)]),
            "action": Feature("float32", (7,)),
            "next.reward": Feature("float32", (1,)),
            "next.done": Feature("bool", (1,)),
            "mode": Feature("int64", (1,)),
        }
        rng, root = np.random.default_rng(0), directory / name / "dataset"
        chosen = {} if codec is None else {"vcodec": codec}
        with LeRobotDatasetWriter(root, fps=FPS, features=features, robot_type="arm", **chosen, **options) as writer:
            for episode, length in enumerate(LENGTHS):
                for number in range(length):
                    rows, columns = np.mgrid[:64, :96]
                    picture = np.stack([rows * 3 + number, columns * 2 + 9 * episode, rows + columns], axis=-1)
                    writer.add_frame(
                        {
                            "observation.images.top": picture.astype(np.uint8),
                            "observation.images.wrist": picture[::-1].astype(np.uint8),
                            "observation.state": rng.normal(size=5),
                            "action": rng.normal(size=7),
                            "next.reward": number / length,
                            "next.done": number == length - 1,
                            "mode": number % 4,
                            "task": f"task {episode % 2}",
                        }
                    )
                writer.save_episode()
        dataset, values = LeRobotDataset(root, delta_timestamps=WINDOWS, video_backend="pyav"), {}
        for index in range(len(dataset)):
            values |= {f"{index}/{key}": np.asarray(value) for key, value in dataset[index].items() if key != "task"}
        np.savez_compressed(directory / name / "ours.npz", **values)
        tasks = [dataset[index]["task"] for index in range(len(dataset))]
        (directory / name / "tasks.json").write_text(json.dumps(tasks))


def compare(directory: Path) -> None:
    """Opens each with LeRobot and compares all samples; exits with 1 at the first difference."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    for name in CASES:
        root = directory / name / "dataset"
        dataset = LeRobotDataset(f"local/{name}", root=root, delta_timestamps=WINDOWS, video_backend="pyav")
        values, worst = np.load(directory / name / "ours.npz"), 0.0
        tasks = json.loads((directory / name / "tasks.json").read_text())
        assert len(dataset) == len(tasks) == sum(LENGTHS)
        assert dataset.meta.total_episodes == len(LENGTHS)
        for index in range(len(dataset)):
            sample = dataset[index]
            assert sample.pop("task") == tasks[index]
            for key, value in sample.items():
                ours, theirs = values[f"{index}/{key}"], np.asarray(value)
                if "images" in key and not key.endswith("_is_pad"):
                    difference = np.abs(np.rint(theirs * 255) - ours)
                    worst = max(worst, float(difference.max()))
                    assert difference.max() <= 3, (name, index, key, worst)
                else:
                    assert np.array_equal(theirs.reshape(-1), ours.reshape(-1)), (name, index, key, theirs, ours)
        assert set(dataset.meta.stats) == set(dataset.meta.features), name
        print(f"{name}: {len(dataset)} samples equal; pictures differ by at most {worst:.0f} of 255")


if __name__ == "__main__":
    {"write": write, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
