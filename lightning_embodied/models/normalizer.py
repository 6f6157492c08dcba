"""Scaling of states and actions to about unit size, with statistics that travel in the checkpoint.

The three scalings are those of openpi and LeRobot (mean/std, 1 % and 99 % quantiles, minimum/maximum); one rule for
dimensions that hardly vary replaces their division by an epsilon, which turns sensor noise into huge inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from lightning_embodied.errors import ConfigError
from lightning_embodied.features import FeatureStats

Normalization = Literal["mean_std", "quantile", "min_max", "lerobot_quantile", "lerobot_mean_std"]

LEROBOT_EPSILON = 1e-8

LIMIT = 10.0
"""No value of the training data lies further than this from 0 once normalised."""
CONSTANT_BELOW = 1e-4
"""A dimension whose values stay this close to their centre (in the dataset's units) counts as constant."""


class Normalizer(nn.Module):
    """Scales the last dimension: `(x - centre) / scale`, and back.

    `mean_std`: mean and standard deviation. `quantile`: the 1 % quantile becomes -1 and the 99 % quantile 1.
    `min_max`: the minimum becomes -1 and the maximum 1.

    Dimensions that hardly vary: let `spread` be the farthest that the training data lies from the centre. If it is
    below `CONSTANT_BELOW` (or below float32's resolution there), the dimension is constant and its scale is 1. If not,
    the scale is at least `spread / LIMIT`. So a gripper that moves in less than 1 % of the frames (equal quantiles) or
    a rarely touched object stays within ±`LIMIT`, and a constant one is near 0.

    `lerobot_quantile` and `lerobot_mean_std` are LeRobot's own formulas to the letter, for policies trained there:
    they divide by 1e-8 where a dimension is constant.

    Args:
        stats: Statistics of the features that are concatenated along the last dimension, in that order.
        mode: Which scaling.

    Raises:
        ConfigError: The statistics hold NaN or infinite values, or the mode is unknown.
    """

    centre: Tensor
    scale: Tensor

    def __init__(self, stats: Sequence[FeatureStats], mode: Normalization) -> None:
        super().__init__()
        columns = {
            name: np.concatenate([np.zeros(0), *(np.ravel(getattr(one, name)) for one in stats)])
            for name in ("min", "max", "mean", "std", "q01", "q99")
        }
        for name, values in columns.items():
            if not np.isfinite(values).all():
                raise ConfigError(
                    "the dataset's statistics are not finite",
                    where=f"statistic {name!r}, dimension {int(np.flatnonzero(~np.isfinite(values))[0])}",
                    mend="look for NaN or infinite values with `lightning-embodied stats`",
                )
        if mode == "mean_std":
            centre, scale = columns["mean"], columns["std"]
        elif mode == "lerobot_mean_std":
            centre, scale = columns["mean"], columns["std"] + LEROBOT_EPSILON
        elif mode == "lerobot_quantile":
            span = columns["q99"] - columns["q01"]
            centre, scale = columns["q01"], np.where(span == 0, LEROBOT_EPSILON, span) / 2
        elif mode in ("quantile", "min_max"):
            low, high = ("q01", "q99") if mode == "quantile" else ("min", "max")
            centre, scale = (columns[low] + columns[high]) / 2, (columns[high] - columns[low]) / 2
        else:
            raise ConfigError("unknown normalisation", found=mode, expected=", ".join(get_args(Normalization)))
        if not mode.startswith("lerobot"):
            spread = np.maximum(columns["max"] - centre, centre - columns["min"])
            constant = spread <= np.maximum(CONSTANT_BELOW, 1e-6 * np.abs(centre))
            scale = np.where(constant, 1.0, np.maximum(scale, spread / LIMIT))
        self.shift = -1.0 if mode == "lerobot_quantile" else 0.0  # its centre is the low end
        self.register_buffer("centre", torch.from_numpy(centre).float())
        self.register_buffer("scale", torch.from_numpy(scale).float())

    @property
    def dim(self) -> int:
        """Number of dimensions."""
        return self.centre.shape[0]

    def normalize(self, value: Tensor) -> Tensor:
        """From the dataset's units: `[..., D]` to float32 `[..., D]`."""
        return (value.float() - self.centre) / self.scale + self.shift

    def unnormalize(self, value: Tensor) -> Tensor:
        """Back to the dataset's units: `[..., D]` to float32 `[..., D]`."""
        return (value.float() - self.shift) * self.scale + self.centre

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Normalizer:
        """Follows the module to another device but never to another precision: bf16 would blur the robot's units."""

        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        return self
