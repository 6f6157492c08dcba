"""How sure one may be of a success rate: Wilson's interval, and the exact test for two policies on the same starts.

E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927); Q. McNemar,
"Note on the sampling error of the difference between correlated proportions", Psychometrika 12 (1947), with the
exact binomial tail instead of the chi-square approximation, because evaluations have tens of episodes, not thousands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from lightning_embodied.errors import ConfigError


def wilson_interval(successes: int, episodes: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion, without continuity correction.

    Args:
        successes: How many episodes succeeded.
        episodes: How many episodes were run; with none the interval is (0, 1).
        confidence: Share of such intervals that contain the true rate, in (0, 1).

    Returns:
        Lower and upper bound, both in [0, 1] and around `successes / episodes`.

    Raises:
        ConfigError: Counts that cannot be, or a confidence outside (0, 1).
    """
    if not 0 <= successes <= episodes:
        raise ConfigError("successes must lie between 0 and the number of episodes", found=f"{successes} of {episodes}")
    if not 0.0 < confidence < 1.0:
        raise ConfigError("the confidence must lie strictly between 0 and 1", found=confidence)
    if episodes == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = successes / episodes
    shrink = 1 + z * z / episodes
    centre = (rate + z * z / (2 * episodes)) / shrink
    half = z / shrink * math.sqrt(rate * (1 - rate) / episodes + z * z / (4 * episodes * episodes))
    # The bounds at 0 and `episodes` successes are exactly 0 and 1; floating point misses them by an ulp.
    low = 0.0 if successes == 0 else max(0.0, min(rate, centre - half))
    high = 1.0 if successes == episodes else min(1.0, max(rate, centre + half))
    return low, high


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided exact McNemar test: could two policies that disagree this often be equally good?

    Args:
        only_first: Episodes in which only the first policy succeeded.
        only_second: Episodes in which only the second policy succeeded.

    Returns:
        The p-value: twice the smaller binomial tail of the disagreements at one half, at most 1.

    Raises:
        ConfigError: A negative count.
    """
    if only_first < 0 or only_second < 0:
        raise ConfigError("counts of episodes cannot be negative", found=(only_first, only_second))
    disagreements = only_first + only_second
    tail = sum(math.comb(disagreements, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / (1 << disagreements))


@dataclass(frozen=True)
class SuccessRate:
    """Successes among episodes.

    Attributes:
        successes: How many succeeded.
        episodes: How many were run.
    """

    successes: int
    episodes: int

    @classmethod
    def of(cls, outcomes: Sequence[bool]) -> SuccessRate:
        """Counts a list of outcomes."""
        return cls(sum(outcomes), len(outcomes))

    @property
    def rate(self) -> float:
        """Share of successes, NaN without episodes."""
        return self.successes / self.episodes if self.episodes else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the rate."""
        return wilson_interval(self.successes, self.episodes)

    def __str__(self) -> str:
        if not self.episodes:
            return "no episodes"
        low, high = self.interval
        return f"{self.rate:.0%} [{low:.0%}, {high:.0%}]"


@dataclass(frozen=True)
class PairedComparison:
    """Two policies on the same initial states.

    Attributes:
        first: Name of the first policy.
        second: Name of the second policy.
        both: Starts from which both succeeded.
        only_first: Starts from which only the first succeeded.
        only_second: Starts from which only the second succeeded.
        neither: Starts from which both failed.
    """

    first: str
    second: str
    both: int
    only_first: int
    only_second: int
    neither: int

    @classmethod
    def of(cls, first: str, second: str, pairs: Sequence[tuple[bool, bool]]) -> PairedComparison:
        """Counts the four cases of `(first succeeded, second succeeded)`."""
        count = {case: pairs.count(case) for case in ((True, True), (True, False), (False, True), (False, False))}
        return cls(first, second, *count.values())

    @property
    def p_value(self) -> float:
        """Exact two-sided McNemar p-value."""
        return mcnemar_exact(self.only_first, self.only_second)
