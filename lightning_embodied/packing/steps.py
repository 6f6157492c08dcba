"""The steps of an epoch whose batches are filled by tokens: a pure function of the samples' lengths.

Every rank computes the plan of all ranks from the same lengths, so they agree on the number of steps without a word,
and a plan need not be stored: to resume, it is made again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from lightning_embodied.counts import check_count
from lightning_embodied.errors import ConfigError
from lightning_embodied.packing.balance import balance_packs, check_quadratic_cost
from lightning_embodied.packing.planners import Pack, Planner, check_budget, plan_packs

OverBudget = Literal["error", "drop"]


@dataclass(frozen=True)
class PackingOptions:
    """How samples are put into packs, and packs into steps.

    Args:
        planner: `best-fit-window` packs nearly as well as `first-fit-decreasing` and mixes lengths as the order does;
            `padded` and `length-grouped` are there to compare with (see `plan_packs`).
        window: Samples that `best-fit-window` may choose from.
        over_budget: What becomes of a sample longer than the token budget: `error` names it, `drop` leaves it out of
            every epoch and says how many there are.
        quadratic_cost: A sample of `n` tokens costs `n + quadratic_cost * n ** 2` when the work of the ranks is
            balanced; about `1 / (6 * width)` for a transformer of that width.

    Raises:
        ConfigError: An option has a value that it cannot have.
    """

    planner: Planner = "best-fit-window"
    window: int = 64
    over_budget: OverBudget = "error"
    quadratic_cost: float = 1e-4

    def __post_init__(self) -> None:
        check_count(self.window, "window")
        check_quadratic_cost(self.quadratic_cost)
        for name, known in (("planner", get_args(Planner)), ("over_budget", get_args(OverBudget))):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError("no such way of packing", where=name, found=value, expected=", ".join(known))


@dataclass(frozen=True)
class StepPlan:
    """All that decides the steps of an epoch beside the lengths of its samples.

    Args:
        token_budget: Most tokens of a pack.
        num_replicas: Number of ranks; each takes one pack a step.
        drop_last: Leave out packs that do not fill the last step, instead of splitting them.
        options: Planner and balance.

    Raises:
        ConfigError: A number is out of range.
    """

    token_budget: int
    num_replicas: int = 1
    drop_last: bool = False
    options: PackingOptions = field(default_factory=PackingOptions)

    def __post_init__(self) -> None:
        for name in ("token_budget", "num_replicas"):
            check_count(getattr(self, name), name)

    def steps(self, lengths: Sequence[int]) -> list[list[Pack]]:
        """Plans the steps.

        Args:
            lengths: Tokens of each sample, in the order in which they are to be seen.

        Returns:
            For every step one pack of positions in `lengths` per rank; the same number of them on every rank.

        Raises:
            DatasetError: A sample is over the budget and must not be dropped, or every one would be; names its place.
        """
        if self.options.over_budget == "error":
            check_budget(lengths, self.token_budget)
        kept = [position for position, length in enumerate(lengths) if length <= self.token_budget]
        if not kept:
            check_budget(lengths, self.token_budget)
        packs = plan_packs(
            [lengths[i] for i in kept], self.token_budget, self.options.planner, window=self.options.window
        )
        packs = [[kept[i] for i in pack] for pack in packs]
        if self.drop_last:
            packs = packs[: len(packs) // self.num_replicas * self.num_replicas]
        return balance_packs(lengths, packs, self.num_replicas, quadratic_cost=self.options.quadratic_cost)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` reads them."""
        values = asdict(self)
        return {**values.pop("options"), **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepPlan:
        """The plan that wrote `values`."""
        own = {name: values[name] for name in ("token_budget", "num_replicas", "drop_last")}
        return cls(**own, options=PackingOptions(**{key: value for key, value in values.items() if key not in own}))
