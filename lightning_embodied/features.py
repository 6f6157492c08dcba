"""What a dataset records: the features of a frame and their exact statistics.

Names, dtypes and shapes are LeRobot's (`meta/info.json`, `meta/stats.json`), so a feature read from a dataset, asked
of an environment or stored in a checkpoint is the same object. Every room may import this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

STATISTICS = ("min", "max", "mean", "std", "q01", "q10", "q50", "q90", "q99")
"""Names of the statistics of `FeatureStats`, as in LeRobot's `meta/stats.json`."""


@dataclass(frozen=True)
class Feature:
    """One column of a dataset.

    Attributes:
        dtype: `float32`, `float64`, `int64`, `bool`, `string`, `image` or `video` (LeRobot's names).
        shape: Shape of one frame's value; pictures are `(height, width, channels)`.
        names: Names of the dimensions, if the dataset has them (a list, or a nested mapping as LeRobot writes it).
    """

    dtype: str
    shape: tuple[int, ...]
    names: Any = None

    @property
    def is_visual(self) -> bool:
        """Whether the feature holds pictures."""
        return self.dtype in ("image", "video")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in `info.json`."""
        return {"dtype": self.dtype, "shape": list(self.shape), "names": self.names}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Feature:
        """Reads what `to_dict` wrote, or an entry of `info.json`."""
        return cls(dtype=str(value["dtype"]), shape=tuple(int(n) for n in value["shape"]), names=value.get("names"))


@dataclass(frozen=True)
class FeatureStats:
    """Exact statistics of one feature over all its frames, each of the feature's shape, float64.

    `std` is the population's (ddof = 0); `qNN` are true quantiles over all frames by linear interpolation. Pictures
    are in [0, 1] with statistics per channel, shaped `(channels, 1, 1)`.
    """

    min: NDArray[np.float64]
    max: NDArray[np.float64]
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    q01: NDArray[np.float64]
    q10: NDArray[np.float64]
    q50: NDArray[np.float64]
    q90: NDArray[np.float64]
    q99: NDArray[np.float64]
    count: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in `stats.json` (`count` is a list of one)."""
        return {**{name: getattr(self, name).tolist() for name in STATISTICS}, "count": [self.count]}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> FeatureStats:
        """Reads what `to_dict` wrote.

        Raises:
            KeyError: A statistic is absent (LeRobot v2.1 records no quantiles).
        """
        arrays = {name: np.asarray(value[name], dtype=np.float64) for name in STATISTICS}
        return cls(**arrays, count=int(np.asarray(value["count"]).reshape(-1)[0]))
