"""Deals packs to ranks: equally many steps each, and steps whose ranks finish at nearly the same time.

A step of a data-parallel run lasts as long as its slowest rank. Attention grows with the square of a sample's length,
so packs of equally many tokens still differ; packs of similar cost, taken from a few neighbouring steps, share a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from lightning_embodied.counts import check_count
from lightning_embodied.errors import ConfigError
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
        For every step one pack per rank. Packs that do not divide by the number of ranks end in a last, smaller
        step whose packs are split, so nothing is lost. Samples are repeated only where splitting cannot give every
        rank one: as many as that step lacks.

    Raises:
        ConfigError: There is no rank, or the cost is negative.
    """
    check_count(num_replicas, "num_replicas")
    check_quadratic_cost(quadratic_cost)
    whole = _divisible(packs, lengths, num_replicas)
    costs = [sum(lengths[i] + quadratic_cost * lengths[i] ** 2 for i in pack) for pack in whole]
    steps: list[list[Pack]] = []
    for start in range(0, len(whole), _STEPS * num_replicas):
        by_cost = start + np.argsort(costs[start : start + _STEPS * num_replicas], kind="stable")
        groups = sorted(sorted(group) for group in by_cost.reshape(-1, num_replicas).tolist())
        steps += [[whole[index] for index in group] for group in groups]
    return steps


def check_quadratic_cost(quadratic_cost: float) -> None:
    """Raises `ConfigError` unless the cost is a number from 0 on."""
    if not 0 <= quadratic_cost < float("inf"):
        raise ConfigError(
            "the cost of attention is no positive number",
            where="quadratic_cost",
            found=quadratic_cost,
            expected="0 or more; about 1 / (6 * width) of the transformer",
        )


def _divisible(packs: Sequence[Pack], lengths: Sequence[int], num_replicas: int) -> list[Pack]:
    """The packs, the last of them split (or, where that is impossible, repeated) until they divide by the ranks."""
    missing = -len(packs) % num_replicas
    if not missing:
        return list(packs)
    reach = num_replicas - missing  # the packs of the unfinished step; more if they have too few samples to split
    while sum(len(pack) - 1 for pack in packs[-reach:]) < missing and reach < len(packs):
        reach = min(len(packs), 2 * reach + num_replicas)
    tail = _split(packs[-reach:], lengths, missing)
    whole = [*packs[:-reach], *tail]
    return whole + [tail[i % len(tail)] for i in range(-len(whole) % num_replicas)]


def _split(packs: Sequence[Pack], lengths: Sequence[int], times: int) -> list[Pack]:
    """Splits the fullest pack in two, `times` times or until every pack is one sample."""
    parts: dict[int, list[Pack]] = {index: [list(pack)] for index, pack in enumerate(packs)}
    fullest = [(-sum(lengths[i] for i in pack), index, pack) for index, pack in enumerate(packs) if len(pack) > 1]
    heapq.heapify(fullest)
    for _ in range(times):
        if not fullest:
            break
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
