"""The data and video files of a dataset that is being written, each followed by the next when it is large enough.

Data, and each camera, move on to their next file independently, as in LeRobot's own datasets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lightning_embodied.data.encoding import EpisodeVideo, VideoFile, VideoSettings
from lightning_embodied.data.layout import column_array, data_schema
from lightning_embodied.features import Feature

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


@dataclass(frozen=True)
class FileLimits:
    """When the next file begins.

    Attributes:
        data_mb: Size of a data file, 2^20 bytes.
        video_mb: Size of a video file, 2^20 bytes.
        chunks_size: Files a directory.
    """

    data_mb: float
    video_mb: float
    chunks_size: int

    def place(self, number: int) -> dict[str, int]:
        """Chunk and file index of the file with this number."""
        return {"chunk_index": number // self.chunks_size, "file_index": number % self.chunks_size}


class RecordingFiles:
    """Open files of a dataset under construction.

    Args:
        work: Directory to write in.
        features: All features, bookkeeping columns included.
        video: Encoder settings.
        limits: When the next file begins.
    """

    def __init__(self, work: Path, features: Mapping[str, Feature], video: VideoSettings, limits: FileLimits) -> None:
        self._work, self._features, self._settings, self._limits = work, features, video, limits
        self._schema = data_schema(features)
        self._data: tuple[int, Path, pq.ParquetWriter] | None = None
        self._videos: dict[str, tuple[int, VideoFile]] = {}

    def add_rows(self, values: Mapping[str, Sequence[Any]]) -> dict[str, int]:
        """Writes an episode's rows as one row group.

        Args:
            values: One value a frame for each column.

        Returns:
            `chunk_index` and `file_index` of the file.
        """
        arrays = [column_array(values[field.name], field, self._features[field.name]) for field in self._schema]
        table = pa.table(arrays, schema=self._schema)
        number = 0 if self._data is None else self._data[0]
        if self._data is not None and self._data[1].stat().st_size + table.nbytes >= self._limits.data_mb * 2**20:
            self._data[2].close()
            self._data, number = None, number + 1
        if self._data is None:
            path = self._work / DATA_PATH.format(**self._limits.place(number))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._data = (number, path, pq.ParquetWriter(path, self._schema))
        self._data[2].write_table(table, row_group_size=len(table))
        return self._limits.place(number)

    def add_video(self, key: str, video: EpisodeVideo) -> dict[str, float]:
        """Joins an episode to its camera's file.

        Args:
            key: The camera.
            video: The finished episode.

        Returns:
            `chunk_index` and `file_index` of the file, and where in it the episode lies, seconds.
        """
        number, file = self._videos.get(key, (0, None))
        if file is not None and file.nbytes + video.nbytes >= self._limits.video_mb * 2**20:
            file.close()
            number, file = number + 1, None
        if file is None:
            path = self._work / VIDEO_PATH.format(video_key=key, **self._limits.place(number))
            height, width, _ = self._features[key].shape
            file = VideoFile(path, self._settings, height, width)
            self._videos[key] = (number, file)
        start, fps = file.frames, self._settings.fps
        file.append(video)
        return {**self._limits.place(number), "from_timestamp": start / fps, "to_timestamp": file.frames / fps}

    def close(self) -> None:
        """Completes all files; one that fails does not keep the others open.

        Raises:
            OSError: A file could not be completed.
        """
        data, videos = self._data, [file for _, file in self._videos.values()]
        self._data, self._videos = None, {}
        with contextlib.ExitStack() as stack:
            for file in videos:
                stack.callback(file.close)
            if data is not None:
                stack.callback(data[2].close)
