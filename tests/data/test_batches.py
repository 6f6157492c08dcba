"""Batches by samples and by tokens: each sample once, equal steps on all ranks, resumed on any others."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_embodied.data import Place, ResumableLoader, SampleBatches, SampleOrder, ShardedLoader, TokenBatches
from lightning_embodied.errors import CheckpointError, ConfigError, DatasetError
from lightning_embodied.packing import PackingOptions, StepPlan

settings.register_profile("batches", deadline=None)
settings.load_profile("batches")
SIZES = st.integers(1, 700)
BUDGET = 64
LENGTHS = st.lists(st.integers(1, BUDGET), min_size=1, max_size=120)
PLANNERS = st.sampled_from(["first-fit-decreasing", "best-fit-window", "padded", "length-grouped"])
ORDER = 1


def steps_of(batches, world, place=Place()):  # noqa: B008
    """`[step][rank]` -> sample numbers."""
    return [
        [batches.numbers(place, step, rank).tolist() for rank in range(world)] for step in range(batches.steps(place))
    ]


def flat(steps):
    return list(chain.from_iterable(chain.from_iterable(steps)))


@given(SIZES, st.integers(1, 9), st.integers(1, 7), st.booleans())
def test_ranks_share_an_epoch_without_loss_or_repeat(size, batch_size, world, drop_last):
    batches = SampleBatches(size, batch_size, world, drop_last)
    steps = steps_of(batches, world)
    taken = flat(steps)
    assert all(samples for ranks in steps for samples in ranks), "no rank is ever without a sample"
    assert batches.whole(Place()) == len(steps)
    if drop_last:
        assert taken == list(range(size // batches.step_size * batches.step_size))
    elif size >= world:
        assert taken == list(range(size))
        assert max((len(samples) for ranks in steps for samples in ranks), default=0) <= batch_size + 1
    else:
        assert set(taken) == set(range(size))


@given(SIZES, st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6]))
def test_steps_do_not_depend_on_the_number_of_ranks(size, per_rank, world, other):
    step = per_rank * 12
    one = steps_of(SampleBatches(size, step // world, world), world)
    two = steps_of(SampleBatches(size, step // other, other), other)
    for ours, theirs in zip(one[:-2], two[:-2], strict=False):
        assert list(chain(*ours)) == list(chain(*theirs))


@settings(max_examples=200)
@given(st.integers(8, 400), st.integers(1, 5), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.data())
def test_resume_with_other_ranks_takes_exactly_the_rest(size, batch, world, new_batch, new_world, data):
    before = SampleBatches(size, batch, world)
    done = data.draw(st.integers(0, before.steps(Place())))
    place = before.advance(Place(), done)
    after = SampleBatches(size, new_batch, new_world)
    assert after.steps(place) <= after.whole(place), "the counters of a resumed epoch never begin below zero"
    rest = flat(steps_of(after, new_world, Place.from_dict(place.to_dict())))
    assert flat(steps_of(before, world)[:done]) == list(range(place.position))
    if size - place.position >= new_world or place.position == size:
        assert rest == list(range(place.position, size))
    else:
        assert set(rest) == set(range(place.position, size))


@given(LENGTHS, st.integers(1, 9), PLANNERS, st.integers(1, 70), st.booleans())
def test_packs_share_an_epoch_without_loss(lengths, world, planner, window, drop_last):
    order = SampleOrder(len(lengths), ORDER)
    plan = StepPlan(BUDGET, world, drop_last, PackingOptions(planner, window))
    batches = TokenBatches(order, lengths, plan)
    steps = steps_of(batches, world)
    assert steps == steps_of(TokenBatches(order, lengths, plan), world)
    assert all(pack for step in steps for pack in step)
    own = np.array(lengths)[order.indices(0, 0, order.size)]
    assert max((own[pack].sum() for step in steps for pack in step), default=0) <= BUDGET
    assert batches.whole(Place()) == len(steps)
    taken = flat(steps)
    if drop_last:
        assert len(taken) == len(set(taken))
        return
    assert set(taken) == set(range(len(lengths)))
    repeated = len(taken) - len(lengths)
    assert repeated < world
    if repeated:
        assert all(len(pack) == 1 for step in steps for pack in step), "a pack that can be split is split first"


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, BUDGET), min_size=60, max_size=120),
    parts=st.lists(st.tuples(st.integers(1, 4), st.integers(BUDGET, 99), PLANNERS), min_size=1, max_size=4),
    data=st.data(),
)
def test_a_run_resumed_with_any_ranks_budget_and_planner_packs_the_rest(lengths, parts, data):
    order, place, seen = SampleOrder(len(lengths), ORDER), Place(3), []
    for number, (world, budget, planner) in enumerate(parts):
        batches = TokenBatches(order, lengths, StepPlan(budget, world, options=PackingOptions(planner)))
        steps = steps_of(batches, world, place)
        last = number == len(parts) - 1
        taken = len(steps) if last else data.draw(st.integers(0, min(3, len(steps))), label="steps")
        seen += flat(steps[:taken])
        assert batches.whole(place) == sum(n for _, n in place.taken) + len(steps)
        place = Place.from_dict(batches.advance(place, taken).to_dict())
        assert steps_of(batches, world, place) == steps[taken:], "with the same plan the very same packs are left"
    assert set(seen) == set(range(len(lengths)))


def test_epochs_are_packed_anew():
    lengths = [1 + index % 40 for index in range(200)]
    batches = TokenBatches(SampleOrder(200, ORDER), lengths, StepPlan(BUDGET))
    assert steps_of(batches, 1) != steps_of(batches, 1, Place(1))


def test_a_sample_over_the_budget_is_named_or_dropped_and_counted():
    order, lengths = SampleOrder(4), [5, 70, 6, 90]
    with pytest.raises(DatasetError, match="sample 1 and 1 more"):
        TokenBatches(order, lengths, StepPlan(BUDGET))
    batches = TokenBatches(order, lengths, StepPlan(BUDGET, options=PackingOptions(over_budget="drop")))
    assert batches.dropped.tolist() == [1, 3]
    assert sorted(order.indices_of(0, np.array(flat(steps_of(batches, 1))))) == [0, 2]


def test_a_place_of_another_kind_or_of_other_lengths_is_refused():
    order, lengths = SampleOrder(40), [9] * 40
    by_tokens = ResumableLoader(range(40), order, token_budget=BUDGET, lengths=lengths)
    by_samples = ResumableLoader(range(40), order, batch_size=7)
    for one, other in ((by_tokens, by_samples), (by_samples, by_tokens)):
        other.load_state_dict(one.state_dict())  # at the start of an epoch both may be changed
    for one, other in ((by_tokens, by_samples), (by_samples, by_tokens)):
        next(iter(one))
        with pytest.raises(CheckpointError, match="within an epoch of batches"):
            other.load_state_dict(one.state_dict())
    longer = ResumableLoader(range(40), order, token_budget=BUDGET, lengths=[*lengths[:-1], 10])
    with pytest.raises(CheckpointError, match="other numbers of tokens"):
        longer.load_state_dict(by_tokens.state_dict())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "neither"),
        ({"batch_size": 2, "token_budget": 9}, "both"),
        ({"batch_size": 0}, "a batch needs samples"),
        ({"token_budget": 0, "lengths": [1] * 4}, "token_budget is too small"),
        ({"token_budget": 9, "lengths": [1] * 3}, "every sample needs its number of tokens"),
        ({"batch_size": 1, "num_workers": -1}, "no such number of workers"),
    ],
)
def test_wrong_settings_are_named(options, word):
    with pytest.raises(ConfigError, match=word):
        ShardedLoader(range(4), SampleOrder(4), **options)
    with pytest.raises(ConfigError, match="window is too small"):
        PackingOptions(window=0)
