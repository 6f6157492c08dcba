"""A LeRobot dataset in two: training and held-out episodes, with the exact statistics of the former.

Which episodes are held out is a pure function of the seed, so a resumed run holds out the same ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_embodied.data.dataset import LeRobotDataset
from lightning_embodied.data.order import SampleOrder
from lightning_embodied.data.stats import compute_stats
from lightning_embodied.errors import ConfigError, DatasetError
from lightning_embodied.features import Feature

FrameWindows = Callable[[Mapping[str, Feature]], Mapping[str, Sequence[int]]]
"""Which frames, relative to a sample's own, a policy reads of each feature."""


class SplitDataset:
    """An opened and split dataset with what is computed of it.

    Args:
        root: Directory of the dataset.
        val_episodes: Episodes held out: their number, or, below 1.0, their share.
        seed: Decides which ones.
        action_horizon: Frames of an action chunk.
        frame_windows: What a policy that says itself which frames it reads says.
        delta_timestamps: Further windows, as in `LeRobotDataset`; they come before the others.
        options: Other arguments of `LeRobotDataset`.

    Attributes:
        train: The training episodes.
        val: The held-out episodes, if there are any.
        features: What a frame holds, pictures only of the cameras in use.
        stats: Exact statistics over the training episodes, of every feature that is a number.
        action_horizon: Frames of an action chunk.
        fingerprint: SHA-256 of the dataset's features, tasks, episode lengths and actions.

    Raises:
        DatasetError: The dataset is damaged, has no action or no episode left to train on.
        ConfigError: `val_episodes` is no number of episodes.
    """

    def __init__(
        self,
        root: str,
        val_episodes: float,
        seed: int,
        *,
        action_horizon: int,
        frame_windows: FrameWindows | None,
        delta_timestamps: Mapping[str, Sequence[float]],
        **options: Any,  # noqa: ANN401
    ) -> None:
        whole = LeRobotDataset(root, cameras=[])
        if "action" not in whole.features:
            raise DatasetError("the dataset has no action", where=root, found=sorted(whole.features))
        count = _held_out(val_episodes, len(whole.episodes))
        shuffled = SampleOrder(len(whole.episodes), seed).indices(0, 0, count)
        held_out = {whole.episodes[i] for i in shuffled}
        asked = {} if frame_windows is None else frame_windows(whole.features)
        frames: dict[str, Sequence[int]] = {"action": range(action_horizon), **asked}
        windows = {key: [frame / whole.fps for frame in of_key] for key, of_key in frames.items()}
        options["delta_timestamps"] = windows | dict(delta_timestamps)
        self.action_horizon = len(options["delta_timestamps"]["action"])
        training = [episode for episode in whole.episodes if episode not in held_out]
        self.train = LeRobotDataset(root, episodes=training, **options)
        self.val = LeRobotDataset(root, episodes=sorted(held_out), **options) if held_out else None
        self.fingerprint = _fingerprint(whole)
        used = set(self.train.cameras)
        features = self.train.features.items()
        self.features = {key: feature for key, feature in features if not feature.is_visual or key in used}
        numbers = [key for key, value in self.features.items() if not value.is_visual and value.dtype != "string"]
        self.stats = compute_stats(self.train, numbers)


def _held_out(val_episodes: float, episodes: int) -> int:
    count = val_episodes if val_episodes >= 1 else max(round(val_episodes * episodes), int(val_episodes > 0))
    if count != int(count):
        raise ConfigError(
            "no such number of episodes",
            where="val_episodes",
            found=val_episodes,
            expected="a share below 1, or a count",
        )
    if count >= episodes:
        raise DatasetError(
            "no episode is left to train on",
            where="val_episodes",
            found=f"{val_episodes} held out of {episodes} episodes",
            expected="at least one more episode than are held out",
            mend="lower val_episodes (0 trains on all) or record more episodes",
        )
    return int(count)


def _fingerprint(dataset: LeRobotDataset) -> str:
    described = {
        "features": {key: value.to_dict() for key, value in sorted(dataset.features.items())},
        "fps": dataset.fps,
        "tasks": dataset.tasks,
        "episodes": [dataset.episodes, dataset.episode_lengths],
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    digest.update(dataset.numeric("action").tobytes())
    return digest.hexdigest()
