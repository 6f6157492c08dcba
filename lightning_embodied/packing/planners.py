"""Planners: which whole samples share a pack of a given token budget.

First-fit-decreasing sees all lengths and is within 11/9 of the optimum (Johnson 1973); best-fit with a bounded window
works on a stream and keeps its order up to the window. Two padded baselines show what they gain. A pack is a list of
positions in `lengths`; no planner loses, repeats or cuts a sample.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Literal, TypeVar, get_args

from lightning_embodied.counts import check_count, check_counts
from lightning_embodied.errors import ConfigError, DatasetError

T = TypeVar("T")
Pack = list[int]
Planner = Literal["first-fit-decreasing", "best-fit-window", "padded", "length-grouped"]


def plan_packs(
    lengths: Sequence[int], token_budget: int, planner: Planner = "best-fit-window", *, window: int = 64
) -> list[Pack]:
    """Divides samples into packs.

    Args:
        lengths: Tokens of each sample, in the order in which they are to be seen.
        token_budget: Most tokens of a pack. For the padded planners a pack counts its longest sample times its
            number of samples.
        planner: `first-fit-decreasing` packs best and mixes the whole order; `best-fit-window` looks at `window`
            samples at a time; `padded` cuts the order where the padded batch is full; `length-grouped` does so after
            sorting by length.
        window: Samples that `best-fit-window` may choose from.

    Returns:
        Packs of positions in `lengths`, each position once; the packs in the order of their first samples, so that
        planners which sort do not turn an epoch into a curriculum of lengths.

    Raises:
        DatasetError: A sample is longer than the budget; names its position.
        ConfigError: No such planner, the window is empty, the budget is not positive, or a length is no whole number.
    """
    lengths = check_counts(lengths, "lengths")
    check_budget(lengths, token_budget)
    if planner == "first-fit-decreasing":
        packs = _first_fit_decreasing(lengths, token_budget)
    elif planner == "best-fit-window":
        packs = list(pack_stream(range(len(lengths)), lengths.__getitem__, token_budget, window=window))
    elif planner == "padded":
        packs = _padded(lengths, token_budget, range(len(lengths)))
    elif planner == "length-grouped":
        packs = _padded(lengths, token_budget, sorted(range(len(lengths)), key=lengths.__getitem__))
    else:
        raise ConfigError("no such planner", found=planner, expected=", ".join(get_args(Planner)))
    return sorted(packs, key=itemgetter(0))


def pack_stream(
    samples: Iterable[T], length: Callable[[T], int], token_budget: int, *, window: int = 64
) -> Iterator[list[T]]:
    """Packs samples as they arrive, by best fit in a bounded window.

    The oldest waiting sample opens a pack, then always the longest one that still fits joins, so no sample waits for
    ever.

    Args:
        samples: Any stream of samples, finite or not.
        length: Tokens of a sample.
        token_budget: Most tokens of a pack.
        window: Samples to choose from.

    Yields:
        Packs, each sample in one of them.

    Raises:
        DatasetError: A sample is longer than the budget.
        ConfigError: The window is empty, the budget is not positive, or a length is no whole number.
    """
    check_count(window, "window")
    check_count(token_budget, "token_budget")
    arriving = enumerate(samples)
    waiting: list[tuple[int, int, T]] = []  # (length, -number, sample), sorted: of equal lengths the oldest is last

    def refill() -> None:
        while len(waiting) < window and (arrived := next(arriving, None)) is not None:
            number, sample = arrived
            tokens = check_count(length(sample), f"length of sample {number}", least=0)
            if tokens > token_budget:
                raise _over_budget(f"sample {number}", tokens, token_budget)
            bisect.insort(waiting, (tokens, -number, sample), key=itemgetter(0, 1))

    refill()
    while waiting:
        tokens, _, sample = waiting.pop(max(range(len(waiting)), key=lambda place: waiting[place][1]))
        pack, free = [sample], token_budget - tokens
        refill()
        while (fitting := bisect.bisect_right(waiting, free, key=itemgetter(0))) > 0:
            tokens, _, sample = waiting.pop(fitting - 1)
            pack.append(sample)
            free -= tokens
            refill()
        yield pack


def check_budget(lengths: Sequence[int], token_budget: int, name: Callable[[int], str] = "sample {}".format) -> None:
    """Refuses samples that no pack can hold.

    Args:
        lengths: Tokens of each sample.
        token_budget: Most tokens of a pack.
        name: What to call the sample at a position.

    Raises:
        DatasetError: A sample is longer than the budget; names the first.
        ConfigError: The budget is not positive.
    """
    check_count(token_budget, "token_budget")
    over = [position for position, length in enumerate(lengths) if length > token_budget]
    if over:
        more = f" and {len(over) - 1} more" if len(over) > 1 else ""
        raise _over_budget(name(over[0]) + more, lengths[over[0]], token_budget)


def _over_budget(where: str, tokens: int, token_budget: int) -> DatasetError:
    return DatasetError(
        "a sample is over the token budget",
        where=where,
        found=f"{tokens} tokens",
        expected=f"at most {token_budget} (token_budget)",
        mend="raise token_budget, or leave such samples out: PackingOptions(over_budget='drop')",
    )


def padding_share(lengths: Sequence[int], packs: Sequence[Pack], token_budget: int) -> float:
    """Share of the tokens of all packs, each of the size of the budget, that no sample fills.

    Args:
        lengths: Tokens of each sample.
        packs: Packs of positions in `lengths`.
        token_budget: Tokens of a pack.

    Returns:
        Between 0 and 1; 0 without packs.

    Raises:
        ConfigError: The budget is not positive.
    """
    check_count(token_budget, "token_budget")
    used = sum(lengths[position] for pack in packs for position in pack)
    return 1.0 - used / (token_budget * len(packs)) if packs else 0.0


def _first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[Pack]:
    tree = _FreeSpace(max(1, len(lengths)), budget)
    packs: list[Pack] = []
    for position in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        index = tree.take_first(lengths[position])
        if index == len(packs):
            packs.append([])
        packs[index].append(position)
    return packs


class _FreeSpace:
    """Free tokens of up to `size` packs; finds the first pack with enough of them in O(log size)."""

    def __init__(self, size: int, budget: int) -> None:
        self.leaves = 1 << (size - 1).bit_length()
        self.most = [budget] * (2 * self.leaves)  # a segment tree of maxima, the root at 1

    def take_first(self, tokens: int) -> int:
        node = 1
        while node < self.leaves:
            node = 2 * node if self.most[2 * node] >= tokens else 2 * node + 1
        index = node - self.leaves
        self.most[node] -= tokens
        while node > 1:
            node //= 2
            self.most[node] = max(self.most[2 * node], self.most[2 * node + 1])
        return index


def _padded(lengths: Sequence[int], budget: int, order: Sequence[int]) -> list[Pack]:
    packs: list[Pack] = []
    longest = 0
    for position in order:
        longest = max(longest, lengths[position])
        if not packs or longest * (len(packs[-1]) + 1) > budget:
            packs.append([])
            longest = lengths[position]
        packs[-1].append(position)
    return packs
