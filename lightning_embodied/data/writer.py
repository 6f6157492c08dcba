"""Writes LeRobot v3.0 datasets that LeRobot itself opens.

Everything goes to a hidden directory beside the target, which takes the target's name in one step when the last file
is whole: a directory under construction never opens as a dataset. A clean stop keeps the complete episodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lightning_embodied.data.columns import to_numpy
from lightning_embodied.data.encoding import CODEC_NAMES, VideoCodec, VideoSettings
from lightning_embodied.data.frames import EpisodeBuffer, check_features
from lightning_embodied.data.layout import BOOKKEEPING_FEATURES, episode_schema, tasks_table
from lightning_embodied.data.recording import DATA_PATH, VIDEO_PATH, FileLimits, RecordingFiles
from lightning_embodied.data.stats import PictureHistogram, array_stats
from lightning_embodied.errors import DatasetError
from lightning_embodied.features import Feature, FeatureStats

_EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_META_ROWS = 64  # episodes a row group of the index


class LeRobotDatasetWriter:
    """Records episodes frame by frame; a context manager.

    Leaving the `with` block completes the dataset. Left by an exception or Ctrl-C, the episodes saved so far are
    completed and kept, the unfinished one is dropped; without any, nothing is left behind. A full disk ends in a
    `DatasetError` and leaves nothing.

    Args:
        root: Directory to create; must not exist or be empty.
        fps: Frames per second.
        features: What a frame holds, without the bookkeeping columns; pictures as `image` (PNG in parquet) or `video`.
        robot_type: Free label.
        vcodec: `h264`, `hevc` or `libsvtav1` (smallest, slowest to decode).
        gop: Frames from key frame to key frame; 2 makes random access fast.
        crf: Constant rate factor of the video; lower is better and larger.
        data_files_size_in_mb: Size at which a data file is followed by the next.
        video_files_size_in_mb: Size at which a video file is followed by the next.
        chunks_size: Files a directory.

    Raises:
        DatasetError: The directory is not empty, or a feature cannot be written.
        ConfigError: The video settings cannot be used.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        fps: int,
        features: Mapping[str, Feature],
        robot_type: str | None = None,
        vcodec: VideoCodec = "h264",
        gop: int = 2,
        crf: int = 30,
        data_files_size_in_mb: float = 100,
        video_files_size_in_mb: float = 200,
        chunks_size: int = 1000,
    ) -> None:
        self.root = Path(root)
        if self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
            raise DatasetError(
                "the directory to record into is not empty",
                where=self.root,
                expected="a directory that does not exist or is empty",
                mend="choose another directory, or remove this one",
            )
        check_features(features)
        self.fps, self.robot_type = fps, robot_type
        self.features = {**features, **BOOKKEEPING_FEATURES}
        self._recorded = dict(features)
        self._video = VideoSettings(vcodec, fps, gop, crf)
        self._cameras = [key for key, feature in features.items() if feature.dtype == "video"]
        for key in self._cameras:
            self._video.check(key, *features[key].shape[:2])
        self._limits = FileLimits(data_files_size_in_mb, video_files_size_in_mb, chunks_size)
        self._tasks: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []
        self._frames = 0
        self._histograms = {key: PictureHistogram() for key, f in features.items() if f.is_visual}
        self._buffer: EpisodeBuffer | None = None
        self._closed = False
        self._work = self.root.parent / f".{self.root.name}.recording-{os.getpid()}"
        self._files = RecordingFiles(self._work, self.features, self._video, self._limits)
        with self._or_disk_error():
            self._work.mkdir(parents=True)

    @property
    def num_episodes(self) -> int:
        """Episodes saved so far."""
        return len(self._rows)

    def add_frame(self, frame: Mapping[str, Any]) -> None:
        """Adds a frame to the current episode.

        Args:
            frame: A value for each feature (numbers as arrays of its shape, or scalars for shape (1,); pictures uint8
                `[H, W, 3]`; strings), and `task`, the instruction.

        Raises:
            DatasetError: A value is missing, unknown, not finite or of another shape or dtype; nothing was added.
        """
        self._check_open()
        if self._buffer is None:
            self._buffer = EpisodeBuffer(self._recorded, self._video)
        self._buffer.add(frame)

    def discard_episode(self) -> None:
        """Drops the frames of the current episode."""
        self._buffer = None

    def save_episode(self) -> int:
        """Completes the current episode.

        Returns:
            Its number.

        Raises:
            DatasetError: It has no frames, or the disk is full (nothing is left then).
        """
        self._check_open()
        buffer = self._buffer
        if buffer is None or not buffer.length:
            raise DatasetError("an episode has no frames", where=self.root, mend="add frames before saving it")
        with self._or_disk_error(), _interrupt_later():
            self._buffer = None
            self._commit(buffer)
        return self.num_episodes - 1

    def finalize(self) -> None:
        """Completes the dataset and gives it its name; an unsaved episode is dropped.

        Raises:
            DatasetError: There is no episode, or the disk is full (nothing is left then).
        """
        self._check_open()
        if not self._rows:
            self._abort()
            raise DatasetError("no episode was recorded", where=self.root, mend="save at least one episode")
        with self._or_disk_error(), _interrupt_later():
            self._closed = True
            self._files.close()
            self._write_meta()
            if self.root.exists():
                self.root.rmdir()
            self._work.rename(self.root)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._closed:
            return
        self.discard_episode()
        if self._rows:
            self.finalize()
        elif kind is None:
            self.finalize()  # raises: nothing was recorded
        else:
            self._abort()

    def _check_open(self) -> None:
        if self._closed:
            raise DatasetError("this writer is closed", where=self.root, mend="create another writer")

    @contextlib.contextmanager
    def _or_disk_error(self) -> Iterator[None]:
        try:
            yield
        except DatasetError:
            raise
        except (OSError, av.FFmpegError, pa.ArrowException) as error:
            self._abort()
            raise DatasetError(
                "the dataset cannot be written",
                where=self.root,
                found=error,
                expected="a disk with room",
                mend="free some space and record again; the incomplete files were removed",
            ) from error

    def _abort(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError, av.FFmpegError, pa.ArrowException):
            self._files.close()
        shutil.rmtree(self._work, ignore_errors=True)

    def _commit(self, buffer: EpisodeBuffer) -> None:
        index, length = self.num_episodes, buffer.length
        buffer.finish()
        tasks = dict.fromkeys(buffer.tasks)
        for task in tasks:
            self._tasks.setdefault(task, len(self._tasks))
        values = {
            **buffer.values,
            "timestamp": list((np.arange(length) / self.fps).astype(np.float32)[:, None]),
            "frame_index": list(np.arange(length)[:, None]),
            "episode_index": [np.array([index])] * length,
            "index": list((self._frames + np.arange(length))[:, None]),
            "task_index": [np.array([self._tasks[task]]) for task in buffer.tasks],
        }
        row: dict[str, Any] = {"episode_index": index, "tasks": list(tasks), "length": length}
        row |= {f"data/{key}": number for key, number in self._files.add_rows(values).items()}
        row |= {"dataset_from_index": self._frames, "dataset_to_index": self._frames + length}
        for key, video in buffer.videos.items():
            row |= {f"videos/{key}/{name}": value for name, value in self._files.add_video(key, video).items()}
        for key, feature in self.features.items():
            if feature.dtype != "string":
                stats = buffer.histograms[key].stats() if feature.is_visual else array_stats(np.stack(values[key]))
                row |= {f"stats/{key}/{name}": value for name, value in stats.to_dict().items()}
        for key, histogram in buffer.histograms.items():
            self._histograms[key].merge(histogram)
        self._frames += length
        self._rows.append(row)

    def _write_meta(self) -> None:
        meta = self._work / "meta"
        meta.mkdir()
        pq.write_table(tasks_table(list(self._tasks)), meta / "tasks.parquet")
        self._write_episodes()
        stats = {key: value.to_dict() for key, value in self._stats().items()}
        (meta / "stats.json").write_text(json.dumps(stats, indent=4), encoding="utf-8")
        (meta / "info.json").write_text(json.dumps(self._info(), indent=4, ensure_ascii=False), encoding="utf-8")

    def _write_episodes(self) -> None:
        schema, number, rows = episode_schema(self.features), 0, list(self._rows)
        while rows:
            place = self._limits.place(number)
            path = self._work / _EPISODES_PATH.format(**place)
            path.parent.mkdir(parents=True, exist_ok=True)
            with pq.ParquetWriter(path, schema) as writer:
                while rows and path.stat().st_size < self._limits.data_mb * 2**20:
                    batch, rows = rows[:_META_ROWS], rows[_META_ROWS:]
                    marks = {f"meta/episodes/{key}": value for key, value in place.items()}
                    writer.write_table(pa.Table.from_pylist([{**row, **marks} for row in batch], schema=schema))
            number += 1

    def _stats(self) -> dict[str, FeatureStats]:
        """Over all frames: numbers read back column by column, pictures from the counts of their raw values."""
        stats = {}
        paths = sorted(self._work.glob("data/*/*.parquet"))
        for key, feature in self.features.items():
            if feature.is_visual:
                stats[key] = self._histograms[key].stats()
            elif feature.dtype != "string":
                columns = [pq.read_table(path, columns=[key])[key] for path in paths]
                stats[key] = array_stats(np.concatenate([to_numpy(column, feature, key) for column in columns]))
        return stats

    def _info(self) -> dict[str, Any]:
        return {
            "codebase_version": "v3.0",
            "fps": self.fps,
            "features": {key: self._described(feature) for key, feature in self.features.items()},
            "total_episodes": self.num_episodes,
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": self._limits.chunks_size,
            "data_files_size_in_mb": self._limits.data_mb,
            "video_files_size_in_mb": self._limits.video_mb,
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self._cameras else None,
            "robot_type": self.robot_type,
            "splits": {"train": f"0:{self.num_episodes}"},
        }

    def _described(self, feature: Feature) -> dict[str, Any]:
        described = feature.to_dict()
        if feature.dtype == "video":
            height, width, channels = feature.shape
            described["info"] = {
                "video.height": height,
                "video.width": width,
                "video.codec": CODEC_NAMES[self._video.codec],
                "video.pix_fmt": "yuv420p",
                "video.fps": self.fps,
                "video.channels": channels,
                "has_audio": False,
                "video.g": self._video.gop,
                "video.crf": self._video.crf,
                "is_depth_map": False,
            }
        return described


@contextlib.contextmanager
def _interrupt_later() -> Iterator[None]:
    """Holds Ctrl-C back while files change together, then lets it through."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending and callable(previous):
        previous(*pending[0])
