"""What a LeRobot dataset says about itself: `meta/` of v2.1 and v3.0 read into one form.

v3.0 keeps tasks and the episode index in parquet and packs many episodes into one data or video file; v2.1 keeps them
in JSON lines and one file an episode. Both become `Metadata`, so nothing behind it knows the version. Layout after
LeRobot's documentation and the files its own code writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lightning_embodied.errors import DatasetError
from lightning_embodied.features import Feature

BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Columns every LeRobot dataset has beside the recorded features."""

SUPPORTED_VERSIONS = ("v2.1", "v3.0")
DTYPES = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool", "string", "image", "video")


@dataclass(frozen=True)
class VideoSpan:
    """Where one episode of one camera lies: a file and the second in it at which the episode starts."""

    path: Path
    start: float


@dataclass(frozen=True)
class Episode:
    """One episode: its number, its length in frames, its tasks and the files that hold it."""

    index: int
    length: int
    tasks: tuple[str, ...]
    data_path: Path
    videos: Mapping[str, VideoSpan]


@dataclass(frozen=True)
class Metadata:
    """Everything `meta/` says, of either version.

    Attributes:
        root: The dataset's directory.
        version: `v2.1` or `v3.0`.
        fps: Frames per second.
        features: All features of `info.json`, bookkeeping columns included.
        tasks: Instruction by `task_index`.
        episodes: All episodes; the one at position n has the number n.
        robot_type: Free label, or `None`.
    """

    root: Path
    version: str
    fps: int
    features: dict[str, Feature]
    tasks: dict[int, str]
    episodes: list[Episode]
    robot_type: str | None


def read_metadata(root: Path) -> Metadata:
    """Reads and checks `meta/` of a dataset.

    Args:
        root: The dataset's directory.

    Raises:
        DatasetError: A file is missing or unreadable, or they contradict one another.
    """
    info = _read_info(root)
    version, info_path = info["codebase_version"], root / "meta" / "info.json"
    features = _read_features(info, info_path)
    tasks = _tasks_v30(root) if version == "v3.0" else _tasks_v21(root)
    episodes = _episodes_v30(root, info, features) if version == "v3.0" else _episodes_v21(root, info, features)
    _check_counts(info, info_path, episodes, tasks)
    return Metadata(root, version, int(info["fps"]), features, tasks, episodes, info.get("robot_type"))


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Reads a parquet file, or says in one sentence why it cannot be read.

    Raises:
        DatasetError: The file is missing or damaged.
    """
    return read_parquet(path).read(columns=columns)


def read_parquet(path: Path) -> pq.ParquetFile:
    """Opens a parquet file (reads its footer).

    Raises:
        DatasetError: The file is missing or damaged.
    """
    if not path.is_file():
        raise DatasetError(
            "a file of the dataset is missing", where=path, mend="copy the dataset again; parts of it were left out"
        )
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(
            "a parquet file cannot be read",
            where=path,
            found=f"{path.stat().st_size} bytes, {_first_sentence(error)}",
            expected="a whole parquet file",
            mend="copy the file again; it is truncated or damaged",
        ) from error


def _first_sentence(error: Exception) -> str:
    return str(error).splitlines()[0].split(". ")[0].rstrip(".")


def _read_info(root: Path) -> dict[str, Any]:
    path = root / "meta" / "info.json"
    if not root.is_dir():
        raise DatasetError("there is no dataset here", where=root, mend="check the path; collect or copy a dataset")
    if not path.is_file():
        raise DatasetError(
            "this directory is not a whole LeRobot dataset",
            where=root,
            found="no meta/info.json",
            expected="meta/info.json, which is written last when a dataset is complete",
            mend="give the directory that holds meta/, or record the dataset again if recording was cut off",
        )
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DatasetError("info.json is not valid JSON", where=path, found=error, mend="restore the file") from error
    if not isinstance(info, dict):
        raise DatasetError(
            "info.json is not an object", where=path, found=type(info).__name__, expected="{…}", mend="restore it"
        )
    version = info.get("codebase_version")
    if version not in SUPPORTED_VERSIONS:
        raise DatasetError(
            "this version of the LeRobot format is not supported",
            where=f"{path}: codebase_version",
            found=version,
            expected=" or ".join(SUPPORTED_VERSIONS),
            mend="convert it with LeRobot's own conversion scripts",
        )
    fps = info.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or fps != int(fps) or fps <= 0:
        raise DatasetError("fps is not a positive whole number", where=f"{path}: fps", found=fps, mend="correct it")
    for key in ("features", "total_episodes", "total_frames", "data_path"):
        if key not in info:
            raise DatasetError("info.json lacks a key", where=path, expected=key, mend="restore the file")
    return info


def _read_features(info: Mapping[str, Any], path: Path) -> dict[str, Feature]:
    features: dict[str, Feature] = {}
    for key, value in info["features"].items():
        where = f"{path}: features: {key}"
        try:
            features[key] = Feature.from_dict(value)
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetError("a feature is not described", where=where, found=value, mend="restore it") from error
        if features[key].dtype not in DTYPES:
            raise DatasetError(
                "a feature has an unknown dtype",
                where=where,
                found=features[key].dtype,
                expected=", ".join(DTYPES),
                mend="correct it",
            )
        if features[key].is_visual and (len(features[key].shape) != 3 or features[key].shape[2] != 3):
            raise DatasetError(
                "a picture feature is not (height, width, 3)", where=where, found=features[key].shape, mend="correct it"
            )
    if missing := [key for key in BOOKKEEPING if key not in features]:
        raise DatasetError(
            "info.json lacks features every dataset has", where=path, expected=", ".join(missing), mend="restore it"
        )
    return features


def _check_counts(info: Mapping[str, Any], path: Path, episodes: list[Episode], tasks: Mapping[int, str]) -> None:
    if not episodes:
        raise DatasetError("the dataset is empty", where=path, found="0 episodes", mend="record at least one episode")
    for position, episode in enumerate(episodes):
        if episode.index != position:
            raise DatasetError(
                "the episode table has a gap",
                where=path.parent,
                found=f"episode {episode.index} at position {position}",
                expected=f"episode {position}",
                mend="restore the missing row, or renumber the episodes",
            )
        if episode.length <= 0:
            raise DatasetError(
                "an episode has no frames", where=f"{path.parent}: episode {position}", found=0, mend="restore its row"
            )
    found = {
        "total_episodes": len(episodes),
        "total_frames": sum(episode.length for episode in episodes),
        "total_tasks": len(tasks),
    }
    for key, count in found.items():
        if key in info and info[key] != count:
            raise DatasetError(
                "info.json disagrees with the files",
                where=f"{path}: {key}",
                found=f"{info[key]} in info.json, {count} in the tables of meta/",
                expected="the same number",
                mend="restore the missing files, or correct info.json",
            )


def _tasks_v30(root: Path) -> dict[int, str]:
    path = root / "meta" / "tasks.parquet"
    table = read_table(path)
    # pandas stores an unnamed index under this name; LeRobot itself has written both
    text = next((name for name in ("task", "__index_level_0__") if name in table.column_names), None)
    if text is None or "task_index" not in table.column_names:
        raise DatasetError(
            "the task table lacks a column",
            where=path,
            found=table.column_names,
            expected="task_index and task",
            mend="restore it",
        )
    return dict(zip(table["task_index"].to_pylist(), map(str, table[text].to_pylist()), strict=True))


def _tasks_v21(root: Path) -> dict[int, str]:
    path = root / "meta" / "tasks.jsonl"
    return {int(row["task_index"]): str(row["task"]) for row in _json_lines(path, ("task_index", "task"))}


def _json_lines(path: Path, keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise DatasetError("a file of the dataset is missing", where=path, mend="copy the dataset again")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DatasetError(
                "a line is not valid JSON", where=f"{path}:{number}", found=error, mend="restore the file"
            ) from error
        if missing := [key for key in keys if key not in row]:
            raise DatasetError(
                "a line lacks a key", where=f"{path}:{number}", expected=", ".join(missing), mend="restore the file"
            )
        yield row


def _episodes_v21(root: Path, info: Mapping[str, Any], features: Mapping[str, Feature]) -> list[Episode]:
    cameras = [key for key, feature in features.items() if feature.dtype == "video"]
    chunk_size = int(info.get("chunks_size", 1000))
    episodes = []
    for row in _json_lines(root / "meta" / "episodes.jsonl", ("episode_index", "tasks", "length")):
        index = int(row["episode_index"])
        names = {"episode_chunk": index // chunk_size, "episode_index": index}
        videos = {key: VideoSpan(root / info["video_path"].format(video_key=key, **names), 0.0) for key in cameras}
        data_path = root / info["data_path"].format(**names)
        episodes.append(Episode(index, int(row["length"]), tuple(row["tasks"]), data_path, videos))
    return episodes


def _episodes_v30(root: Path, info: Mapping[str, Any], features: Mapping[str, Feature]) -> list[Episode]:
    cameras = [key for key, feature in features.items() if feature.dtype == "video"]
    wanted = ["episode_index", "tasks", "length", "data/chunk_index", "data/file_index"]
    for key in cameras:
        wanted += [f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]
    paths = sorted((root / "meta" / "episodes").glob("chunk-*/file-*.parquet"))
    if not paths:
        raise DatasetError(
            "the episode table is missing", where=root / "meta" / "episodes", mend="copy the dataset again"
        )
    rows: list[dict[str, Any]] = []
    for path in paths:
        file = read_parquet(path)
        if missing := [name for name in wanted if name not in file.schema_arrow.names]:
            raise DatasetError(
                "the episode table lacks columns",
                where=path,
                expected=", ".join(missing),
                mend="restore the file, or remove the feature from info.json",
            )
        rows += file.read(columns=wanted).to_pylist()
    rows.sort(key=lambda row: int(row["episode_index"]))
    return [_episode_v30(root, info, cameras, row) for row in rows]


def _episode_v30(root: Path, info: Mapping[str, Any], cameras: list[str], row: Mapping[str, Any]) -> Episode:
    videos = {}
    for key in cameras:
        chunk, file = row[f"videos/{key}/chunk_index"], row[f"videos/{key}/file_index"]
        path = root / info["video_path"].format(video_key=key, chunk_index=chunk, file_index=file)
        videos[key] = VideoSpan(path, float(row[f"videos/{key}/from_timestamp"]))
    names = {"chunk_index": row["data/chunk_index"], "file_index": row["data/file_index"]}
    data_path = root / info["data_path"].format(**names)
    return Episode(int(row["episode_index"]), int(row["length"]), tuple(row["tasks"]), data_path, videos)
