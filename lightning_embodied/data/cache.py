"""Pictures decoded once into a memory map.

Random access to video costs 0.6-2 ms a frame at 96 pixels, more than a small policy's training step can wait for. The
map is one file on disk that forked and spawned workers share through the page cache; the process that made it deletes
it when the dataset goes.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_embodied.errors import ConfigError, DatasetError


class DecodedCache:
    """All pictures of a dataset, uint8, on disk.

    Args:
        shapes: `(H, W, C)` by camera.
        frames: Pictures a camera.
        pictures: Gives all pictures `[H, W, C]` of a camera, in order.
        limit_gb: Most room they may take, 10^9 bytes.

    Raises:
        ConfigError: They need more room than `limit_gb`.
        DatasetError: The disk is full.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        frames: int,
        pictures: Callable[[str], Iterable[NDArray[np.uint8]]],
        limit_gb: float,
    ) -> None:
        self._frames = frames
        self._shapes = {key: (shape[2], shape[0], shape[1]) for key, shape in shapes.items()}
        needed = frames * sum(int(np.prod(shape)) for shape in shapes.values()) / 1e9
        if needed > limit_gb:
            raise ConfigError(
                "the decoded pictures do not fit in the cache",
                where="decoded_cache_gb",
                found=f"{needed:.2g} GB needed",
                expected=f"at most {limit_gb} GB",
                mend="raise decoded_cache_gb, name fewer cameras or episodes, or set it to 0",
            )
        self._directory = tempfile.mkdtemp(prefix="decoded-pictures-")
        self._finalizer = weakref.finalize(self, _remove, self._directory, os.getpid())
        try:
            for number, key in enumerate(self._shapes):
                self._fill(self._path(number), pictures(key))
        except OSError as error:
            self._finalizer()
            raise DatasetError(
                "the decoded pictures cannot be written",
                where=self._directory,
                found=error,
                expected=f"{needed:.2g} GB of room",
                mend="free some space, set TMPDIR to another disk, or set decoded_cache_gb to 0",
            ) from error
        except BaseException:
            self._finalizer()
            raise
        self._maps = self._open()

    def _path(self, number: int) -> Path:
        return Path(self._directory) / f"{number}.bin"

    @staticmethod
    def _fill(path: Path, pictures: Iterable[NDArray[np.uint8]]) -> None:
        # Plain writes: on a full disk they raise, where a write through a memory map would kill the process.
        with path.open("wb") as file:
            for picture in pictures:
                file.write(np.ascontiguousarray(picture.transpose(2, 0, 1)).data)

    def _open(self) -> dict[str, NDArray[np.uint8]]:
        return {
            key: np.memmap(self._path(number), np.uint8, "r", shape=(self._frames, *shape))
            for number, (key, shape) in enumerate(self._shapes.items())
        }

    def __getstate__(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("_frames", "_shapes", "_directory")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._maps = self._open()

    def read(self, key: str, frames: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Pictures uint8 `[len(frames), C, H, W]` of a camera."""
        return torch.from_numpy(np.asarray(self._maps[key][frames]))


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked worker ends without taking its parent's files
        for path in Path(directory).glob("*.bin"):
            path.unlink(missing_ok=True)
        Path(directory).rmdir()
