"""Planners: which whole samples share a pack of a given token budget.

First-fit-decreasing sees all lengths and is within 11/9 of the optimum (Johnson 1973); best-fit with a bounded window
works on a stream and keeps its order up to the window. Two padded baselines show what they gain. A pack is a list of
positions in `lengths`; no planner loses, repeats or cuts a sample.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from lightning_embodied.errors import ConfigError, DatasetError

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
        Packs of positions in `lengths`, each position once.

    Raises:
        DatasetError: A sample is longer than the budget; names its position.
        ConfigError: No such planner, or the window is empty.
    """
    over = [position for position, length in enumerate(lengths) if length > token_budget]
    if over:
        raise DatasetError(
            "a sample is over the token budget",
            where=f"sample {over[0]}" + (f" and {len(over) - 1} more" if len(over) > 1 else ""),
            found=f"{lengths[over[0]]} tokens",
            expected=f"at most {token_budget} (token_budget)",
            mend="raise token_budget, or drop such samples: PackedBatchSampler(over_budget='drop')",
        )
    if planner == "first-fit-decreasing":
        return _first_fit_decreasing(lengths, token_budget)
    if planner == "best-fit-window":
        return list(_best_fit_window(lengths, token_budget, window))
    if planner == "padded":
        return _padded(lengths, token_budget, range(len(lengths)))
    if planner == "length-grouped":
        return _padded(lengths, token_budget, sorted(range(len(lengths)), key=lengths.__getitem__))
    raise ConfigError("no such planner", found=planner, expected=", ".join(get_args(Planner)))


def padding_share(lengths: Sequence[int], packs: Sequence[Pack], token_budget: int) -> float:
    """Share of the tokens of all packs, each of the size of the budget, that no sample fills.

    Args:
        lengths: Tokens of each sample.
        packs: Packs of positions in `lengths`.
        token_budget: Tokens of a pack.

    Returns:
        Between 0 and 1; 0 without packs.
    """
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


def _best_fit_window(lengths: Sequence[int], budget: int, window: int) -> Iterator[Pack]:
    """The oldest waiting sample opens a pack, then always the longest one that still fits joins."""
    if window < 1:
        raise ConfigError("the packing window is empty", found=window, expected="at least 1")
    arriving = iter(range(len(lengths)))
    waiting: list[tuple[int, int]] = []  # (length, -position), sorted: of equal lengths the oldest is last

    def refill() -> None:
        while len(waiting) < window and (position := next(arriving, None)) is not None:
            bisect.insort(waiting, (lengths[position], -position))

    refill()
    while waiting:
        first = max(waiting, key=lambda item: item[1])
        waiting.remove(first)
        pack, free = [-first[1]], budget - first[0]
        refill()
        while (fitting := bisect.bisect_right(waiting, (free, 0))) > 0:
            length, position = waiting.pop(fitting - 1)
            pack.append(-position)
            free -= length
            refill()
        yield pack


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
