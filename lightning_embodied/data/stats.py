"""Exact statistics over all frames.

Averages of per-episode quantiles are not quantiles of the dataset, however they are weighted; these are. Pictures are
uint8, so a histogram of 256 bins a channel holds them exactly in bounded memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_embodied.errors import DatasetError
from lightning_embodied.features import FeatureStats

if TYPE_CHECKING:
    from lightning_embodied.data.dataset import LeRobotDataset

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def compute_stats(dataset: LeRobotDataset, keys: Sequence[str] | None = None) -> dict[str, FeatureStats]:
    """Exact mean, std (ddof = 0), min, max and quantiles over all frames of the selected episodes.

    Args:
        dataset: The frames.
        keys: Features to describe; all but strings when not given. Pictures are decoded (slow for long videos).

    Returns:
        Float64 statistics of each feature's shape; pictures in [0, 1] per channel, `(C, 1, 1)`.

    Raises:
        DatasetError: A key is unknown or a string feature.
    """
    features = dataset.features
    usable = [k for k, f in features.items() if (k in dataset.cameras if f.is_visual else f.dtype != "string")]
    chosen = usable if keys is None else list(keys)
    if unknown := [key for key in chosen if key not in usable]:
        raise DatasetError("there are no statistics of these", where="keys", found=unknown, expected=usable)
    stats = {}
    for key in chosen:
        if not features[key].is_visual:
            stats[key] = array_stats(dataset.numeric(key))
            continue
        histogram = PictureHistogram(channels=features[key].shape[2])
        for picture in dataset.pictures(key):
            histogram.add(picture)
        stats[key] = histogram.stats()
    return stats


def array_stats(values: NDArray[Any]) -> FeatureStats:
    """Statistics over the first axis.

    Args:
        values: `[frames, *shape]`, numbers or booleans, at least one frame.
    """
    exact = values.astype(np.float64)
    quantiles = np.quantile(exact, list(QUANTILES.values()), axis=0)
    return FeatureStats(
        min=exact.min(axis=0),
        max=exact.max(axis=0),
        mean=exact.mean(axis=0),
        std=exact.std(axis=0),
        count=len(exact),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    )


class PictureHistogram:
    """Counts of the 256 values of each channel; enough for every statistic, exactly.

    Args:
        channels: Channels of a picture.
    """

    def __init__(self, channels: int = 3) -> None:
        self.counts = np.zeros((channels, 256), dtype=np.int64)
        self.frames = 0

    def add(self, picture: NDArray[np.uint8]) -> None:
        """Counts one picture `[H, W, C]`."""
        for channel in range(len(self.counts)):
            self.counts[channel] += np.bincount(picture[..., channel].reshape(-1), minlength=256)
        self.frames += 1

    def merge(self, other: PictureHistogram) -> None:
        """Adds another histogram's counts."""
        self.counts += other.counts
        self.frames += other.frames

    def stats(self) -> FeatureStats:
        """Statistics in [0, 1], `(C, 1, 1)`; `count` is the number of pictures.

        Raises:
            ValueError: No picture was added.
        """
        if not self.frames:
            raise ValueError("no pictures were counted")
        values = np.arange(256) / 255.0
        total = self.counts.sum(axis=1)
        mean = self.counts @ values / total
        variance = (self.counts * (values - mean[:, None]) ** 2).sum(axis=1) / total
        seen = [np.flatnonzero(counts) for counts in self.counts]
        result: dict[str, NDArray[np.float64]] = {
            "min": np.array([values[where[0]] for where in seen]),
            "max": np.array([values[where[-1]] for where in seen]),
            "mean": mean,
            "std": np.sqrt(variance),
            **{name: self._quantile(q) for name, q in QUANTILES.items()},
        }
        return FeatureStats(**{name: value[:, None, None] for name, value in result.items()}, count=self.frames)

    def _quantile(self, q: float) -> NDArray[np.float64]:
        """Linear interpolation between the two order statistics around `q * (n - 1)`, as `numpy.quantile`."""
        result = []
        for counts in self.counts:
            cumulative = np.cumsum(counts)
            place = q * (int(cumulative[-1]) - 1)
            low, high = int(np.floor(place)), int(np.ceil(place))
            below, above = np.searchsorted(cumulative, [low, high], side="right") / 255.0
            result.append(below + (above - below) * (place - low))
        return np.array(result)
