import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_embodied.data.order import SampleOrder
from lightning_embodied.errors import ConfigError

settings.register_profile("order", deadline=None)
settings.load_profile("order")
SIZES = st.integers(1, 700)
SEEDS = st.integers(-(2**70), 2**70)
EPOCHS = st.integers(0, 10_000)


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
    numbers = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=5)), dtype=np.int64)
    assert order.indices_of(epoch, numbers).tolist() == order.indices(epoch, 0, size)[numbers].tolist()
    assert order.seeds_of(epoch, numbers).tolist() == order.seeds(epoch, 0, size)[numbers].tolist()


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
