"""What a sample is, and reading its values with errors that name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_embodied.errors import DatasetError

Sample = Mapping[str, Any]
"""One sample: LeRobot's keys to tensors, strings and ints (see `SampleEncoder.encode`)."""

_CAMERA_PREFIX = "observation.image"


def cameras_of(sample: Mapping[str, Any]) -> list[str]:
    """Keys of the pictures of a sample or of observations, sorted."""
    return sorted(key for key in sample if key.startswith(_CAMERA_PREFIX) and not key.endswith("_is_pad"))


def floats_of(sample: Sample, key: str, dims: int) -> Tensor:
    """A vector (`dims` 1) or an action chunk (`dims` 2) of a sample as float32 on the CPU; raises `DatasetError`."""
    value = sample.get(key)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != dims:
        raise unusable(sample, key, describe(value), f"float32 {'[D]' if dims == 1 else '[H, A]'}")
    return value.to("cpu", torch.float32)


def picture_of(sample: Sample, key: str) -> Tensor:
    """A picture of a sample with three channels, uint8 `[3, H, W]`; raises `DatasetError`."""
    value = sample[key]
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 3 or not value.numel():
        raise unusable(sample, key, describe(value), "uint8 [C, H, W] with 1 or 3 channels")
    if value.shape[0] not in (1, 3):
        raise unusable(sample, key, describe(value), "1 or 3 channels: uint8 [C, H, W]")
    return value.expand(3, -1, -1)


def unusable(sample: Sample, key: str, found: str, expected: str) -> DatasetError:
    """The error for a value that cannot be encoded."""
    present = ", ".join(sorted(sample)) or "none"
    return DatasetError(
        f"a sample cannot be encoded: {key!r}",
        where=f"{name_of(sample)} (keys: {present})",
        found=found,
        expected=expected,
        mend="check the dataset's features, or name other keys in SampleEncoder (state_keys, action_key)",
    )


def name_of(sample: Sample) -> str:
    """Where a sample is from, as far as it says."""
    known = [(key, sample[key]) for key in ("dataset", "episode_index", "frame_index") if key in sample]
    return ", ".join(f"{key.removesuffix('_index')} {int(value)}" for key, value in known) or "a sample"


def describe(value: object) -> str:
    """Dtype and shape, or type, of a value found."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "nothing" if value is None else type(value).__name__
