"""Codes and scales against a reference in float64, on any weight that hypothesis thinks of."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lightning_embodied.errors import ConfigError
from lightning_embodied.quantization import FORMATS, dequantize, format_of, quantize, relative_error

KINDS = list(FORMATS.values())
all_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
E4M3 = np.unique(
    [sign * m / 8 * 2.0**e for sign in (-1, 1) for e in range(-6, 9) for m in range(8, 16) if m / 8 * 2.0**e <= 448]
    + [sign * m / 8 * 2.0**-6 for sign in (-1, 1) for m in range(8)]
)
"""All values of the format, from its definition."""


def reference(weight, kind):
    """What the format makes of a matrix: float64, the nearest code of all, scales one by one."""
    weight = weight.double().numpy()
    rows, columns = weight.shape
    height, width = {"block": (128, 128), "row": (1, columns), "tensor": (rows, columns)}[kind.shared]
    result = np.zeros_like(weight)
    for row in range(0, rows, max(1, height)):
        for column in range(0, columns, max(1, width)):
            part = weight[row : row + height, column : column + width]
            amax = np.abs(part).max()
            if amax == 0:
                continue
            scale = np.float64(np.float32(max(amax / kind.largest, 2.0**-126)))
            levels = np.arange(-127.0, 128.0) if kind.dtype == torch.int8 else E4M3
            distance = np.abs(part[..., None] / scale - levels)
            result[row : row + height, column : column + width] = levels[distance.argmin(-1)] * scale
    return result


def assert_nearest(weight, kind):
    """No code is nearer than the one found: exactly between two codes either is right, so distances are compared."""
    exact = weight.double().numpy()
    found, expected = dequantize(*quantize(weight, kind)).double().numpy(), reference(weight, kind)
    slack = 1e-6 * np.abs(exact) + 1e-38
    assert (np.abs(found - exact) <= np.abs(expected - exact) + slack).all()


def weights(longest=5):
    """Small matrices of every size of value, zeros among them."""
    shapes = st.tuples(st.integers(1, longest), st.integers(1, longest))
    values = st.floats(-(2.0**100), 2.0**100, width=32)
    return shapes.flatmap(lambda shape: arrays.arrays(np.float32, shape, elements=values)).map(torch.from_numpy)


@all_kinds
@settings(max_examples=30, deadline=None)
@given(weights())
def test_it_is_the_nearest_code(kind, weight):
    assert_nearest(weight, kind)


@all_kinds
@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (128, 128), (130, 1), (1, 300), (257, 130)])
def test_edges_that_are_no_multiples_of_a_block(kind, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-2, 2, shape[0])[:, None]
    codes, scale = quantize(weight, kind)
    assert codes.shape == weight.shape
    assert codes.dtype == kind.dtype
    assert tuple(scale.shape) == kind.scale_shape(*shape)
    assert_nearest(weight, kind)


@all_kinds
def test_blocks_do_not_see_each_other(kind):
    torch.manual_seed(0)
    weight = torch.randn(200, 200)
    before = dequantize(*quantize(weight, kind))
    weight[150:, 150:] *= 1000
    after = dequantize(*quantize(weight, kind))
    untouched = {"block": before[:128], "row": before[:150], "tensor": before[:0]}[kind.shared]
    assert torch.equal(after[: len(untouched)], untouched)


@all_kinds
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (3, 300)])
def test_zeros_stay_zeros(kind, shape):
    codes, scale = quantize(torch.zeros(shape), kind)
    assert scale.isfinite().all()
    assert not dequantize(codes, scale).any()
    assert dequantize(codes, scale).shape == shape
    assert relative_error(torch.zeros(shape), kind) == 0


@all_kinds
def test_one_row_of_zeros_among_others(kind):
    weight = torch.randn(4, 6)
    weight[2] = 0
    found = dequantize(*quantize(weight, kind))
    assert not found[2].any()
    assert found.isfinite().all()


@all_kinds
@pytest.mark.parametrize("value", [1e-45, 1e-38, 3.4028234e38, -3.4028234e38])
def test_smallest_and_largest_values(kind, value):
    weight = torch.tensor([[value, 0.0]])
    found = dequantize(*quantize(weight, kind))
    assert found.isfinite().all()
    assert abs(float(found[0, 0]) - value) <= max(abs(value) * 0.07, 2e-38)


@all_kinds
@settings(max_examples=15, deadline=None)
@given(weights(), st.integers(-20, 20))
def test_powers_of_two_only_shift_the_scale(kind, weight, exponent):
    weight = torch.where(weight.abs() < 1e-20, 0.0, weight)
    codes, scale = quantize(weight, kind)
    shifted = quantize(weight * 2.0**exponent, kind)
    assert torch.equal(shifted[0].view(torch.int8), codes.view(torch.int8))
    zeros = scale == 1
    assert torch.equal(torch.where(zeros, 1.0, shifted[1] * 2.0**-exponent), torch.where(zeros, 1.0, scale))


@all_kinds
@settings(max_examples=15, deadline=None)
@given(weights())
def test_quantising_again_changes_nothing(kind, weight):
    once = dequantize(*quantize(weight, kind))
    assert torch.allclose(dequantize(*quantize(once, kind)), once, rtol=1e-6, atol=0)


@all_kinds
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite(kind, bad):
    weight = torch.ones(3, 3)
    weight[1, 2] = bad
    with pytest.raises(ConfigError, match="1 of 9 values are NaN or infinite"):
        quantize(weight, kind)


def test_half_precisions_and_more_axes():
    weight = torch.randn(6, 3, 2, 2)
    flat = dequantize(*quantize(weight.flatten(1), FORMATS["fp8_block"]))
    assert torch.equal(dequantize(*quantize(weight, FORMATS["fp8_block"])), flat.view(6, 3, 2, 2))
    half = weight.bfloat16()
    assert torch.equal(quantize(half, FORMATS["int8_row"])[0], quantize(half.float(), FORMATS["int8_row"])[0])


@pytest.mark.parametrize("weight", [torch.zeros(3), torch.zeros(3, 3, dtype=torch.int64)])
def test_what_is_no_matrix(weight):
    with pytest.raises(ConfigError, match="only matrices"):
        quantize(weight, FORMATS["fp8_row"])


def test_unknown_format():
    with pytest.raises(ConfigError, match="fp8_block, fp8_row, fp8_tensor, int8_row"):
        format_of("int4")


def test_blocks_stand_outliers_that_a_tensor_does_not():
    """Values of most blocks would fall below the format's smallest if one scale had to serve an outlier as well."""
    torch.manual_seed(0)
    weight = torch.randn(512, 512) * 0.02
    weight[7, 9] = 3000.0
    rest = torch.ones_like(weight, dtype=torch.bool)
    rest[7, 9] = False

    def error(name):
        found = dequantize(*quantize(weight, FORMATS[name]))
        return float((found - weight)[rest].norm() / weight[rest].norm())

    assert error("fp8_block") < 0.3 * error("fp8_tensor")
    assert error("fp8_row") < error("fp8_block")


def test_without_outliers_int8_rows_are_the_most_accurate():
    torch.manual_seed(0)
    weight = torch.randn(256, 256) * 0.02
    errors = {kind.name: relative_error(weight, kind) for kind in KINDS}
    assert errors["int8_row"] < 0.4 * errors["fp8_row"]
    assert all(0.02 < errors[name] < 0.03 for name in ("fp8_block", "fp8_row", "fp8_tensor"))
