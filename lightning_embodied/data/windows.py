"""`delta_timestamps`: which frames a sample looks at, as LeRobot defines it.

A feature asked for at the seconds `d` is read at the frames `i + round(d * fps)`. A window that leaves its episode
repeats the edge frame and says so in `<feature>_is_pad`; it never reaches into a neighbour episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_embodied.data.metadata import BOOKKEEPING
from lightning_embodied.errors import DatasetError
from lightning_embodied.features import Feature

DELTA_TOLERANCE = 1e-4
"""Seconds by which a delta may miss a multiple of 1 / fps (LeRobot's default)."""


def window_offsets(
    delta_timestamps: Mapping[str, Sequence[float]], features: Mapping[str, Feature], fps: int
) -> dict[str, NDArray[np.int64]]:
    """Turns seconds into frame offsets.

    Args:
        delta_timestamps: Seconds relative to a sample's frame, by feature.
        features: The dataset's features.
        fps: Frames per second.

    Raises:
        DatasetError: An unknown feature, one that has no windows, or a delta between two frames.
    """
    offsets = {}
    for key, deltas in delta_timestamps.items():
        where = f"delta_timestamps: {key}"
        if key not in features or key in BOOKKEEPING or features[key].dtype == "string":
            usable = [k for k, f in features.items() if k not in BOOKKEEPING and f.dtype != "string"]
            raise DatasetError(
                "delta_timestamps names a feature that has no windows", where=where, expected=" or ".join(usable)
            )
        seconds = np.asarray(deltas, dtype=np.float64).reshape(-1)
        frames = np.rint(seconds * fps)
        if not len(seconds) or not np.abs(frames / fps - seconds).max() <= DELTA_TOLERANCE:
            raise DatasetError(
                "delta_timestamps must be multiples of 1 / fps",
                where=where,
                found=list(deltas),
                expected=f"at least one multiple of {1 / fps:.6f} s (fps = {fps})",
                mend="write them as n / fps",
            )
        offsets[key] = frames.astype(np.int64)
    return offsets


def clamp_window(
    position: int, offsets: NDArray[np.int64], first: int, last: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The frames of one window.

    Args:
        position: The sample's frame.
        offsets: `[H]`, relative to it.
        first: First frame of the episode.
        last: Last frame of the episode, inclusive.

    Returns:
        Frames `[H]` within the episode, and a mask `[H]` that is True where the edge frame stands in.
    """
    wanted = position + offsets
    frames = np.minimum(np.maximum(wanted, first), last)
    return frames, frames != wanted
