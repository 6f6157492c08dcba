"""How much of the time trains when ranks fail: the best interval between checkpoints and what is left.

Failures come at random and undo the work since the last checkpoint (Daly, "A higher order estimate of the optimum
checkpoint interval", 2006: equation 13 for the expected time, Young's and Daly's estimate of the interval to start
from). Recovery may fail as well, which the equation counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightning_embodied.errors import ConfigError

META_HOURS_BETWEEN_FAILURES = 16_384 * 54 * 24 / 419
"""Hours of one GPU between failures in Llama 3's training: 419 in 54 days of 16,384 H100 (arXiv:2407.21783, 3.3.4)."""


@dataclass(frozen=True)
class Goodput:
    """What is expected.

    Attributes:
        share: Useful share of the time.
        interval: Seconds of training between two checkpoints.
        hours_between_failures: Of all ranks together.
    """

    share: float
    interval: float
    hours_between_failures: float


def goodput(
    ranks: int,
    *,
    hours_between_failures: float,
    save_seconds: float,
    restart_seconds: float,
    least_interval: float = 0.0,
) -> Goodput:
    """Chooses the interval between checkpoints with the largest goodput.

    Args:
        ranks: Number of ranks; any failure stops all of them.
        hours_between_failures: Mean time between failures of one rank.
        save_seconds: Time that training stands still for a checkpoint.
        restart_seconds: Time from a failure to the first new step, loading included.
        least_interval: Shortest interval possible: the time that an asynchronous checkpoint takes to be written.

    Raises:
        ConfigError: A number is not positive.
    """
    given = {"ranks": ranks, "hours_between_failures": hours_between_failures}
    given |= {"save_seconds": save_seconds, "restart_seconds": restart_seconds}
    for name, value in given.items():
        if not value > 0:
            raise ConfigError("not positive", where=name, found=value, expected="> 0")
    mean = 3600 * hours_between_failures / ranks
    guess = math.sqrt(2 * save_seconds * mean)
    best = _maximum(lambda tau: useful_share(tau, mean, save_seconds, restart_seconds), guess / 20, guess * 20)
    interval = max(best, least_interval)
    share = useful_share(interval, mean, save_seconds, restart_seconds)
    return Goodput(share, interval, hours_between_failures / ranks)


def useful_share(interval: float, mean: float, save: float, restart: float) -> float:
    """Daly's equation 13: useful time by expected time, all arguments in seconds."""
    if restart / mean > 500 or (interval + save) / mean > 500:
        return 0.0
    return interval / (mean * math.exp(restart / mean) * math.expm1((interval + save) / mean))


def _maximum(function: Callable[[float], float], low: float, high: float) -> float:
    """Golden-section search on a logarithmic scale; the function has one maximum."""
    ratio = (math.sqrt(5) - 1) / 2
    low, high = math.log(low), math.log(high)
    for _ in range(60):
        first, second = high - ratio * (high - low), low + ratio * (high - low)
        if function(math.exp(first)) < function(math.exp(second)):
            low = first
        else:
            high = second
    return math.exp((low + high) / 2)
