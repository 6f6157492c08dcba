"""Wilson's interval and the exact McNemar test against SciPy, published values and their own algebra."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_embodied.errors import ConfigError
from lightning_embodied.evaluation import PairedComparison, SuccessRate, mcnemar_exact, wilson_interval

COUNTS = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [
        # Newcombe, "Two-sided confidence intervals for the single proportion", Stat. Med. 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_matches_newcombes_table(successes, episodes, low, high):
    assert wilson_interval(successes, episodes) == pytest.approx((low, high), abs=5.1e-5)


@settings(deadline=None)
@given(COUNTS, st.sampled_from([0.8, 0.95, 0.99]))
def test_wilson_matches_scipy(counts, confidence):
    stats = pytest.importorskip("scipy.stats")
    reference = stats.binomtest(*counts).proportion_ci(confidence, method="wilson")
    assert wilson_interval(*counts, confidence) == pytest.approx((reference.low, reference.high), abs=1e-9)


@given(COUNTS)
def test_wilson_contains_the_rate_and_mirrors(counts):
    successes, episodes = counts
    low, high = wilson_interval(successes, episodes)
    assert 0 <= low <= successes / episodes <= high <= 1
    mirrored = wilson_interval(episodes - successes, episodes)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)


@settings(deadline=None)
@given(st.integers(0, 120), st.integers(0, 120))
def test_mcnemar_matches_the_exact_binomial_test(first, second):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
    assert mcnemar_exact(first, second) == pytest.approx(expected, rel=1e-9)
    assert mcnemar_exact(first, second) == mcnemar_exact(second, first)


def test_mcnemar_known_values():
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(0, 10) == pytest.approx(2 / 1024)
    assert mcnemar_exact(5, 5) == 1.0


def test_no_episodes_says_so():
    rate = SuccessRate(0, 0)
    assert math.isnan(rate.rate)
    assert rate.interval == (0.0, 1.0)
    assert str(rate) == "no episodes"
    assert str(SuccessRate(57, 60)) == "95% [86%, 98%]"


def test_pairs_are_counted_by_case():
    pairs = [(True, True), (True, False), (True, False), (False, False), (False, True)]
    comparison = PairedComparison.of("a", "b", pairs)
    counts = (comparison.both, comparison.only_first, comparison.only_second, comparison.neither)
    assert counts == (1, 2, 1, 1)
    assert comparison.p_value == 1.0


@pytest.mark.parametrize(
    "call", [lambda: wilson_interval(3, 2), lambda: wilson_interval(1, 2, 1.0), lambda: mcnemar_exact(-1, 2)]
)
def test_impossible_counts_are_refused(call):
    with pytest.raises(ConfigError):
        call()
