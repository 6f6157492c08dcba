"""A loader that can stop after any sample and go on, on any number of ranks and workers.

It shards by itself and is no `DataLoader`, so Lightning leaves its sampler alone (`use_distributed_sampler` may stay
as it is), and it starts nothing before its first batch is asked for, so that a position restored late still counts.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from lightning_embodied.data import progress
from lightning_embodied.data.batches import Batches, Place, SampleBatches, TokenBatches
from lightning_embodied.data.order import SampleOrder
from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.packing import PackingOptions, StepPlan

_Numbered = tuple[int, int]  # index in the dataset, seed of the sample


class _SeededSamples(Dataset[Any]):
    """Reads each sample with the global random generators at its own seed, and restores them after the batch."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, numbered: list[_Numbered]) -> list[Any]:
        """The samples of a batch; `DataLoader` prefers this to reading them one by one."""
        if get_worker_info() is not None:  # nothing else draws numbers in a worker
            return self._read(numbered)
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            return self._read(numbered)
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])

    def _read(self, numbered: list[_Numbered]) -> list[Any]:
        samples = []
        for index, seed in numbered:
            _seed_generators(seed)
            samples.append(self.dataset[index])
        return samples


def _seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (alive := method()) is not None:
        alive()


class _RankBatches(Sampler[list[_Numbered]]):
    """The batches of one rank from a place of the order on."""

    def __init__(self, order: SampleOrder, batches: Batches, rank: int) -> None:
        self.order, self.batches, self.rank = order, batches, rank
        self.place = Place()

    def __iter__(self) -> Iterator[list[_Numbered]]:
        place = self.place
        for step in range(self.batches.steps(place)):
            numbers = self.batches.numbers(place, step, self.rank)
            indices = self.order.indices_of(place.epoch, numbers).tolist()
            yield list(zip(indices, self.order.seeds_of(place.epoch, numbers).tolist(), strict=True))


class ShardedLoader:
    """Batches of this rank, in a `SampleOrder`, the same number of them on every rank.

    Args:
        dataset: Map-style dataset of `order.size` samples.
        order: Which sample is the n-th.
        batch_size: Samples of a batch on this rank (see `SampleBatches`).
        token_budget: Tokens that a batch on this rank is filled up to, in place of `batch_size` (see `TokenBatches`).
        lengths: With `token_budget`: tokens of each sample of the dataset.
        packing: With `token_budget`: how batches are filled and the ranks' work is balanced.
        collate_fn: Makes a batch of a list of samples.
        num_workers: Worker processes; they stay alive between epochs.
        rank: This process's rank.
        world_size: Number of ranks.
        drop_last: Leave out what does not fill the last step.
        pin_memory: Put batches into page-locked memory.

    Attributes:
        batches: How the samples become steps.

    Raises:
        ConfigError: Not one of `batch_size` and `token_budget` is given, or a number is out of range.
        DatasetError: A sample is over the token budget and must not be dropped; names it.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: SampleOrder,
        *,
        batch_size: int | None = None,
        token_budget: int | None = None,
        lengths: Sequence[int] | NDArray[np.int64] = (),
        packing: PackingOptions | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        pin_memory: bool = False,
    ) -> None:
        if num_workers < 0:
            raise ConfigError("no such number of workers", where="num_workers", found=num_workers, expected="0 or more")
        self.batches: Batches
        if token_budget is not None and batch_size is None:
            plan = StepPlan(token_budget, world_size, drop_last, packing or PackingOptions())
            self.batches = TokenBatches(order, lengths, plan)
        elif batch_size is not None and token_budget is None:
            self.batches = SampleBatches(order.size, batch_size, world_size, drop_last)
        else:
            raise ConfigError(
                "a batch is either a number of samples or filled up to a number of tokens",
                where="batch_size, token_budget",
                found="neither" if batch_size is None else "both",
                expected="one of them",
            )
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
        return self.batches.steps(Place())

    def __iter__(self) -> Iterator[Any]:
        return self._from(Place())

    def _from(self, place: Place) -> Iterator[Any]:
        self._plan.place = place
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
        self._place = Place(first_epoch)  # where the running epoch began, or the next will
        self._taken: int | None = None  # batches taken since; None before the first
        self._processed_before = 0
        self._restored = False
        # Lightning calls `loader.batch_sampler.sampler.set_epoch` before every epoch, as for a DistributedSampler.
        # The hook holds no reference, so that an unused loader is freed, and its workers end, at once.
        before_epoch = weakref.WeakMethod(self._before_epoch)
        self.batch_sampler = SimpleNamespace(sampler=SimpleNamespace(set_epoch=lambda _: _call(before_epoch)))

    def __len__(self) -> int:
        """Number of batches of the epoch that runs or comes next. Filled by tokens, epochs differ by a few."""
        return self.batches.whole(self._place)

    def __iter__(self) -> Iterator[Any]:
        self._leave_epoch()
        return self._take()

    def _leave_epoch(self) -> None:
        if self._taken is not None:
            self._place, self._taken = Place(self._place.epoch + 1), None

    def _take(self) -> Iterator[Any]:
        self._processed_before = progress.processed_batches(self._trainer) if self._trainer else 0
        self._taken = 0
        fixed = self._trainer is not None and progress.overfits(self._trainer)
        for batch in self._from(replace(self._place, epoch=0) if fixed else self._place):
            self._taken += 1
            yield batch

    def _before_epoch(self) -> None:
        if self._trainer is None:
            return
        progress.load_forgotten_states(self._trainer)
        self._leave_epoch()
        progress.announce_length(self._trainer)
        if self._restored:
            self._restored = False
            over = self._place.is_start and progress.epoch_finished(self._trainer)
            done = len(self) - (0 if over else self.batches.steps(self._place))
            progress.align_counters(self._trainer, done, finished=over)

    def state_dict(self) -> dict[str, Any]:
        """The place of the next sample in the order, and what the order depends on: strings and integers."""
        place = self._place
        if self._taken is not None:
            trained, finished = self._taken, False
            if self._trainer is not None:
                processed = progress.processed_batches(self._trainer) - self._processed_before
                trained = max(0, min(trained, processed) - progress.batches_without_step(self._trainer))
                finished = progress.epoch_finished(self._trainer)
            over = finished or trained >= self.batches.steps(place)
            place = Place(place.epoch + 1) if over else self.batches.advance(place, trained)
        return {**place.to_dict(), "seed": self.order.seed, "samples": self.order.size, **self.batches.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where `state_dict` was made, with any world size, batch size, token budget and number of workers.

        Raises:
            CheckpointError: The state is of another order: another seed, number of samples or, filled by tokens,
                other lengths; or it lies within an epoch of batches of the other kind.
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
        place = Place.from_dict(state_dict)
        self.batches.check(place, state_dict)
        self._place, self._taken, self._restored = place, None, True
