"""The normaliser: round trips, bounds on the training data, dimensions that hardly vary, precision."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lightning_embodied.errors import ConfigError
from lightning_embodied.models import Normalizer
from lightning_embodied.models.normalizer import CONSTANT_BELOW, LIMIT
from tests.models.conftest import stats_of

MODES = ("mean_std", "quantile", "min_max")
data = arrays(np.float32, (40, 3), elements=st.floats(-1e4, 1e4, width=32)).map(lambda a: a.astype(np.float64))


@settings(max_examples=60, deadline=None)
@given(values=data, mode=st.sampled_from(MODES))
def test_round_trip_and_bounds(values, mode):
    normalizer = Normalizer([stats_of(values)], mode)
    tensor = torch.from_numpy(values).float()
    normalized = normalizer.normalize(tensor)
    assert bool((normalized.abs() <= LIMIT * 1.01).all())
    back = normalizer.unnormalize(normalized)
    size = 1 + tensor.abs().amax(0) + normalizer.scale
    assert bool(((back - tensor).abs() <= 1e-5 * size).all())


def test_the_usual_case_is_the_usual_formula():
    values = np.random.default_rng(0).normal(5, 2, (2000, 1))
    stats, x = stats_of(values), torch.tensor([[4.0]])
    expected = {
        "mean_std": (4 - stats.mean) / stats.std,
        "quantile": 2 * (4 - stats.q01) / (stats.q99 - stats.q01) - 1,
        "min_max": 2 * (4 - stats.min) / (stats.max - stats.min) - 1,
    }
    for mode, value in expected.items():
        assert float(Normalizer([stats], mode).normalize(x)) == pytest.approx(float(value[0]), abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("jitter", [0.0, 1e-9, CONSTANT_BELOW / 3])
def test_constant_dimensions_are_near_zero_and_do_not_explode(mode, jitter):
    values = 0.02 + jitter * np.random.default_rng(0).uniform(-1, 1, (100, 1))
    normalizer = Normalizer([stats_of(values)], mode)
    assert float(normalizer.normalize(torch.tensor([0.02])).abs()) < 1e-3
    assert float(normalizer.normalize(torch.tensor([0.05])).abs()) < 0.1
    assert float(normalizer.unnormalize(torch.tensor([0.0]))) == pytest.approx(0.02, abs=1e-4)


def test_large_constants_count_float32_resolution():
    values = 1e6 + np.random.default_rng(0).uniform(-0.5, 0.5, (100, 1))
    assert float(Normalizer([stats_of(values)], "mean_std").scale) == 1.0


def test_a_gripper_that_seldom_moves_stays_usable():
    values = np.zeros((1000, 1))
    values[:5] = 1.0  # equal quantiles, and yet not constant
    normalizer = Normalizer([stats_of(values)], "quantile")
    assert float(normalizer.normalize(torch.tensor([1.0]))) == pytest.approx(LIMIT)
    assert float(normalizer.normalize(torch.tensor([0.0]))) == 0.0


def test_features_are_concatenated_in_order():
    first, second = np.random.default_rng(0).normal(1, 1, (50, 2)), np.random.default_rng(1).normal(-3, 1, (50, 1))
    normalizer = Normalizer([stats_of(first), stats_of(second)], "mean_std")
    assert normalizer.dim == 3
    assert torch.allclose(normalizer.centre, torch.tensor([*first.mean(0), *second.mean(0)]).float())


def test_no_feature_at_all():
    assert Normalizer([], "quantile").normalize(torch.zeros(4, 0)).shape == (4, 0)


def test_statistics_keep_their_precision():
    normalizer = Normalizer([stats_of(np.full((10, 1), 0.12345679))], "quantile")
    module = torch.nn.Sequential(normalizer, torch.nn.Linear(1, 1)).to(torch.bfloat16)
    assert module[1].weight.dtype == torch.bfloat16
    assert normalizer.centre.dtype == torch.float32
    assert float(normalizer.centre) == pytest.approx(0.12345679, rel=1e-7)


def test_statistics_must_be_finite():
    values = np.zeros((3, 2))
    values[1, 1] = np.nan
    with pytest.raises(ConfigError, match="dimension 1"):
        Normalizer([stats_of(values)], "mean_std")


def test_unknown_mode():
    with pytest.raises(ConfigError, match="log"):
        Normalizer([], "log")
