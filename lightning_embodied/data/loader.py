"""A loader that can stop after any sample and go on, on any number of ranks and workers.

It shards by itself and is no `DataLoader`, so Lightning leaves its sampler alone (`use_distributed_sampler` may stay
as it is), and it starts nothing before its first batch is asked for, so that a position restored late still counts.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from lightning_embodied.data import progress
from lightning_embodied.data.order import GlobalBatches, SampleOrder
from lightning_embodied.errors import CheckpointError, ConfigError

_Numbered = tuple[int, int]  # index in the dataset, seed of the sample


class _SeededSamples(Dataset[Any]):
    """Reads a sample with the global random generators at the sample's own seed, and restores them."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, numbered: _Numbered) -> Any:  # noqa: ANN401
        index, seed = numbered
        if get_worker_info() is not None:  # nothing else draws numbers in a worker
            _seed_generators(seed)
            return self.dataset[index]
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            _seed_generators(seed)
            return self.dataset[index]
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])


def _seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (alive := method()) is not None:
        alive()


class _RankBatches(Sampler[list[_Numbered]]):
    """The batches of one rank from a position of an epoch on."""

    def __init__(self, order: SampleOrder, batches: GlobalBatches, rank: int) -> None:
        self.order, self.batches, self.rank = order, batches, rank
        self.epoch = self.position = 0

    def __iter__(self) -> Iterator[list[_Numbered]]:
        epoch, position = self.epoch, self.position
        for step in range(self.batches.steps(position)):
            share = self.batches.share(position, step, self.rank)
            indices = self.order.indices(epoch, *share).tolist()
            yield list(zip(indices, self.order.seeds(epoch, *share).tolist(), strict=True))


class ShardedLoader:
    """Batches of this rank, in a `SampleOrder`, the same number of them on every rank.

    Args:
        dataset: Map-style dataset of `order.size` samples.
        order: Which sample is the n-th.
        batch_size: Samples of a batch on this rank.
        collate_fn: Makes a batch of a list of samples.
        num_workers: Worker processes; they stay alive between epochs.
        rank: This process's rank.
        world_size: Number of ranks.
        drop_last: Leave out what does not fill the last step (see `GlobalBatches`).
        pin_memory: Put batches into page-locked memory.

    Raises:
        ConfigError: `batch_size` or `num_workers` is out of range.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: SampleOrder,
        *,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        pin_memory: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ConfigError("a batch needs samples", where="batch_size", found=batch_size, expected="at least 1")
        if num_workers < 0:
            raise ConfigError("no such number of workers", where="num_workers", found=num_workers, expected="0 or more")
        self.batches = GlobalBatches(order.size, batch_size, world_size, drop_last)
        self.order = order
        self._plan = _RankBatches(order, self.batches, rank)
        self._make_loader = partial(
            DataLoader,
            _SeededSamples(dataset),
            batch_sampler=self._plan,
            collate_fn=collate_fn,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            generator=torch.Generator().manual_seed(order.seed),  # leaves the training's own random numbers alone
        )
        self._loader: DataLoader[Any] | None = None

    def __len__(self) -> int:
        """Number of batches of a whole epoch."""
        return self.batches.steps()

    def __iter__(self) -> Iterator[Any]:
        return self._from(0, 0)

    def _from(self, epoch: int, position: int) -> Iterator[Any]:
        self._plan.epoch, self._plan.position = epoch, position
        if self._loader is None:
            self._loader = self._make_loader()
        yield from self._loader

    def close(self) -> None:
        """Ends the worker processes; the next iteration starts new ones."""
        self._loader = None


class ResumableLoader(ShardedLoader):
    """A training loader that knows which samples have been trained.

    Each `iter()` after a batch has been taken begins the next epoch. With `trainer` a batch counts once its training
    step has ended and its gradient has reached the weights; without, once it has been handed out. Prefetched batches
    never count. A checkpoint in the middle of an accumulation window points to the window's first batch, because
    the gradients collected so far are not in the checkpoint.

    Args:
        dataset: As in `ShardedLoader`.
        order: As in `ShardedLoader`.
        trainer: The trainer whose loop takes the batches. It need not be told anything: the loader restores its
            position also where Lightning drops it, and sets the trainer's batch counters for another world size.
        first_epoch: Number of the first epoch.
        options: The other arguments of `ShardedLoader`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: SampleOrder,
        *,
        trainer: Trainer | None = None,
        first_epoch: int = 0,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(dataset, order, **options)
        self._trainer = trainer
        self._epoch, self._position = first_epoch, 0  # where the running epoch began, or the next will
        self._taken: int | None = None  # batches taken since; None before the first
        self._processed_before = 0
        self._restored = False
        # Lightning calls `loader.batch_sampler.sampler.set_epoch` before every epoch, as for a DistributedSampler.
        # The hook holds no reference, so that an unused loader is freed, and its workers end, at once.
        before_epoch = weakref.WeakMethod(self._before_epoch)
        self.batch_sampler = SimpleNamespace(sampler=SimpleNamespace(set_epoch=lambda _: _call(before_epoch)))

    def __iter__(self) -> Iterator[Any]:
        if self._taken is not None:
            self._epoch, self._position, self._taken = self._epoch + 1, 0, None
        return self._take()

    def _take(self) -> Iterator[Any]:
        self._processed_before = progress.processed_batches(self._trainer) if self._trainer else 0
        self._taken = 0
        fixed = self._trainer is not None and progress.overfits(self._trainer)
        for batch in self._from(0 if fixed else self._epoch, self._position):
            self._taken += 1
            yield batch

    def _before_epoch(self) -> None:
        if self._trainer is None:
            return
        progress.load_forgotten_states(self._trainer)
        if self._restored:
            self._restored = False
            over = self._position == 0 and progress.epoch_finished(self._trainer)
            done = len(self) - (0 if over else self.batches.steps(self._position))
            progress.align_counters(self._trainer, done, finished=over)

    def state_dict(self) -> dict[str, int]:
        """The next sample: `epoch`, `position` within it, and the `seed` and `samples` of the order they refer to."""
        epoch, position = self._epoch, self._position
        if self._taken is not None:
            trained, finished = self._taken, False
            if self._trainer is not None:
                processed = progress.processed_batches(self._trainer) - self._processed_before
                trained = max(0, min(trained, processed) - progress.batches_without_step(self._trainer))
                finished = progress.epoch_finished(self._trainer)
            if finished or trained >= self.batches.steps(position):
                epoch, position = epoch + 1, 0
            else:
                position = self.batches.advance(position, trained)
        return {"epoch": epoch, "position": position, "seed": self.order.seed, "samples": self.order.size}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes on where `state_dict` was made, with any world size, batch size and number of workers.

        Raises:
            CheckpointError: The state is of another order: another seed or number of samples.
        """
        for key, own in (("seed", self.order.seed), ("samples", self.order.size)):
            if state_dict.get(key) != own:
                raise CheckpointError(
                    f"the checkpoint's sample order has another {key}, so it does not say which samples are left",
                    where=key,
                    found=own,
                    expected=state_dict.get(key),
                    mend="resume with the dataset, split and seed of the run, or start a new one from its weights",
                )
        self._epoch, self._position, self._taken = int(state_dict["epoch"]), int(state_dict["position"]), None
        self._restored = True
