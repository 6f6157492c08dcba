"""Parquet columns as numpy arrays, whole columns at a time.

A sample then costs a slice of an array and no pyarrow or pandas object. Values are checked once, while they are read:
type, shape, and that they are finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lightning_embodied.data.metadata import Episode, Metadata, read_parquet
from lightning_embodied.errors import DatasetError
from lightning_embodied.features import Feature

Array = NDArray[Any]

TIMESTAMP_TOLERANCE = 1e-4
"""Seconds by which the distance of two timestamps may differ from 1 / fps (LeRobot's default)."""


def to_numpy(column: pa.ChunkedArray, feature: Feature, where: str) -> Array:
    """One column as an array of the feature's dtype and shape.

    Args:
        column: The column; numbers, lists of numbers (fixed or not, nested or not), booleans or strings.
        feature: What it must hold.
        where: Names the column in errors.

    Returns:
        `[rows, *feature.shape]`; strings `[rows]` of objects.

    Raises:
        DatasetError: Another type or shape, or missing values.
    """
    rows, array = len(column), column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # older pyarrow
        array = array.chunk(0) if array.num_chunks else pa.array([], type=column.type)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    found = str(array.type)
    if array.null_count:
        raise DatasetError(
            "a column has missing values",
            where=where,
            found=f"{array.null_count} of {rows} are null",
            mend="fill them in",
        )
    if feature.dtype == "string":
        if not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
            raise _wrong_type(where, found, feature)
        return np.array(array.to_pylist(), dtype=object)
    while isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        array = array.flatten()
    kinds = {"f": pa.types.is_floating, "i": pa.types.is_integer, "u": pa.types.is_integer, "b": pa.types.is_boolean}
    dtype = np.dtype(feature.dtype)
    if not kinds[dtype.kind](array.type):
        raise _wrong_type(where, found, feature)
    values: Array = array.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    if values.size != rows * math.prod(feature.shape):
        raise DatasetError(
            "a column has another shape than info.json says",
            where=where,
            found=f"{values.size} numbers in {rows} rows",
            expected=f"shape {feature.shape} a row",
            mend="correct the shape in info.json, or restore the file",
        )
    return np.reshape(values, (rows, *feature.shape))


def _wrong_type(where: str, found: str, feature: Feature) -> DatasetError:
    return DatasetError(
        "a column has another type than info.json says",
        where=where,
        found=found,
        expected=feature.dtype,
        mend="correct the dtype in info.json, or write the column again",
    )


def load_columns(metadata: Metadata, episodes: Sequence[Episode]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Reads and checks everything in the data files but pictures.

    Args:
        metadata: The dataset's.
        episodes: The selected episodes.

    Returns:
        The columns `[frames, *shape]` in the order of `episodes`, and where each frame lies: `file`, the position of
        its file in `data_paths(episodes)`, and `row`, its row there.

    Raises:
        DatasetError: A data file is missing, damaged or contradicts `meta/`.
    """
    keys = [key for key, feature in metadata.features.items() if not feature.is_visual]
    pictures = [key for key, feature in metadata.features.items() if feature.dtype == "image"]
    wanted = {episode.index for episode in episodes}
    by_file: dict[Path, list[Episode]] = {}
    for episode in metadata.episodes:
        by_file.setdefault(episode.data_path, []).append(episode)
    pieces: dict[int, dict[str, Array]] = {}
    for number, path in enumerate(data_paths(episodes)):
        columns = _load_file(path, metadata.features, keys, pictures)
        _check_file_episodes(columns["episode_index"], by_file[path], path)
        for episode in by_file[path]:
            if episode.index in wanted:
                pieces[episode.index] = _episode_rows(columns, episode, number, path)
    joined = {key: np.concatenate([pieces[e.index][key] for e in episodes]) for key in [*keys, "#file", "#row"]}
    places = {"file": joined.pop("#file"), "row": joined.pop("#row")}
    _check_tasks(joined["task_index"], metadata)
    return joined, places


def data_paths(episodes: Sequence[Episode]) -> list[Path]:
    """The distinct data files of some episodes, sorted."""
    return sorted({episode.data_path for episode in episodes})


def _load_file(path: Path, features: Mapping[str, Feature], keys: list[str], pictures: list[str]) -> dict[str, Array]:
    file = read_parquet(path)
    if missing := [key for key in [*keys, *pictures] if key not in file.schema_arrow.names]:
        raise DatasetError(
            "a data file lacks a column that info.json names",
            where=path,
            expected=", ".join(missing),
            mend="restore the file, or remove the feature from info.json",
        )
    try:
        table = file.read(columns=keys)
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(
            "a parquet file cannot be read", where=path, found=error, mend="copy the file again; it is damaged"
        ) from error
    columns = {key: to_numpy(table[key], features[key], f"{path}: {key}") for key in keys}
    for key, values in columns.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            row = int(np.argwhere(~np.isfinite(values))[0, 0])
            raise DatasetError(
                "a column has values that are not finite",
                where=f"{path}: {key}",
                found=f"{values[row].tolist()} at frame {int(columns['frame_index'][row, 0])} "
                f"of episode {int(columns['episode_index'][row, 0])}",
                expected="finite numbers",
                mend="remove or repair this episode; training on it would turn every weight into NaN",
            )
    return columns


def _episode_rows(columns: Mapping[str, Array], episode: Episode, number: int, path: Path) -> dict[str, Array]:
    rows = np.flatnonzero(columns["episode_index"][:, 0] == episode.index)
    where = f"{path}: episode {episode.index}"
    if len(rows) != episode.length:
        raise DatasetError(
            "a data file disagrees with the episode table",
            where=where,
            found=f"{len(rows)} rows",
            expected=f"{episode.length} frames",
            mend="restore the file, or correct the episode table in meta/",
        )
    if not np.array_equal(columns["frame_index"][rows, 0], np.arange(episode.length)):
        raise DatasetError(
            "the frames of an episode are not numbered from 0 in order",
            where=f"{where}: frame_index",
            mend="sort the rows by frame_index, or record the episode again",
        )
    piece = {key: values[rows] for key, values in columns.items()}
    return {**piece, "#file": np.full(len(rows), number), "#row": rows}


def _check_file_episodes(found: Array, episodes: Sequence[Episode], path: Path) -> None:
    extra = np.setdiff1d(found, [episode.index for episode in episodes])
    if len(extra):
        raise DatasetError(
            "a data file holds episodes that the episode table does not place there",
            where=f"{path}: episode_index",
            found=", ".join(str(int(index)) for index in extra[:5]),
            mend="restore meta/episodes",
        )


def _check_tasks(task_index: Array, metadata: Metadata) -> None:
    unknown = np.setdiff1d(task_index, list(metadata.tasks))
    if len(unknown):
        raise DatasetError(
            "the data name a task that the task table does not have",
            where=f"{metadata.root}: task_index",
            found=int(unknown[0]),
            expected=f"one of {sorted(metadata.tasks)}",
            mend="restore meta/tasks.parquet (v2.1: meta/tasks.jsonl)",
        )


def check_timestamps(columns: Mapping[str, Array], offsets: Array, fps: int, where: str) -> None:
    """Checks that frames follow one another at 1 / fps within each episode.

    Args:
        columns: Needs `timestamp`, `episode_index` and `frame_index`, each `[frames, 1]`.
        offsets: Position of each episode's first frame.
        fps: Frames per second of `info.json`.
        where: Names the dataset in errors.

    Raises:
        DatasetError: They do not.
    """
    times = columns["timestamp"][:, 0].astype(np.float64)
    error = np.abs(np.diff(times) - 1.0 / fps) - np.spacing(columns["timestamp"][1:, 0].astype(np.float32)) * 2
    error[offsets[1:] - 1] = 0.0  # from one episode to the next
    if len(error) and error.max() > TIMESTAMP_TOLERANCE:
        worst = int(error.argmax())
        raise DatasetError(
            "timestamps and fps disagree",
            where=f"{where}: episode {int(columns['episode_index'][worst, 0])}, "
            f"frame {int(columns['frame_index'][worst + 1, 0])}",
            found=f"{times[worst + 1] - times[worst]:.6f} s after the frame before",
            expected=f"{1.0 / fps:.6f} s (fps = {fps}), within {TIMESTAMP_TOLERANCE} s",
            mend="correct fps in info.json, or resample the recording to a constant rate",
        )
