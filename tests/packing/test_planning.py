"""Planners and rank balance: every sample once, within budget, little padding, equal steps of equal cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from robot_mixture import mixture

from lightning_embodied.errors import ConfigError, DatasetError
from lightning_embodied.packing import (
    PackingOptions,
    StepPlan,
    balance_packs,
    pack_stream,
    padding_share,
    plan_packs,
)

BUDGET = 64
PLANNERS = ("first-fit-decreasing", "best-fit-window", "padded", "length-grouped")
LENGTHS = st.lists(st.integers(1, BUDGET), min_size=1, max_size=120)


def flat(packs):
    return [position for pack in packs for position in pack]


@settings(deadline=None)
@given(lengths=LENGTHS, planner=st.sampled_from(PLANNERS), window=st.integers(1, 70))
def test_every_sample_once_within_the_budget_and_repeatable(lengths, planner, window):
    packs = plan_packs(lengths, BUDGET, planner, window=window)
    assert sorted(flat(packs)) == list(range(len(lengths)))
    assert all(pack for pack in packs)
    assert max(sum(lengths[i] for i in pack) for pack in packs) <= BUDGET
    if planner in ("padded", "length-grouped"):
        assert max(max(lengths[i] for i in pack) * len(pack) for pack in packs) <= BUDGET
    assert packs == plan_packs(lengths, BUDGET, planner, window=window)
    assert [pack[0] for pack in packs] == sorted(pack[0] for pack in packs), "no curriculum of lengths"


@given(lengths=LENGTHS)
def test_first_fit_decreasing_is_the_textbook_algorithm(lengths):
    bins, expected = [], []
    for position in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        index = next((i for i, free in enumerate(bins) if free >= lengths[position]), len(bins))
        if index == len(bins):
            bins.append(BUDGET)
            expected.append([])
        bins[index] -= lengths[position]
        expected[index].append(position)
    assert plan_packs(lengths, BUDGET, "first-fit-decreasing") == sorted(expected)


@given(lengths=LENGTHS, window=st.integers(1, 20))
def test_the_window_bounds_how_far_ahead_a_pack_reaches(lengths, window):
    seen: set[int] = set()
    for pack in plan_packs(lengths, BUDGET, "best-fit-window", window=window):
        oldest = min(set(range(len(lengths))) - seen)
        assert pack[0] == oldest
        for position in pack:
            waiting_before = len(set(range(position)) - seen)
            assert waiting_before < window
            seen.add(position)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(
    ("lengths", "fewest"),
    [([BUDGET // 2] * 40, 20), ([BUDGET] * 7, 7), ([1] * 640, 10), ([BUDGET] + [1] * 64, 2), ([33] * 9, 9)],
    ids=["all equal", "all full", "all tiny", "one giant", "just over half"],
)
def test_worst_cases_need_the_fewest_packs(planner, lengths, fewest):
    assert len(plan_packs(lengths, BUDGET, planner)) == fewest


def test_padding_on_a_robot_mixture():
    """At most 1 % with all lengths known, 1.2 % in a window of 64, where padding to the longest wastes over half."""
    lengths = mixture(20_000)
    packs = {planner: plan_packs(lengths, 4096, planner, window=64) for planner in PLANNERS}
    share = {planner: padding_share(lengths, packs[planner], 4096) for planner in PLANNERS}
    assert share["first-fit-decreasing"] <= 0.01
    assert share["best-fit-window"] <= 0.012
    assert share["padded"] > 0.5
    for size, wasted in ((8, 0.5), (32, 0.65)):
        batches = [lengths[i : i + size] for i in range(0, len(lengths), size)]
        assert 1 - sum(lengths) / sum(max(batch) * len(batch) for batch in batches) > wasted
    assert padding_share([], [], 10) == 0.0


@settings(deadline=None)
@given(lengths=LENGTHS, replicas=st.integers(1, 9))
def test_ranks_take_equal_steps_and_lose_nothing(lengths, replicas):
    packs = plan_packs(lengths, BUDGET)
    steps = balance_packs(lengths, packs, replicas)
    assert all(len(step) == replicas and all(step) for step in steps)
    assert len(steps) == -(-len(packs) // replicas)
    assert max(sum(lengths[i] for i in pack) for step in steps for pack in step) <= BUDGET
    dealt = sorted(flat(flat(steps)))
    if len(lengths) >= len(steps) * replicas:
        assert dealt == list(range(len(lengths)))
    else:
        assert set(dealt) == set(range(len(lengths)))
        assert len(dealt) == len(steps) * replicas, "only what the last step lacks is repeated"


def test_ranks_cost_nearly_the_same():
    lengths, quadratic, ranks = mixture(8000), 1e-3, 8

    def excess(steps):
        costs = [[sum(lengths[i] + quadratic * lengths[i] ** 2 for i in pack) for pack in step] for step in steps]
        return sum(max(step) * len(step) / sum(step) - 1 for step in costs) / len(costs)

    packs = plan_packs(lengths, 4096)
    unbalanced = [packs[i : i + ranks] for i in range(0, len(packs) - ranks + 1, ranks)]
    balanced = excess(balance_packs(lengths, packs, ranks, quadratic_cost=quadratic))
    assert balanced < 0.04 < 4 * balanced < excess(unbalanced)


@given(lengths=LENGTHS, window=st.integers(1, 20))
def test_a_stream_is_packed_as_it_arrives(lengths, window):
    arrived = []

    def stream():
        for position, length in enumerate(lengths):
            arrived.append(position)
            yield position, length

    seen = 0
    for pack in pack_stream(stream(), lambda sample: sample[1], BUDGET, window=window):
        seen += len(pack)
        assert len(arrived) <= seen + window, "nothing is read that the window does not hold"
    assert seen == len(lengths)
    packs = [
        [position for position, _ in pack] for pack in pack_stream(stream(), lambda s: s[1], BUDGET, window=window)
    ]
    assert packs == plan_packs(lengths, BUDGET, "best-fit-window", window=window)


def test_a_sample_over_the_budget_is_named():
    with pytest.raises(DatasetError, match="sample 1 and 1 more"):
        plan_packs([5, 70, 6, 90], BUDGET)
    with pytest.raises(DatasetError, match="sample 1"):
        list(pack_stream([5, 70, 6], int, BUDGET))


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError, match="no such planner"):
        plan_packs([1], 4, "best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="window"):
        plan_packs([1], 4, window=0)
    with pytest.raises(ConfigError, match="num_replicas"):
        balance_packs([1, 2], [[0], [1]], 0)
    with pytest.raises(ConfigError, match="quadratic_cost"):
        balance_packs([1, 2], [[0], [1]], 1, quadratic_cost=float("nan"))


@pytest.mark.parametrize(
    "options", [{"planner": "best"}, {"over_budget": "raise"}, {"window": 0}, {"quadratic_cost": -1.0}]
)
def test_wrong_options_are_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        PackingOptions(**options)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("wrong", [float("nan"), -2, 2.5, None, "3"])
def test_a_length_that_is_no_number_of_tokens_is_named(planner, wrong):
    with pytest.raises(ConfigError, match=r"lengths\[1\]"):
        plan_packs([3, wrong, 4], BUDGET, planner)
    with pytest.raises(ConfigError, match="length of sample 1"):
        list(pack_stream([3, wrong, 4], lambda length: length, BUDGET))


@pytest.mark.parametrize("budget", [0, -1, 4.5, float("nan")])
def test_a_budget_that_is_no_number_of_tokens_is_named(budget):
    for plan in (
        lambda: plan_packs([1], budget),
        lambda: list(pack_stream([1], int, budget)),
        lambda: padding_share([1], [[0]], budget),
        lambda: StepPlan(budget),
    ):
        with pytest.raises(ConfigError, match="token_budget"):
            plan()


def test_numpy_and_torch_lengths_are_numbers_too():
    lengths = [3, 60, 9, 50, 20]
    for values in (np.array(lengths), torch.tensor(lengths)):
        assert plan_packs(values, BUDGET) == plan_packs(lengths, BUDGET)


def test_dropping_leaves_out_what_is_over_but_not_everything():
    plan = StepPlan(4, options=PackingOptions(over_budget="drop"))
    assert plan.steps([9, 2, 9, 2]) == [[[1, 3]]]
    with pytest.raises(DatasetError, match="sample 0 and 1 more"):
        plan.steps([9, 9])
