from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_embodied.data.order import GlobalBatches, SampleOrder
from lightning_embodied.errors import ConfigError

settings.register_profile("order", deadline=None)
settings.load_profile("order")
SIZES = st.integers(1, 700)
SEEDS = st.integers(-(2**70), 2**70)
EPOCHS = st.integers(0, 10_000)


def rank_samples(order: SampleOrder, batches: GlobalBatches, epoch: int, position: int = 0) -> list[list[list[int]]]:
    """`[step][rank]` -> samples."""
    samples = order.indices(epoch, 0, order.size).tolist()
    return [
        [samples[slice(*batches.share(position, step, rank))] for rank in range(batches.world_size)]
        for step in range(batches.steps(position))
    ]


@given(SIZES, SEEDS, EPOCHS)
def test_an_epoch_is_a_permutation(size, seed, epoch):
    assert sorted(SampleOrder(size, seed).indices(epoch, 0, size)) == list(range(size))


@given(SIZES, SEEDS, EPOCHS, st.data())
def test_any_part_is_found_without_the_rest(size, seed, epoch, data):
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    order = SampleOrder(size, seed)
    assert order.indices(epoch, start, stop).tolist() == order.indices(epoch, 0, size)[start:stop].tolist()
    assert order.seeds(epoch, start, stop).tolist() == order.seeds(epoch, 0, size)[start:stop].tolist()


@given(st.integers(50, 700), SEEDS, EPOCHS)
def test_seed_and_epoch_decide_the_order(size, seed, epoch):
    first = SampleOrder(size, seed).indices(epoch, 0, size).tolist()
    assert SampleOrder(size, seed).indices(epoch, 0, size).tolist() == first
    assert SampleOrder(size, seed + 1).indices(epoch, 0, size).tolist() != first
    assert SampleOrder(size, seed).indices(epoch + 1, 0, size).tolist() != first
    seeds = SampleOrder(size, seed).seeds(epoch, 0, size)
    assert len(set(seeds.tolist())) == size
    assert seeds.min() >= 0


def test_the_order_never_changes_between_versions():
    assert SampleOrder(10, 7).indices(3, 0, 10).tolist() == [0, 9, 5, 2, 8, 7, 4, 1, 6, 3]
    assert SampleOrder(10, 7).seeds(3, 0, 2).tolist() == [3197560455992583735, 8849010409930650863]


def test_every_sample_comes_everywhere_equally_often():
    size, epochs = 12, 6000
    counts = np.zeros((size, size))
    order = SampleOrder(size, 1)
    for epoch in range(epochs):
        counts[np.arange(size), order.indices(epoch, 0, size)] += 1
    expected = epochs / size
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 185  # 121 degrees of freedom: 99.99 %


def test_neighbours_do_not_stay_together():
    order = SampleOrder(5000, 3).indices(0, 0, 5000)
    assert (np.abs(np.diff(order)) == 1).sum() < 15  # 2 are expected of a random order
    assert abs(np.corrcoef(order, np.arange(5000))[0, 1]) < 0.06


def test_without_shuffling_the_order_is_the_dataset():
    assert SampleOrder(5, 3, shuffle=False).indices(9, 1, 4).tolist() == [1, 2, 3]


def test_a_large_dataset_needs_no_memory():
    order = SampleOrder(10**12, 5)
    found = order.indices(2, 10**12 - 1000, 10**12)
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0
    assert found.max() < 10**12


def test_an_empty_order_is_refused():
    with pytest.raises(ConfigError, match="at least one sample"):
        SampleOrder(0)


@given(SIZES, st.integers(1, 9), st.integers(1, 7), st.booleans())
def test_ranks_share_an_epoch_without_loss_or_repeat(size, batch_size, world, drop_last):
    batches = GlobalBatches(size, batch_size, world, drop_last)
    steps = rank_samples(SampleOrder(size, 1), batches, 0)
    taken = [sample for ranks in steps for samples in ranks for sample in samples]
    assert all(samples for ranks in steps for samples in ranks), "no rank is ever without a sample"
    if drop_last:
        assert len(taken) == len(set(taken)) == size // batches.step_size * batches.step_size
    elif size >= world:
        assert sorted(taken) == list(range(size))
        assert max((len(samples) for ranks in steps for samples in ranks), default=0) <= batch_size + 1
    else:
        assert set(taken) == set(range(size))


@given(SIZES, st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6]))
def test_steps_do_not_depend_on_the_number_of_ranks(size, per_rank, world, other):
    order, step = SampleOrder(size, 1), per_rank * 12
    one = rank_samples(order, GlobalBatches(size, step // world, world), 0)
    two = rank_samples(order, GlobalBatches(size, step // other, other), 0)
    for ours, theirs in zip(one[:-2], two[:-2], strict=False):
        assert list(chain(*ours)) == list(chain(*theirs))


@settings(max_examples=200)
@given(st.integers(8, 400), st.integers(1, 5), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.data())
def test_resume_with_other_ranks_takes_exactly_the_rest(size, batch, world, new_batch, new_world, data):
    order, before = SampleOrder(size, 1), GlobalBatches(size, batch, world)
    done = data.draw(st.integers(0, before.steps()))
    position = before.advance(0, done)
    after = GlobalBatches(size, new_batch, new_world)
    assert after.steps(position) <= after.steps(), "the counters of a resumed epoch never begin below zero"
    first = [s for ranks in rank_samples(order, before, 0)[:done] for samples in ranks for s in samples]
    rest = [s for ranks in rank_samples(order, after, 0, position) for samples in ranks for s in samples]
    assert first == order.indices(0, 0, position).tolist()
    if size - position >= new_world or position == size:
        assert rest == order.indices(0, position, size).tolist()
    else:
        assert set(rest) == set(order.indices(0, position, size).tolist())
