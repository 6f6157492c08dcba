"""PNG and JPEG pictures kept as bytes in parquet, read by row group and decoded with FFmpeg.

Row groups are kept decompressed in a bounded cache, as buffers and offsets: one picture then is a slice of bytes.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lightning_embodied.data.metadata import read_parquet
from lightning_embodied.errors import DatasetError

Picture = NDArray[np.uint8]

_CODECS = ((b"\x89PNG", "png"), (b"\xff\xd8", "mjpeg"))


def decode_picture(data: bytes, where: str) -> Picture:
    """One PNG or JPEG picture as `[height, width, 3]`.

    Args:
        data: The file's bytes.
        where: Names the picture in errors.

    Raises:
        DatasetError: Neither PNG nor JPEG, or damaged.
    """
    name = next((name for magic, name in _CODECS if data.startswith(magic)), None)
    if name is None:
        raise DatasetError(
            "a picture is neither PNG nor JPEG", where=where, found=data[:8], mend="encode it as PNG or JPEG"
        )
    # A context for each picture: FFmpeg's PNG decoder keeps state (for APNG) that spoils the next picture.
    context: Any = av.CodecContext.create(name, "r")
    context.thread_count = 1
    try:
        (frame,) = context.decode(av.Packet(data))
    except (av.FFmpegError, ValueError) as error:
        raise DatasetError(
            "a picture cannot be decoded",
            where=where,
            found=str(getattr(error, "strerror", error)),
            mend="record it again",
        ) from error
    return np.array(frame.to_ndarray(format="rgb24"), dtype=np.uint8)  # a copy: the frame's memory is FFmpeg's


def encode_png(picture: Picture) -> bytes:
    """One picture `[height, width, 3]` as PNG."""
    context = av.CodecContext.create("png", "w")
    context.height, context.width = picture.shape[:2]
    context.pix_fmt, context.time_base = "rgb24", Fraction(1)
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
    return b"".join(bytes(packet) for packet in [*context.encode(frame), *context.encode(None)])


class _Blobs:
    """One column of one row group: a buffer and where each row's bytes start."""

    def __init__(self, array: pa.Array) -> None:
        offset, buffers = array.offset, array.buffers()
        dtype = np.int64 if pa.types.is_large_binary(array.type) else np.int32
        self.nulls = array.null_count
        self._starts = np.frombuffer(buffers[1], dtype=dtype)[offset : offset + len(array) + 1]
        self._data = memoryview(buffers[2]) if buffers[2] is not None else memoryview(b"")

    @property
    def nbytes(self) -> int:
        return int(self._starts[-1] - self._starts[0])

    def __getitem__(self, row: int) -> bytes:
        return bytes(self._data[self._starts[row] : self._starts[row + 1]])


class ParquetPictures:
    """Random access to picture columns of parquet files.

    Args:
        paths: The data files.
        cache_bytes: Most bytes of row groups kept, per process.
    """

    def __init__(self, paths: Sequence[Path], cache_bytes: int = 1 << 30) -> None:
        self._paths, self._cache_bytes = list(paths), cache_bytes
        self._first_rows = [_first_rows(path) for path in self._paths]
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._files: dict[int, pq.ParquetFile] = {}
        self._groups: OrderedDict[tuple[int, int, str], _Blobs] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("_paths", "_cache_bytes", "_first_rows")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def read(self, file: int, row: int, key: str) -> Picture:
        """One picture as `[height, width, 3]`.

        Args:
            file: Position of its file among `paths`.
            row: Row in the file.
            key: The column.

        Raises:
            DatasetError: The file or the picture is damaged.
        """
        if self._pid != os.getpid():
            self._reset()
        starts = self._first_rows[file]
        group = int(np.searchsorted(starts, row, side="right")) - 1
        blobs = self._groups.pop((file, group, key), None)
        if blobs is None:
            blobs = self._load(file, group, key)
        self._groups[file, group, key] = blobs
        return decode_picture(blobs[row - int(starts[group])], f"{self._paths[file]}: {key}, row {row}")

    def _load(self, file: int, group: int, key: str) -> _Blobs:
        if file not in self._files:
            self._files[file] = read_parquet(self._paths[file])
        path = self._paths[file]
        try:
            column = self._files[file].read_row_group(group, columns=[f"{key}.bytes"])[key].combine_chunks()
        except (pa.ArrowException, OSError, KeyError) as error:
            raise DatasetError(
                "a picture column cannot be read", where=f"{path}: {key}", found=error, mend="copy the file again"
            ) from error
        array = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        blobs = _Blobs(array.field("bytes"))
        if blobs.nulls:
            raise DatasetError(
                "a picture column has rows without bytes",
                where=f"{path}: {key}",
                found=f"{blobs.nulls} rows",
                expected="PNG or JPEG bytes in the parquet file",
                mend="embed the pictures, or record the dataset again",
            )
        used = sum(kept.nbytes for kept in self._groups.values()) + blobs.nbytes
        while self._groups and used > self._cache_bytes:
            used -= self._groups.popitem(last=False)[1].nbytes
        return blobs


def _first_rows(path: Path) -> NDArray[np.int64]:
    footer = read_parquet(path).metadata
    rows = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
    return np.concatenate([[0], np.cumsum(rows)])[:-1].astype(np.int64)
