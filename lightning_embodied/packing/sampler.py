"""A batch sampler that fills batches by tokens instead of samples, for any map-style DataLoader.

The epoch's packs are a pure function of lengths, order, epoch and number of ranks, planned from metadata before any
picture is read. So its state is a few integers, and a run continues on another number of ranks with exactly the
samples it had not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.packing.balance import balance_packs
from lightning_embodied.packing.planners import Pack, Planner, plan_packs


class PackedBatchSampler(Sampler[list[int]]):
    """Yields one pack of dataset indices a step for this rank: `DataLoader(dataset, batch_sampler=...)`.

    Every rank makes the same number of steps and every sample is seen once an epoch. Under Lightning say
    `Trainer(use_distributed_sampler=False)`; Lightning then sets the epoch.

    Args:
        lengths: Tokens of every sample of the dataset (`SampleEncoder.count_tokens` knows them from metadata).
        token_budget: Most tokens of a pack.
        planner: See `plan_packs`.
        window: See `plan_packs`.
        order: Dataset indices of an epoch in the order wanted, given its number. Default: shuffled by `seed`.
        seed: Seed of the default order and of the order of `first-fit-decreasing`'s packs.
        num_replicas: Number of ranks. Default: that of `torch.distributed`, or 1.
        rank: This rank. Default: that of `torch.distributed`, or 0.
        over_budget: What becomes of a sample longer than the budget: `error`, or `drop` (see `dropped`).
        quadratic_cost: See `balance_packs`.

    Attributes:
        dropped: Dataset indices left out because they are over the budget.

    Raises:
        DatasetError: A sample is over the budget and must not be dropped; names it.
        ConfigError: The rank is not among the ranks.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        token_budget: int,
        *,
        planner: Planner = "best-fit-window",
        window: int = 64,
        order: Callable[[int], Sequence[int]] | None = None,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        over_budget: Literal["error", "drop"] = "error",
        quadratic_cost: float = 0.0,
    ) -> None:
        parallel = dist.is_available() and dist.is_initialized()
        self.num_replicas = num_replicas or (dist.get_world_size() if parallel else 1)
        self.rank = rank if rank is not None else (dist.get_rank() if parallel else 0)
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigError("no such rank", found=self.rank, expected=f"0 to {self.num_replicas - 1}")
        self.lengths = [int(length) for length in lengths]
        self.token_budget, self.planner, self.window = token_budget, planner, window
        self.seed, self.quadratic_cost = seed, quadratic_cost
        self._order = order or self._shuffled
        over = [index for index, length in enumerate(self.lengths) if length > token_budget]
        self.dropped = tuple(over) if over_budget == "drop" else ()
        self._epoch = 0
        self._taken: list[tuple[int, int]] = []  # (number of ranks, steps) of this epoch, before this run
        self._planned: tuple[int, list[list[Pack]]] | None = None
        if over and over_budget == "error":
            plan_packs(self.lengths, token_budget)  # raises, naming the first

    @property
    def sampler(self) -> PackedBatchSampler:
        """Itself: Lightning sets the epoch of `loader.batch_sampler.sampler`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration goes through, from its start if it is another one."""
        if epoch != self._epoch:
            self._epoch, self._taken, self._planned = epoch, [], None

    def __len__(self) -> int:
        """Steps of this epoch, those taken before a resume included."""
        return sum(steps for _, steps in self._taken) + len(self._remaining())

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._remaining():
            yield list(step[self.rank])

    def state_dict(self, steps: int) -> dict[str, Any]:
        """Where the run is.

        Args:
            steps: Steps trained in this iteration of the epoch; workers have fetched more than that.
        """
        taken = [*self._taken]
        if taken and taken[-1][0] == self.num_replicas:
            taken[-1] = (self.num_replicas, taken[-1][1] + steps)
        else:
            taken.append((self.num_replicas, steps))
        return {"epoch": self._epoch, "taken": [list(entry) for entry in taken], "samples": len(self.lengths)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues behind a `state_dict`, on any number of ranks.

        Raises:
            CheckpointError: It is of a dataset of another size.
        """
        if state["samples"] != len(self.lengths):
            raise CheckpointError(
                "the sample order is of another dataset",
                found=f"{state['samples']} samples in the checkpoint",
                expected=f"{len(self.lengths)} samples",
            )
        self._epoch, self._planned = int(state["epoch"]), None
        self._taken = [(int(replicas), int(steps)) for replicas, steps in state["taken"]]

    def _remaining(self) -> list[list[Pack]]:
        if self._planned is None or self._planned[0] != self._epoch:
            self._planned = (self._epoch, self._plan())
        return self._planned[1]

    def _plan(self) -> list[list[Pack]]:
        left_out = set(self.dropped)
        order = [int(index) for index in self._order(self._epoch) if int(index) not in left_out]
        positions = plan_packs([self.lengths[i] for i in order], self.token_budget, self.planner, window=self.window)
        if self.planner in ("first-fit-decreasing", "length-grouped"):  # these leave the packs sorted by length
            mixed = np.random.default_rng([self.seed, self._epoch, 1]).permutation(len(positions))
            positions = [positions[i] for i in mixed]
        packs = [[order[position] for position in pack] for pack in positions]
        steps = self._balanced(packs, (self._taken or [(self.num_replicas, 0)])[0][0])
        for number, (replicas, taken) in enumerate(self._taken):
            after = self._taken[number + 1][0] if number + 1 < len(self._taken) else self.num_replicas
            steps = steps[taken:]
            if after != replicas:
                steps = self._balanced([pack for step in steps for pack in step], after)
        return steps

    def _balanced(self, packs: list[Pack], num_replicas: int) -> list[list[Pack]]:
        return balance_packs(self.lengths, packs, num_replicas, quadratic_cost=self.quadratic_cost)

    def _shuffled(self, epoch: int) -> Sequence[int]:
        order: list[int] = np.random.default_rng([self.seed, epoch]).permutation(len(self.lengths)).tolist()
        return order
