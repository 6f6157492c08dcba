"""A LeRobot dataset (v2.1 or v3.0) as samples, without LeRobot.

Numbers are read once into arrays, so a sample is a few slices; pictures are decoded when asked for, or once for all
into a memory map (`decoded_cache_gb`), since decoding costs more than training a small policy does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_embodied.data.cache import DecodedCache
from lightning_embodied.data.columns import check_timestamps, data_paths, load_columns
from lightning_embodied.data.images import ParquetPictures
from lightning_embodied.data.metadata import BOOKKEEPING, Metadata, read_metadata
from lightning_embodied.data.video import DecoderPool, Picture, VideoBackend, check_mp4
from lightning_embodied.data.windows import clamp_window, window_offsets
from lightning_embodied.errors import DatasetError
from lightning_embodied.features import Feature

Sample = dict[str, Any]
"""One training sample: `Tensor`, `str` or `int` by LeRobot's key names."""


class LeRobotDataset(Dataset[Sample]):
    """Samples of a LeRobot dataset, one a frame.

    A sample holds every feature under LeRobot's name: pictures uint8 `[C, H, W]`, floats as float32 and other numbers
    in their own dtype, in the shape `features` says; `timestamp` is a float32 scalar in seconds; `frame_index`,
    `episode_index`, `index`, `task_index` and `dataset` (always 0) are ints; `task` is the instruction. A feature
    named in `delta_timestamps` gains a leading time axis and a mask `<feature>_is_pad`. Layout and windows after
    LeRobot's documentation.

    Args:
        root: Directory of the dataset, the one that holds `meta/`.
        delta_timestamps: Seconds relative to the sample's frame at which to read a feature, multiples of 1 / fps.
        episodes: Numbers of the episodes to use, in this order; all when not given.
        video_backend: `pyav`, `torchcodec`, or `auto` for torchcodec when it is installed.
        cameras: Picture features to read; all when not given.
        decoded_cache_gb: Room in GB for decoded pictures on disk; above 0, all are decoded once when the dataset is
            opened and read from a memory map that worker processes share.

    Raises:
        DatasetError: The dataset is missing, damaged or contradicts itself, or an argument names what it lacks.
        MissingExtraError: `video_backend="torchcodec"` without torchcodec.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        episodes: Sequence[int] | None = None,
        video_backend: VideoBackend = "auto",
        cameras: Sequence[str] | None = None,
        decoded_cache_gb: float = 0.0,
    ) -> None:
        self.root = Path(root)
        self._metadata = metadata = read_metadata(self.root)
        selected = _select_episodes(metadata, episodes)
        self.episodes = [episode.index for episode in selected]
        self.episode_lengths = [episode.length for episode in selected]
        self._cameras = _select_cameras(metadata, cameras)
        self._offsets = window_offsets(delta_timestamps or {}, self.features, self.fps)
        self._first = np.concatenate([[0], np.cumsum(self.episode_lengths)]).astype(np.int64)
        self._position = np.repeat(np.arange(len(selected)), self.episode_lengths)
        self._columns, places = load_columns(metadata, selected)
        check_timestamps(self._columns, self._first[:-1], self.fps, str(self.root))
        self._files, self._rows = places["file"], places["row"]
        self._images = ParquetPictures(data_paths(selected)) if self._has("image") else None
        self._decoders = DecoderPool(video_backend, self.fps)
        self._check_videos()
        self._cache: DecodedCache | None = None
        if decoded_cache_gb > 0 and self._cameras:
            shapes = {key: self.features[key].shape for key in self._cameras}
            self._cache = DecodedCache(shapes, len(self), self.pictures, decoded_cache_gb)

    @property
    def fps(self) -> int:
        """Frames per second."""
        return self._metadata.fps

    @property
    def features(self) -> dict[str, Feature]:
        """What a frame holds, bookkeeping columns included, as in `info.json`."""
        return self._metadata.features

    @property
    def tasks(self) -> list[str]:
        """All instructions of the dataset, ordered by `task_index`."""
        return [self._metadata.tasks[index] for index in sorted(self._metadata.tasks)]

    @property
    def robot_type(self) -> str | None:
        """Label of the robot, if the dataset has one."""
        return self._metadata.robot_type

    @property
    def cameras(self) -> list[str]:
        """Picture features that samples hold."""
        return list(self._cameras)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, i: int) -> Sample:
        """The sample of frame `i`, counted over the selected episodes.

        Raises:
            IndexError: There is no such frame.
            DatasetError: A picture cannot be decoded.
        """
        if not -len(self) <= i < len(self):
            raise IndexError(f"frame {i} of a dataset of {len(self)} frames")
        i = int(i) % len(self)
        position = int(self._position[i])
        bounds = int(self._first[position]), int(self._first[position + 1]) - 1
        sample = self._bookkeeping(i)
        for key, feature in self.features.items():
            if key in BOOKKEEPING or (feature.is_visual and key not in self._cameras):
                continue
            offsets = self._offsets.get(key)
            if offsets is None:
                sample[key] = self._camera(key, i, [i])[0] if feature.is_visual else _value(self._columns[key][i])
                continue
            frames, is_pad = clamp_window(i, offsets, *bounds)
            sample[key] = self._camera(key, i, frames) if feature.is_visual else _value(self._columns[key][frames])
            sample[f"{key}_is_pad"] = torch.from_numpy(is_pad)
        return sample

    def numeric(self, key: str) -> NDArray[Any]:
        """A whole column of the selected episodes, in the dataset's own dtype.

        Args:
            key: A feature that is neither picture nor string.

        Returns:
            `[frames, *shape]`; a view that must not be written to.

        Raises:
            DatasetError: There is no such column.
        """
        usable = [name for name, values in self._columns.items() if values.dtype != object]
        if key not in usable:
            raise DatasetError("there is no such numeric feature", where=self.root, found=key, expected=usable)
        view = self._columns[key].view()
        view.flags.writeable = False
        return view

    def token_counts(self, count_tokens: Callable[[int, str], int]) -> NDArray[np.int64]:
        """Tokens of every sample, from metadata alone: no picture is read.

        Args:
            count_tokens: Tokens of a sample with so many pictures and an instruction, such as
                `SampleEncoder.count_tokens`.

        Returns:
            int64 `[frames]`.
        """
        used, which = np.unique(self._columns["task_index"][:, 0], return_inverse=True)
        counts = [count_tokens(len(self._cameras), self._metadata.tasks[int(index)]) for index in used]
        return np.array(counts, dtype=np.int64)[which]

    def pictures(self, key: str) -> Iterator[Picture]:
        """All pictures of one camera over the selected episodes, in order, `[H, W, C]` uint8 (decoded sequentially).

        Args:
            key: A picture feature.
        """
        if key not in self._cameras:
            raise DatasetError("there is no such camera", where=self.root, found=key, expected=self._cameras)
        for i in range(len(self)):
            yield self._pictures(key, i, [i])[0]

    def _bookkeeping(self, i: int) -> Sample:
        columns = self._columns
        sample: Sample = {key: int(columns[key][i, 0]) for key in BOOKKEEPING if key != "timestamp"}
        sample["timestamp"] = torch.tensor(float(columns["timestamp"][i, 0]), dtype=torch.float32)
        sample["task"] = self._metadata.tasks[sample["task_index"]]
        sample["dataset"] = 0
        return sample

    def _camera(self, key: str, i: int, frames: Sequence[int] | NDArray[np.int64]) -> Tensor:
        if self._cache is not None:
            return self._cache.read(key, frames)
        pictures = np.stack(self._pictures(key, i, frames))
        return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()

    def _pictures(self, key: str, i: int, frames: Sequence[int] | NDArray[np.int64]) -> list[Picture]:
        feature = self.features[key]
        if feature.dtype == "image" and self._images is not None:
            found = [self._images.read(int(self._files[n]), int(self._rows[n]), key) for n in frames]
            for picture in found:
                if picture.shape != feature.shape:
                    raise DatasetError(
                        "a picture has another shape than info.json says",
                        where=f"{self.root}: {key}, episode {self.episodes[self._position[i]]}",
                        found=picture.shape,
                        expected=feature.shape,
                        mend="correct the shape in info.json, or record the pictures again",
                    )
            return found
        span = self._metadata.episodes[self.episodes[self._position[i]]].videos[key]
        decoder = self._decoders.get(span.path, (feature.shape[0], feature.shape[1]))
        unique, inverse = np.unique(np.asarray(frames), return_inverse=True)
        times = span.start + self._columns["timestamp"][unique, 0].astype(np.float64)
        pictures = decoder.read(times.tolist())
        return [pictures[n] for n in inverse]

    def _has(self, dtype: str) -> bool:
        return any(self.features[key].dtype == dtype for key in self._cameras)

    def _check_videos(self) -> None:
        """Cheap checks of all video files, and of the first one of each camera the rate and the size too."""
        for key in self._cameras:
            if self.features[key].dtype != "video":
                continue
            paths = dict.fromkeys(self._metadata.episodes[n].videos[key].path for n in self.episodes)
            for path in paths:
                check_mp4(path)
            height, width, _ = self.features[key].shape
            self._decoders.get(next(iter(paths)), (height, width))


def _value(values: NDArray[Any] | str) -> Tensor | str:
    if isinstance(values, str):
        return values
    dtype = np.float32 if values.dtype.kind == "f" else values.dtype
    return torch.from_numpy(np.array(values, dtype=dtype))  # a copy: samples may be changed, the dataset may not


def _select_episodes(metadata: Metadata, episodes: Sequence[int] | None) -> list[Any]:
    if episodes is None:
        return metadata.episodes
    chosen, count = list(episodes), len(metadata.episodes)
    unknown = [n for n in chosen if not 0 <= n < count]
    if unknown or len(set(chosen)) != len(chosen) or not chosen:
        raise DatasetError(
            "the episodes asked for are not in the dataset" if unknown else "episodes is empty or names one twice",
            where="episodes",
            found=unknown or chosen,
            expected=f"different numbers from 0 to {count - 1}",
        )
    return [metadata.episodes[n] for n in chosen]


def _select_cameras(metadata: Metadata, cameras: Sequence[str] | None) -> list[str]:
    known = [key for key, feature in metadata.features.items() if feature.is_visual]
    if cameras is None:
        return known
    if unknown := [key for key in cameras if key not in known]:
        raise DatasetError("there is no such camera", where="cameras", found=unknown, expected=known)
    return [key for key in known if key in cameras]
