"""The frames of the episode that is being recorded: checked as they come, pictures encoded at once.

What is kept of a picture is its packets or PNG bytes and a histogram, so that a long episode fits in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_embodied.data.encoding import EpisodeVideo, VideoSettings
from lightning_embodied.data.images import encode_png
from lightning_embodied.data.metadata import BOOKKEEPING, DTYPES
from lightning_embodied.data.stats import PictureHistogram
from lightning_embodied.errors import DatasetError
from lightning_embodied.features import Feature


def check_features(features: Mapping[str, Feature]) -> None:
    """Checks that features can be written.

    Raises:
        DatasetError: One cannot; names it.
    """
    if not features:
        raise DatasetError("a dataset needs at least one feature", where="features")
    for key, feature in features.items():
        where = f"features: {key}"
        if key in BOOKKEEPING or key == "task" or "/" in key or not key:
            raise DatasetError(
                "this name cannot be a feature", where=where, mend="choose a name without '/' that LeRobot does not use"
            )
        if feature.dtype not in DTYPES:
            raise DatasetError("unknown dtype", where=where, found=feature.dtype, expected=", ".join(DTYPES))
        if feature.is_visual and (len(feature.shape) != 3 or feature.shape[2] != 3 or min(feature.shape) < 1):
            raise DatasetError("a picture must be (height, width, 3)", where=where, found=feature.shape)
        if feature.dtype == "string" and feature.shape != (1,):
            raise DatasetError("a string feature must have the shape (1,)", where=where, found=feature.shape)
        if not 1 <= len(feature.shape) <= 5 or min(feature.shape) < 1:
            raise DatasetError("a shape needs one to five positive numbers", where=where, found=feature.shape)


class EpisodeBuffer:
    """One episode under construction.

    Args:
        features: The recorded features.
        video: Encoder settings.

    Attributes:
        values: What each column holds so far, one value a frame (pictures as PNG bytes).
        tasks: Instruction of each frame.
        videos: Packets by camera.
        histograms: Counts of the pictures' raw values.
    """

    def __init__(self, features: Mapping[str, Feature], video: VideoSettings) -> None:
        self._features = features
        self.values: dict[str, list[Any]] = {key: [] for key, f in features.items() if f.dtype != "video"}
        self.tasks: list[str] = []
        self.videos = {
            key: EpisodeVideo(video, f.shape[0], f.shape[1]) for key, f in features.items() if f.dtype == "video"
        }
        self.histograms = {key: PictureHistogram() for key, f in features.items() if f.is_visual}

    @property
    def length(self) -> int:
        """Frames so far."""
        return len(self.tasks)

    def add(self, frame: Mapping[str, Any]) -> None:
        """Checks all values of a frame, then adds them.

        Raises:
            DatasetError: A value does not fit; nothing was added.
        """
        if set(frame) != {*self._features, "task"}:
            missing, unknown = {*self._features, "task"} - set(frame), set(frame) - {*self._features, "task"}
            raise DatasetError(
                "a frame does not hold the features of the dataset",
                where="add_frame",
                found=f"missing {sorted(missing)}, unknown {sorted(unknown)}",
                expected=sorted({*self._features, "task"}),
            )
        if not isinstance(frame["task"], str) or not frame["task"]:
            raise DatasetError("the task of a frame is not a text", where="add_frame: task", found=repr(frame["task"]))
        checked = {key: _checked(frame[key], feature, key) for key, feature in self._features.items()}
        for key, value in checked.items():
            if isinstance(value, str) or key not in self.histograms:
                self.values[key].append(value)
                continue
            self.histograms[key].add(value)
            if key in self.videos:
                self.videos[key].add(value)
            else:
                self.values[key].append(encode_png(value))
        self.tasks.append(frame["task"])

    def finish(self) -> None:
        """Ends the encoding of the videos."""
        for video in self.videos.values():
            video.finish()


def _checked(value: object, feature: Feature, key: str) -> NDArray[Any] | str:
    where = f"add_frame: {key}"
    if feature.dtype == "string":
        if not isinstance(value, str):
            raise DatasetError("a value has another type than the feature", where=where, found=type(value).__name__)
        return value
    array: NDArray[Any] = np.asarray(value)
    dtype = np.dtype("uint8" if feature.is_visual else feature.dtype)
    if array.shape == () and feature.shape == (1,):
        array = array.reshape(1)
    if array.shape != feature.shape:
        raise DatasetError(
            "a value has another shape than the feature", where=where, found=array.shape, expected=feature.shape
        )
    if feature.is_visual and array.dtype != np.uint8:
        raise DatasetError("a picture is not uint8", where=where, found=array.dtype, mend="give values 0 to 255")
    if not np.can_cast(array.dtype, dtype, casting="same_kind"):
        raise DatasetError(
            "a value has another type than the feature", where=where, found=array.dtype, expected=feature.dtype
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DatasetError("a value is not finite", where=where, found=array.tolist(), mend="do not record this frame")
    return np.array(array, dtype=dtype)  # a copy: simulators reuse their buffers
