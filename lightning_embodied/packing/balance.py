"""Deals packs to ranks: equally many steps each, and steps whose ranks finish at nearly the same time.

A step of a data-parallel run lasts as long as its slowest rank. Attention grows with the square of a sample's length,
so packs of equally many tokens still differ; packs of similar cost, taken from a few neighbouring steps, share a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from lightning_embodied.errors import DatasetError
from lightning_embodied.packing.planners import Pack

_STEPS = 16
"""Neighbouring steps that exchange packs: enough to balance within 3 %, few enough to keep the order's mixing."""


def balance_packs(
    lengths: Sequence[int], packs: Sequence[Pack], num_replicas: int, *, quadratic_cost: float = 0.0
) -> list[list[Pack]]:
    """Deals packs to ranks.

    Args:
        lengths: Tokens of each sample.
        packs: Packs of positions in `lengths`.
        num_replicas: Number of ranks.
        quadratic_cost: A sample of `n` tokens costs `n + quadratic_cost * n ** 2`; about `1 / (6 * width)` for a
            transformer of that width.

    Returns:
        For every step one pack per rank. If the packs do not divide by the number of ranks, the fullest ones are
        split in two until they do: nothing is lost or repeated.

    Raises:
        DatasetError: There are too few samples to give every rank one in the last step.
    """
    whole = _divisible(packs, lengths, num_replicas)
    costs = [sum(lengths[i] + quadratic_cost * lengths[i] ** 2 for i in pack) for pack in whole]
    steps: list[list[Pack]] = []
    for start in range(0, len(whole), _STEPS * num_replicas):
        by_cost = start + np.argsort(costs[start : start + _STEPS * num_replicas], kind="stable")
        groups = sorted(sorted(group) for group in by_cost.reshape(-1, num_replicas).tolist())
        steps += [[whole[index] for index in group] for group in groups]
    return steps


def _divisible(packs: Sequence[Pack], lengths: Sequence[int], num_replicas: int) -> list[Pack]:
    parts: dict[int, list[Pack]] = {index: [list(pack)] for index, pack in enumerate(packs)}
    fullest = [(-sum(lengths[i] for i in pack), index, pack) for index, pack in enumerate(packs) if len(pack) > 1]
    heapq.heapify(fullest)
    for _ in range(-len(packs) % num_replicas):
        if not fullest:
            raise DatasetError(
                "too few samples to give every rank a pack",
                found=f"{sum(map(len, packs))} samples",
                expected=f"a multiple of the {num_replicas} ranks",
                mend="use fewer ranks or a larger dataset",
            )
        _, index, pack = heapq.heappop(fullest)
        parts[index].remove(pack)
        for half in _halves(pack, lengths):
            parts[index].append(half)
            if len(half) > 1:
                heapq.heappush(fullest, (-sum(lengths[i] for i in half), index, half))
    return [part for index in sorted(parts) for part in parts[index]]


def _halves(pack: Pack, lengths: Sequence[int]) -> list[Pack]:
    """The pack in two of nearly equal tokens: longest first, each to the lighter half."""
    halves: list[Pack] = [[], []]
    weights = [0, 0]
    for position in sorted(pack, key=lambda i: -lengths[i]):
        lighter = int(weights[1] < weights[0])
        halves[lighter].append(position)
        weights[lighter] += lengths[position]
    return halves
