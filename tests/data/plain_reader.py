"""A second reader of LeRobot v3.0, for checking what ours and the writer agree on: plain pyarrow and PyAV.

It follows LeRobot's documented layout step by step and shares no code with the package.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def read_all(root: Path) -> list[dict]:
    """Every frame of a dataset: numbers as arrays, pictures [H, W, 3], the task's text."""
    info = json.loads((root / "meta" / "info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    tasks = {row["task_index"]: row["task"] for row in pq.read_table(root / "meta" / "tasks.parquet").to_pylist()}
    paths = sorted((root / "meta" / "episodes").rglob("*.parquet"))
    episodes = pa.concat_tables([pq.read_table(path) for path in paths]).to_pylist()
    assert [episode["episode_index"] for episode in episodes] == list(range(info["total_episodes"]))
    frames: list[dict] = []
    for episode in episodes:
        assert episode["dataset_from_index"] == len(frames)
        place = {"chunk_index": episode["data/chunk_index"], "file_index": episode["data/file_index"]}
        table = pq.read_table(root / info["data_path"].format(**place))
        rows = [row for row in table.to_pylist() if row["episode_index"] == episode["episode_index"]]
        assert len(rows) == episode["length"]
        for row in rows:
            row["task"] = tasks[row["task_index"]]
            assert row["task"] in episode["tasks"]
        for key, feature in info["features"].items():
            if feature["dtype"] == "image":
                for row in rows:
                    row[key] = next(av.open(io.BytesIO(row[key]["bytes"])).decode(video=0)).to_ndarray(format="rgb24")
            elif feature["dtype"] == "video":
                for row, picture in zip(rows, _episode_video(root, info, key, episode), strict=True):
                    row[key] = picture
        frames += rows
        assert episode["dataset_to_index"] == len(frames)
    assert len(frames) == info["total_frames"]
    return frames


def _episode_video(root: Path, info: dict, key: str, episode: dict) -> list[np.ndarray]:
    place = {name: episode[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
    start, end = (episode[f"videos/{key}/{name}_timestamp"] for name in ("from", "to"))
    with av.open(str(root / info["video_path"].format(video_key=key, **place))) as container:
        half = 0.5 / info["fps"]
        return [
            frame.to_ndarray(format="rgb24")
            for frame in container.decode(video=0)
            if start - half < frame.time < end - half
        ]
