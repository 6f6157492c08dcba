"""Frames of mp4 files by time: PyAV always, torchcodec when it is installed.

A decoder is opened in the process that uses it and never crosses a fork: sharing one's file offset and codec state
between DataLoader workers gives wrong frames. The number of open decoders is bounded (least recently used goes first).
"""

from __future__ import annotations

import importlib
import math
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from lightning_embodied.errors import DatasetError, import_extra

Picture = NDArray[np.uint8]
VideoBackend = Literal["auto", "pyav", "torchcodec"]

FRAME_TOLERANCE = 1e-4
"""Seconds by which a frame's time may differ from the time asked for (LeRobot's default)."""

_READ_ON = 4  # frames ahead that are cheaper to decode on to than to seek for


class Decoder(Protocol):
    """Reads frames of one file."""

    def read(self, times: Sequence[float]) -> list[Picture]:
        """Frames `[height, width, 3]` at ascending times in seconds."""
        ...


class PyAVDecoder:
    """One open file, decoded with FFmpeg through PyAV on the calling thread.

    Args:
        path: The file.
        fps: Frames per second it must have.
        size: Height and width it must have, pixels.

    Raises:
        DatasetError: The file cannot be decoded, or has another rate or size.
    """

    def __init__(self, path: Path, fps: int, size: tuple[int, int]) -> None:
        self._path, self._fps = path, fps
        try:
            self._container = av.open(str(path))
        except (OSError, av.FFmpegError) as error:
            raise _unreadable(path, error) from error
        if not self._container.streams.video:
            raise _unreadable(path, "no video stream")
        stream = self._container.streams.video[0]
        stream.thread_type = "NONE"  # workers are the parallelism; codec threads would also add frames of delay
        stream.codec_context.thread_count = 1
        self._stream, self._tick = stream, float(stream.time_base or 1 / av.time_base)
        self._check(size)
        self._reformatter = VideoReformatter()
        self._frames: Iterator[av.VideoFrame] = iter(())
        self._current: av.VideoFrame | None = None

    def _check(self, size: tuple[int, int]) -> None:
        rate, context = self._stream.average_rate, self._stream.codec_context
        if rate is not None and abs(float(rate) / self._fps - 1) > 1e-3:
            raise DatasetError(
                "a video has another frame rate than info.json says",
                where=self._path,
                found=f"{float(rate):.6g} frames/s",
                expected=f"{self._fps} frames/s",
                mend="correct fps in info.json, or encode the video again",
            )
        if (context.height, context.width) != size:
            raise DatasetError(
                "a video has another size than info.json says",
                where=self._path,
                found=f"{context.height}x{context.width} (height x width)",
                expected=f"{size[0]}x{size[1]}",
                mend="correct the shape in info.json, or encode the video again",
            )

    def read(self, times: Sequence[float]) -> list[Picture]:
        """Frames `[height, width, 3]` at ascending times in seconds.

        Raises:
            DatasetError: There is no frame at a time, or the file is damaged.
        """
        try:
            return [self._reformat(self._at(time)) for time in times]
        except (OSError, av.FFmpegError) as error:
            self._current = None
            raise _unreadable(self._path, error) from error

    def _at(self, time: float) -> av.VideoFrame:
        ahead = math.inf if self._current is None else (time - self._time()) * self._fps
        if not -0.5 < ahead < _READ_ON:
            self._seek(time)
        while self._current is not None and self._time() < time - FRAME_TOLERANCE:
            self._current = next(self._frames, None)
        if self._current is None or abs(self._time() - time) > FRAME_TOLERANCE:
            found = "the end of the file" if self._current is None else f"the next frame at {self._time():.6f} s"
            self._current = None
            raise _no_frame(self._path, time, found)
        return self._current

    def _seek(self, time: float) -> None:
        # A key frame's decoding time can lie before its display time, so the first landing may be too late.
        for earlier in (0.0, 1.0, math.inf):
            target = max(0.0, time - earlier)
            self._container.seek(round(target / self._tick), stream=self._stream, backward=True)
            self._frames = self._container.decode(self._stream)
            self._current = next(self._frames, None)
            if self._current is not None and self._time() <= time + FRAME_TOLERANCE:
                return

    def _time(self) -> float:
        if self._current is None or self._current.time is None:
            raise _unreadable(self._path, "a frame without a time")
        return self._current.time

    def _reformat(self, frame: av.VideoFrame) -> Picture:
        # one thread: handing slices of a small picture to others takes longer than converting it
        return np.array(self._reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray(), dtype=np.uint8)


class TorchcodecDecoder:
    """One open file, decoded with torchcodec (faster at small sizes; needs the system's FFmpeg).

    Args:
        path: The file.
        fps: Frames per second it must have.
        size: Height and width it must have, pixels.

    Raises:
        DatasetError: The file cannot be decoded, or has another rate or size.
        MissingExtraError: torchcodec cannot be imported.
    """

    def __init__(self, path: Path, fps: int, size: tuple[int, int]) -> None:
        PyAVDecoder(path, fps, size)  # one place for the checks and their messages
        decoders = import_extra("torchcodec.decoders", "torchcodec")
        self._path = path
        self._decoder: Any = decoders.VideoDecoder(
            str(path), dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact"
        )

    def read(self, times: Sequence[float]) -> list[Picture]:
        """Frames `[height, width, 3]` at ascending times in seconds.

        Raises:
            DatasetError: There is no frame at a time, or the file is damaged.
        """
        metadata = self._decoder.metadata
        indices = [round((time - metadata.begin_stream_seconds) * metadata.average_fps) for time in times]
        for index, time in zip(indices, times, strict=True):
            if not 0 <= index < metadata.num_frames:
                raise _no_frame(self._path, time, f"{metadata.num_frames} frames in the file")
        try:
            batch = self._decoder.get_frames_at(indices)
        except RuntimeError as error:
            raise _unreadable(self._path, error) from error
        for found, time in zip(batch.pts_seconds.tolist(), times, strict=True):
            if abs(found - time) > FRAME_TOLERANCE:
                raise _no_frame(self._path, time, f"the nearest frame at {found:.6f} s")
        return [frame.numpy() for frame in batch.data]


def _unreadable(path: Path, why: object) -> DatasetError:
    return DatasetError(
        "a video file cannot be decoded",
        where=path,
        found=why.strerror if isinstance(why, av.FFmpegError) else why,
        expected="a whole mp4 file",
        mend="copy the file again; it is truncated or damaged",
    )


def _no_frame(path: Path, time: float, found: str) -> DatasetError:
    return DatasetError(
        "a video has no frame where the episode table and the timestamps place one",
        where=path,
        found=found,
        expected=f"a frame at {time:.6f} s, within {FRAME_TOLERANCE} s",
        mend="restore the video file, or correct fps and the episode table in meta/",
    )


def check_mp4(path: Path) -> None:
    """Checks that a file exists and that its top-level boxes end where the file ends (a few reads, no decoding).

    Raises:
        DatasetError: It is missing, truncated or not an mp4 file.
    """
    if not path.is_file():
        raise DatasetError("a file of the dataset is missing", where=path, mend="copy the dataset again")
    size, position, kinds = path.stat().st_size, 0, set()
    with path.open("rb") as file:
        while position + 8 <= size:
            file.seek(position)
            header = file.read(16)
            length, kind = int.from_bytes(header[:4], "big"), header[4:8]
            if length == 1:  # a 64-bit length follows the kind
                length = int.from_bytes(header[8:16], "big")
            elif length == 0:  # the last box may run to the end of the file
                length = size - position
            kinds.add(kind)
            position += max(length, 8)
    if position != size or b"moov" not in kinds:
        raise _unreadable(path, f"{size} bytes, cut off or without an index")


def choose_decoder(backend: VideoBackend) -> Callable[[Path, int, tuple[int, int]], Decoder]:
    """The decoder class for a backend; `auto` takes torchcodec when it can be imported.

    Raises:
        MissingExtraError: `torchcodec` was asked for and cannot be imported.
    """
    if backend == "pyav":
        return PyAVDecoder
    if backend == "torchcodec":
        import_extra("torchcodec.decoders", "torchcodec")
        return TorchcodecDecoder
    try:
        importlib.import_module("torchcodec.decoders")
    except Exception:  # absent, or built against another torch or FFmpeg: PyAV reads the same frames
        return PyAVDecoder
    return TorchcodecDecoder


# FFmpeg's scaler owns threads that do not exist after a fork; freeing it in the child waits for them for ever. So a
# child neither uses nor frees what it inherited.
_POOLS: weakref.WeakSet[DecoderPool] = weakref.WeakSet()
_INHERITED: list[object] = []


def _after_fork() -> None:
    for pool in list(_POOLS):
        pool.abandon()


os.register_at_fork(after_in_child=_after_fork)


class DecoderPool:
    """Open decoders of this process, the least recently used closed first.

    Args:
        backend: See `choose_decoder`.
        fps: Frames per second of the dataset.
        capacity: Most decoders kept open.
    """

    def __init__(self, backend: VideoBackend, fps: int, capacity: int = 32) -> None:
        self._backend, self._fps, self._capacity = backend, fps, capacity
        choose_decoder(backend)
        self._reset()

        _POOLS.add(self)

    def _reset(self) -> None:
        self._open: OrderedDict[Path, Decoder] = OrderedDict()

    def abandon(self) -> None:
        """Forgets the parent's decoders in a forked child, without freeing them."""
        _INHERITED.append(self._open)
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("_backend", "_fps", "_capacity")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
        _POOLS.add(self)

    def get(self, path: Path, size: tuple[int, int]) -> Decoder:
        """The decoder of a file, opened in this process.

        Args:
            path: The file.
            size: Height and width it must have, pixels.
        """
        decoder = self._open.pop(path, None)
        if decoder is None:
            decoder = choose_decoder(self._backend)(path, self._fps, size)
            while len(self._open) >= self._capacity:
                self._open.popitem(last=False)
        self._open[path] = decoder
        return decoder
