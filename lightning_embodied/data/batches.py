"""How the samples of an epoch become the steps of all ranks: by number of samples, or by tokens.

Both answer the same questions about a `Place` in the order, so that one loader serves both. Every rank makes the same
number of steps, and what has been taken is a few integers, never a list of samples.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_embodied.data.order import SampleOrder
from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.packing import StepPlan, check_budget
from lightning_embodied.packing.planners import Pack


@dataclass(frozen=True)
class Place:
    """Which samples of which epoch have been taken.

    Attributes:
        epoch: Number of the epoch.
        position: The first samples of the order that have been taken, batches being counted in samples.
        taken: Steps taken and the plan they are of, batches being filled by tokens; one entry for each plan, since a
            run may be continued on other ranks or with another budget.
    """

    epoch: int = 0
    position: int = 0
    taken: tuple[tuple[StepPlan, int], ...] = ()

    @property
    def is_start(self) -> bool:
        """Whether nothing of the epoch has been taken."""
        return self.position == 0 and not self.taken

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` reads them."""
        taken = [{"steps": steps, **plan.to_dict()} for plan, steps in self.taken]
        return {"epoch": self.epoch, "position": self.position, **({"taken": taken} if taken else {})}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Place:
        """The place that wrote `values`."""
        entries = [dict(entry) for entry in values.get("taken", ())]
        taken = [(int(entry.pop("steps")), StepPlan.from_dict(entry)) for entry in entries]
        return cls(int(values["epoch"]), int(values["position"]), tuple((plan, steps) for steps, plan in taken))


class Batches(ABC):
    """The steps of all ranks from any place of the order on."""

    @abstractmethod
    def steps(self, place: Place) -> int:
        """Number of steps from a place to the end of its epoch."""

    @abstractmethod
    def whole(self, place: Place) -> int:
        """Number of steps of the epoch of a place, those taken included."""

    @abstractmethod
    def advance(self, place: Place, steps: int) -> Place:
        """The place reached by some steps within the epoch."""

    @abstractmethod
    def numbers(self, place: Place, step: int, rank: int) -> NDArray[np.int64]:
        """Numbers in the order of the samples that a rank takes in the `step`-th step from a place: int64 `[B]`."""

    @abstractmethod
    def state_dict(self) -> dict[str, int]:
        """What a checkpoint must say for `check` to tell whether a place in it means the same here."""

    @abstractmethod
    def check(self, place: Place, state_dict: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` if the run cannot go on at a place.

        Args:
            place: Where the checkpoint was made.
            state_dict: The `state_dict` of the batches it was made with.
        """


@dataclass(frozen=True)
class SampleBatches(Batches):
    """Batches of a number of samples.

    A step takes the next `batch_size * world_size` samples, and rank `r` the `r`-th of the equal slices. Every sample
    is taken once. What is left at the end of an epoch:

    - `drop_last`: samples that do not fill a step are left out; another epoch leaves out others.
    - otherwise they make a last, smaller step, spread evenly; when they are fewer than the ranks they join the step
      before, because a rank without a sample would hang the others.
    - only where there is no step before (fewer samples than ranks in all, or left by a run on fewer ranks) are they
      repeated on the ranks that would have none.

    Args:
        size: Number of samples of an epoch.
        batch_size: Samples a rank takes in a step.
        world_size: Number of ranks.
        drop_last: See above.

    Raises:
        ConfigError: `batch_size` is less than 1.
    """

    size: int
    batch_size: int
    world_size: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError("a batch needs samples", where="batch_size", found=self.batch_size, expected="at least 1")

    @property
    def step_size(self) -> int:
        """Samples that all ranks together take in a step."""
        return self.batch_size * self.world_size

    def steps(self, place: Place) -> int:
        """See `Batches`."""
        full, rest = divmod(self.size - place.position, self.step_size)
        if self.drop_last or rest == 0:
            return full
        return full + int(rest >= self.world_size or full == 0)

    def whole(self, place: Place) -> int:
        """See `Batches`."""
        return self.steps(Place(place.epoch))

    def advance(self, place: Place, steps: int) -> Place:
        """See `Batches`."""
        end = self.size if steps >= self.steps(place) else place.position + steps * self.step_size
        return replace(place, position=end)

    def numbers(self, place: Place, step: int, rank: int) -> NDArray[np.int64]:
        """See `Batches`."""
        start = place.position + step * self.step_size
        count = (start + self.step_size if self.drop_last else self.advance(place, step + 1).position) - start
        if count < self.world_size:
            return np.array([start + rank % count])
        return np.arange(start + rank * count // self.world_size, start + (rank + 1) * count // self.world_size)

    def state_dict(self) -> dict[str, int]:
        """Nothing: a place is a number of samples, whatever the batch size."""
        return {}

    def check(self, place: Place, state_dict: Mapping[str, Any]) -> None:
        """See `Batches`."""
        if place.taken:
            raise CheckpointError(
                "the checkpoint lies within an epoch of batches filled by tokens",
                where="token_budget",
                found="batches counted in samples (batch_size)",
                expected=f"token_budget {place.taken[-1][0].token_budget}, or any other",
                mend="resume with a token_budget; at the end of an epoch both can be changed",
            )


class TokenBatches(Batches):
    """Batches filled up to a token budget.

    The packs of an epoch, and the steps they make, are planned from the lengths alone when the epoch begins, at 2 to
    3 seconds a million samples. A run continued with another plan (ranks, budget, planner) packs anew what is left.

    Args:
        order: The order of the samples.
        lengths: Tokens of each sample of the dataset.
        plan: Budget, ranks and planner.

    Attributes:
        dropped: int64: samples of the dataset left out because they are over the budget.

    Raises:
        DatasetError: A sample is over the budget and must not be dropped; names it.
        ConfigError: There is another number of lengths than of samples.
    """

    def __init__(self, order: SampleOrder, lengths: Sequence[int] | NDArray[np.int64], plan: StepPlan) -> None:
        self.order, self.plan = order, plan
        self.lengths = np.asarray(lengths, dtype=np.int64)
        if self.lengths.shape != (order.size,):
            raise ConfigError(
                "every sample needs its number of tokens",
                where="lengths",
                found=f"{list(self.lengths.shape)}",
                expected=f"[{order.size}]",
            )
        self.dropped = np.flatnonzero(self.lengths > plan.token_budget)
        if plan.options.over_budget == "error" or len(self.dropped) == order.size:
            check_budget(self.lengths.tolist(), plan.token_budget)
        self._planned: tuple[Place, list[list[Pack]]] | None = None

    def steps(self, place: Place) -> int:
        """See `Batches`."""
        return len(self._remaining(place))

    def whole(self, place: Place) -> int:
        """See `Batches`."""
        return sum(steps for _, steps in place.taken) + self.steps(place)

    def advance(self, place: Place, steps: int) -> Place:
        """See `Batches`."""
        if not steps:
            return place
        *before, (plan, taken) = place.taken or [(self.plan, 0)]
        entries = [(plan, taken + steps)] if plan == self.plan else [(plan, taken), (self.plan, steps)]
        return replace(place, taken=(*before, *entries))

    def numbers(self, place: Place, step: int, rank: int) -> NDArray[np.int64]:
        """See `Batches`."""
        return np.array(self._remaining(place)[step][rank])

    def state_dict(self) -> dict[str, int]:
        """A checksum of the lengths: other lengths make other packs."""
        return {"lengths": zlib.crc32(self.lengths.tobytes())}

    def check(self, place: Place, state_dict: Mapping[str, Any]) -> None:
        """See `Batches`."""
        if place.position:
            raise CheckpointError(
                "the checkpoint lies within an epoch of batches counted in samples",
                where="token_budget",
                found=f"token_budget {self.plan.token_budget}",
                expected="batch_size",
                mend="resume with a batch_size; at the end of an epoch both can be changed",
            )
        if place.taken and state_dict.get("lengths") != self.state_dict()["lengths"]:
            raise CheckpointError(
                "the samples have other numbers of tokens than in the checkpoint's run, so it does not say which of "
                "them are left",
                where="lengths",
                mend="resume with the token path (tokenizer, picture and patch size, cameras) of the run",
            )

    def _remaining(self, place: Place) -> list[list[Pack]]:
        """`[step][rank]` packs of sample numbers from a place on."""
        if self._planned is None or self._planned[0] != place:
            self._planned = (place, self._replay(place))
        return self._planned[1]

    def _replay(self, place: Place) -> list[list[Pack]]:
        lengths = self.lengths[self.order.indices(place.epoch, 0, self.order.size)]
        left = np.arange(self.order.size)
        for entry, (plan, taken) in enumerate(place.taken, start=1):
            steps = _numbered(plan.steps(lengths[left].tolist()), left)
            if plan == self.plan and entry == len(place.taken):
                return steps[taken:]
            left = np.setdiff1d(left, [number for step in steps[:taken] for pack in step for number in pack])
        return _numbered(self.plan.steps(lengths[left].tolist()), left)


def _numbered(steps: list[list[Pack]], numbers: NDArray[np.int64]) -> list[list[Pack]]:
    return [[numbers[pack].tolist() for pack in step] for step in steps]
