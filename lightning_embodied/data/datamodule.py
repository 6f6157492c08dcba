"""A LeRobot dataset as a `LightningDataModule`: split by episode, exact statistics, resumable order.

It shards by itself, so it needs no `use_distributed_sampler`, and it keeps its own place in the checkpoint: a run
continues on other ranks, batch sizes and workers with exactly the samples it had not seen.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from lightning_embodied.data.dataset import LeRobotDataset
from lightning_embodied.data.loader import ResumableLoader, ShardedLoader
from lightning_embodied.data.order import SampleOrder
from lightning_embodied.data.stats import compute_stats
from lightning_embodied.data.video import VideoBackend
from lightning_embodied.errors import CheckpointError, ConfigError, DatasetError
from lightning_embodied.features import Feature, FeatureStats
from lightning_embodied.packing.collator import VarlenPackingCollator


class LeRobotDataModule(LightningDataModule):
    """Loaders over one LeRobot dataset, for training, validation, test and prediction.

    Validation, test and prediction read the held-out episodes in order; predictions come from a plain `DataLoader`
    that Lightning shards. After `setup()` the properties describe the data.

    Args:
        root: Directory of the dataset, the one that holds `meta/`.
        collator: Makes a batch of a list of samples.
        action_horizon: Frames of an action chunk, at least 1; past the end of the episode `action_is_pad` is true.
        batch_size: Samples of a batch on each rank.
        num_workers: Worker processes on each rank; they live as long as the run.
        val_episodes: Episodes held out for validation: their number, or, below 1.0, their share.
        cameras: Picture features to read; all when not given.
        delta_timestamps: Further windows, seconds relative to the frame for each feature. `action` is set already.
        video_backend: `pyav`, `torchcodec`, or `auto` for torchcodec when it is installed.
        decoded_cache_gb: Room on disk for decoded pictures, in GB for each rank; 0 decodes while training.
        drop_last: Leave out the samples at the end of an epoch that do not fill a step of all ranks.
        seed: Decides split, order and augmentation. Default: that of `seed_everything`, else 0.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        root: str,
        collator: VarlenPackingCollator,
        *,
        action_horizon: int = 16,
        batch_size: int = 64,
        num_workers: int = 0,
        val_episodes: int | float = 0.1,
        cameras: Sequence[str] | None = None,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        video_backend: VideoBackend = "auto",
        decoded_cache_gb: float = 0.0,
        drop_last: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("action_horizon", action_horizon, 1),
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("val_episodes", val_episodes, 0),
        ):
            if value < least:
                raise ConfigError(f"{name} is too small", where=name, found=value, expected=f"at least {least}")
        self.root, self.collator, self.action_horizon = root, collator, action_horizon
        self.batch_size, self.num_workers, self.val_episodes = batch_size, num_workers, val_episodes
        self.cameras, self.delta_timestamps = cameras, dict(delta_timestamps or {})
        self.video_backend, self.decoded_cache_gb, self.drop_last = video_backend, decoded_cache_gb, drop_last
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        self._data: _Data | None = None
        self._loader: ResumableLoader | None = None
        self._order_state: dict[str, int] | None = None

    def setup(self, stage: str | None = None) -> None:
        """Opens the dataset, splits it and computes the statistics; once, however often it is called.

        Raises:
            DatasetError: The dataset is damaged, has no action or no episode left to train on.
            ConfigError: A batch of all ranks is larger than the training set.
        """
        if self._data is None:
            self._data = _open(self)
        if stage == "fit":
            self._loader = self._order_state = None  # a new run, unless a checkpoint says otherwise

    @property
    def train_dataset(self) -> LeRobotDataset:
        """The training episodes."""
        return self._opened.train

    @property
    def val_dataset(self) -> LeRobotDataset | None:
        """The held-out episodes, if there are any."""
        return self._opened.val

    @property
    def features(self) -> dict[str, Feature]:
        """What a frame holds, pictures only of the cameras in use."""
        return self._opened.features

    @property
    def stats(self) -> dict[str, FeatureStats]:
        """Exact statistics over the training episodes, of every feature that is a number."""
        return self._opened.stats

    @property
    def fps(self) -> int:
        """Frames per second."""
        return self.train_dataset.fps

    @property
    def tasks(self) -> list[str]:
        """All instructions of the dataset."""
        return self.train_dataset.tasks

    @property
    def robot_type(self) -> str | None:
        """Label of the robot, if the dataset has one."""
        return self.train_dataset.robot_type

    @property
    def dataset_fingerprint(self) -> str:
        """SHA-256 of the dataset's features, tasks, episode lengths and actions; where it lies does not matter."""
        return self._opened.fingerprint

    @property
    def _opened(self) -> _Data:
        if self._data is None:
            raise ConfigError("the dataset is not open yet", where=self.root, mend="call setup() first")
        return self._data

    def train_dataloader(self) -> ResumableLoader:
        """Batches of the training episodes that know which samples have been trained."""
        if self._loader is None:
            order = SampleOrder(len(self.train_dataset), self.seed)
            rank, world_size = self._place()
            if self.batch_size * world_size > order.size:
                raise ConfigError(
                    "a batch is larger than the training set",
                    where="batch_size",
                    found=f"{self.batch_size} samples on each of {world_size} ranks",
                    expected=f"at most the {order.size} frames of {len(self.train_dataset.episodes)} episodes",
                    mend="lower batch_size",
                )
            self._loader = ResumableLoader(
                self.train_dataset,
                order,
                trainer=self.trainer,
                first_epoch=self.trainer.current_epoch if self.trainer else 0,
                drop_last=self.drop_last,
                **self._options(rank, world_size),
            )
            if self._order_state is not None:
                self._loader.load_state_dict(self._order_state)
        return self._loader

    def val_dataloader(self) -> ShardedLoader | list[Any]:
        """Batches of the held-out episodes in order, each sample once over all ranks."""
        if self.val_dataset is None:
            return []
        order = SampleOrder(len(self.val_dataset), self.seed, shuffle=False)
        return ShardedLoader(self.val_dataset, order, **self._options(*self._place()))

    def test_dataloader(self) -> ShardedLoader | list[Any]:
        """As for validation."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Any] | list[Any]:
        """The held-out episodes in order, in a `DataLoader` for Lightning to shard and to number."""
        if self.val_dataset is None:
            return []
        return DataLoader(
            self.val_dataset, batch_size=self.batch_size, collate_fn=self.collator, num_workers=self.num_workers
        )

    def _options(self, rank: int, world_size: int) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "collate_fn": self.collator,
            "num_workers": self.num_workers,
            "rank": rank,
            "world_size": world_size,
            "pin_memory": torch.cuda.is_available(),
        }

    def _place(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def state_dict(self) -> dict[str, Any]:
        """The dataset's fingerprint and the place in its order: strings and integers."""
        order = self._loader.state_dict() if self._loader is not None else self._order_state
        return {"dataset_fingerprint": self.dataset_fingerprint, "order": order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where `state_dict` was made; any dataset may be evaluated, but only the same one trained on.

        Raises:
            CheckpointError: The training run was on another dataset, split or seed.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        if state_dict["dataset_fingerprint"] != self.dataset_fingerprint:
            raise CheckpointError(
                "the checkpoint's run was on another dataset, so it does not say which samples are left",
                where=self.root,
                found=f"fingerprint {self.dataset_fingerprint[:12]}",
                expected=f"fingerprint {state_dict['dataset_fingerprint'][:12]}",
                mend="resume with the dataset of the run, or start a new run from its weights",
            )
        self._order_state = state_dict["order"]
        if self._loader is not None and self._order_state is not None:
            self._loader.load_state_dict(self._order_state)

    def teardown(self, stage: str | None = None) -> None:
        """Ends the worker processes."""
        if self._loader is not None:
            self._loader.close()


class _Data:
    """An opened and split dataset with what is computed of it."""

    def __init__(self, train: LeRobotDataset, val: LeRobotDataset | None, fingerprint: str) -> None:
        self.train, self.val, self.fingerprint = train, val, fingerprint
        used = set(train.cameras)
        self.features = {key: value for key, value in train.features.items() if not value.is_visual or key in used}
        numbers = [key for key, value in self.features.items() if not value.is_visual and value.dtype != "string"]
        self.stats = compute_stats(train, numbers)


def _open(module: LeRobotDataModule) -> _Data:
    whole = LeRobotDataset(module.root, cameras=[])
    if "action" not in whole.features:
        raise DatasetError("the dataset has no action", where=module.root, found=sorted(whole.features))
    count = _held_out(module.val_episodes, len(whole.episodes))
    shuffled = [whole.episodes[i] for i in SampleOrder(len(whole.episodes), module.seed).indices(0, 0, count)]
    held_out = set(shuffled)
    windows = {"action": [frame / whole.fps for frame in range(module.action_horizon)], **module.delta_timestamps}

    def part(episodes: list[int]) -> LeRobotDataset:
        return LeRobotDataset(
            module.root,
            delta_timestamps=windows,
            episodes=episodes,
            video_backend=module.video_backend,
            cameras=module.cameras,
            decoded_cache_gb=module.decoded_cache_gb,
        )

    train = part([episode for episode in whole.episodes if episode not in held_out])
    return _Data(train, part(sorted(held_out)) if held_out else None, _fingerprint(whole))


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
