"""A LeRobot dataset as a `LightningDataModule`: split by episode, exact statistics, resumable order.

It shards by itself, so it needs no `use_distributed_sampler`, and it keeps its own place in the checkpoint: a run
continues on other ranks, batch sizes and workers with exactly the samples it had not seen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_embodied.data.dataset import LeRobotDataset
from lightning_embodied.data.loader import ResumableLoader, ShardedLoader
from lightning_embodied.data.order import SampleOrder
from lightning_embodied.data.split import SplitDataset
from lightning_embodied.data.video import VideoBackend
from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.features import Feature, FeatureStats
from lightning_embodied.packing import PackingOptions, VarlenPackingCollator, check_budget

_PACKING = PackingOptions()


class LeRobotDataModule(LightningDataModule):
    """Loaders over one LeRobot dataset, for training, validation, test and prediction.

    Validation, test and prediction read the held-out episodes in order; predictions come from a plain `DataLoader`
    that Lightning shards. After `setup()` the properties describe the data.

    Args:
        root: Directory of the dataset, the one that holds `meta/`.
        collator: Makes a batch of a list of samples. Default: stacks them into a dict, as LeRobot's own loader does.
        action_horizon: Frames of an action chunk, at least 1; past the end of the episode `action_is_pad` is true. A
            policy that says itself which frames it reads (`LeRobotPolicyModule`) decides instead.
        batch_size: Samples of a batch on each rank. With `token_budget` it counts for predictions only.
        token_budget: Tokens that a batch on each rank is filled up to with whole samples, in place of `batch_size`.
        packing: With `token_budget`: how batches are filled and the ranks' work is balanced.
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
        collator: VarlenPackingCollator | None = None,
        *,
        action_horizon: int = 16,
        batch_size: int = 64,
        token_budget: int | None = None,
        packing: PackingOptions = _PACKING,
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
            ("token_budget", 1 if token_budget is None else token_budget, 1),
            ("num_workers", num_workers, 0),
            ("val_episodes", val_episodes, 0),
        ):
            if value < least:
                raise ConfigError(f"{name} is too small", where=name, found=value, expected=f"at least {least}")
        self.root, self.collator, self.action_horizon = root, collator, action_horizon
        self.batch_size, self.token_budget, self.packing = batch_size, token_budget, packing
        self.num_workers, self.val_episodes = num_workers, val_episodes
        self.cameras, self.delta_timestamps = cameras, dict(delta_timestamps or {})
        self.video_backend, self.decoded_cache_gb, self.drop_last = video_backend, decoded_cache_gb, drop_last
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        self._data: SplitDataset | None = None
        self._loader: ResumableLoader | None = None
        self._order_state: dict[str, int] | None = None

    def setup(self, stage: str | None = None) -> None:
        """Opens the dataset, splits it and computes the statistics; once, however often it is called.

        Raises:
            DatasetError: The dataset is damaged, has no action or no episode left to train on.
            ConfigError: A batch of all ranks is larger than the training set.
        """
        if self._data is None:
            self._data = SplitDataset(
                self.root,
                self.val_episodes,
                self.seed,
                action_horizon=self.action_horizon,
                frame_windows=getattr(self.trainer and self.trainer.lightning_module, "frame_windows", None),
                delta_timestamps=self.delta_timestamps,
                cameras=self.cameras,
                video_backend=self.video_backend,
                decoded_cache_gb=self.decoded_cache_gb,
            )
            self.action_horizon = self._data.action_horizon
            if self.collator is not None:
                self.collator.encoder.use_statistics(self.stats)
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
    def _opened(self) -> SplitDataset:
        if self._data is None:
            raise ConfigError("the dataset is not open yet", where=self.root, mend="call setup() first")
        return self._data

    def train_dataloader(self) -> ResumableLoader:
        """Batches of the training episodes that know which samples have been trained."""
        if self._loader is None:
            order = SampleOrder(len(self.train_dataset), self.seed)
            options = self._options(self.train_dataset)
            self._check_step(order.size, options)
            self._loader = ResumableLoader(
                self.train_dataset,
                order,
                trainer=self.trainer,
                first_epoch=self.trainer.current_epoch if self.trainer else 0,
                drop_last=self.drop_last,
                **options,
            )
            if self._order_state is not None:
                self._loader.load_state_dict(self._order_state)
        return self._loader

    def _check_step(self, samples: int, options: Mapping[str, Any]) -> None:
        """Refuses a step of all ranks that is larger than the training set."""
        unit = "samples" if self.token_budget is None else "tokens"
        name = "batch_size" if self.token_budget is None else "token_budget"
        each, there = options[name], samples if self.token_budget is None else int(options["lengths"].sum())
        if each * options["world_size"] > there:
            raise ConfigError(
                "a batch is larger than the training set",
                where=name,
                found=f"{each} {unit} on each of {options['world_size']} ranks",
                expected=f"at most the {there} {unit} of {len(self.train_dataset.episodes)} episodes",
                mend=f"lower {name}",
            )

    def val_dataloader(self) -> ShardedLoader | list[Any]:
        """Batches of the held-out episodes in order, each sample once over all ranks."""
        if self.val_dataset is None:
            return []
        order = SampleOrder(len(self.val_dataset), self.seed, shuffle=False)
        return ShardedLoader(self.val_dataset, order, **self._options(self.val_dataset))

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

    def _options(self, dataset: LeRobotDataset) -> dict[str, Any]:
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        return {
            **self._batches(dataset),
            "collate_fn": self.collator,
            "num_workers": self.num_workers,
            "rank": rank,
            "world_size": world_size,
            "pin_memory": torch.cuda.is_available(),
        }

    def _batches(self, dataset: LeRobotDataset) -> dict[str, Any]:
        if self.token_budget is None:
            return {"batch_size": self.batch_size}
        if self.collator is None:
            raise ConfigError(
                "batches that are not packed cannot be filled by tokens",
                where="token_budget",
                found="no collator",
                mend="set collator: VarlenPackingCollator, or batch_size instead",
            )
        lengths = dataset.token_counts(self.collator.encoder.count_tokens)
        over = int((lengths > self.token_budget).sum())
        if over and (self.packing.over_budget == "error" or over == len(lengths)):
            check_budget(lengths.tolist(), self.token_budget, lambda frame: _name(dataset, frame))
        if over:
            first = _name(dataset, int(lengths.argmax()))
            rank_zero_warn(f"{over} of {len(lengths)} samples are over token_budget and left out, such as {first}")
        return {"token_budget": self.token_budget, "lengths": lengths, "packing": self.packing}

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


def _name(dataset: LeRobotDataset, frame: int) -> str:
    episode, index = (int(dataset.numeric(key)[frame, 0]) for key in ("episode_index", "frame_index"))
    return f"{dataset.root}: episode {episode}, frame {index}"
