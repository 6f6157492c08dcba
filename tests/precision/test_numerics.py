"""Casts and products: against loops over blocks, against torchao's own layers, and by what must hold for any matrix."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_embodied.precision import FP8Precision
from lightning_embodied.precision.casting import quantized, saturated_and_flushed
from lightning_embodied.precision.recipes import BACKEND_RECIPES, E4M3, E5M2, RECIPES, Cast

CASTS = {
    "tensor": Cast(),
    "gradient": Cast(E5M2),
    "row": Cast(shared="axis", rounding="power_of_2"),
    "block": Cast(shared="block", size=32, rounding="power_of_2"),
    "tile": Cast(shared="tile", size=16),
}


@st.composite
def matrices(draw):
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    x = torch.randn(rows, columns, generator=generator)
    return x * 10.0 ** torch.randint(-6, 4, (rows, 1), generator=generator) * draw(st.sampled_from([1e-4, 1.0, 1e4]))


def by_hand(x, cast, axis):
    """One group of shared scales after the other."""
    sizes = {
        "tensor": x.shape,
        "axis": (x.shape[0], 1) if axis == 0 else (1, x.shape[1]),
        "block": (cast.size, 1) if axis == 0 else (1, cast.size),
        "tile": (cast.size, cast.size),
    }[cast.shared]
    result = torch.empty_like(x)
    for row in range(0, x.shape[0], sizes[0]):
        for column in range(0, x.shape[1], sizes[1]):
            group = x[row : row + sizes[0], column : column + sizes[1]].double()
            scale = cast.largest / max(float(group.abs().max()), 1e-12)
            if cast.rounding == "power_of_2":
                scale = 2.0 ** int(torch.tensor(scale).log2().floor())
            rounded = (group.float() * scale).clamp(-cast.largest, cast.largest).to(cast.dtype).double() / scale
            result[row : row + sizes[0], column : column + sizes[1]] = rounded.float()
    return result


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", CASTS)
@settings(max_examples=25, deadline=None)
@given(x=matrices())
def test_cast_is_that_of_each_group_alone(name, axis, x):
    torch.testing.assert_close(quantized(x, CASTS[name], axis), by_hand(x, CASTS[name], axis), rtol=1e-6, atol=0)


@settings(max_examples=50, deadline=None)
@given(x=matrices(), name=st.sampled_from(sorted(CASTS)), axis=st.integers(0, 1))
def test_cast_keeps_zeros_and_signs_and_rounds_what_is_normal_to_half_a_step(x, name, axis):
    x[x.shape[0] // 2] = 0
    cast = CASTS[name]
    result = quantized(x, cast, axis)
    assert torch.equal(result[x == 0], x[x == 0])
    assert bool((result * x >= 0).all())
    assert torch.equal(quantized(-x, cast, axis), -result)
    normal = x.abs() > x.abs().max() * 2.0**-13  # above the subnormals, whatever shares a scale
    half_step = 2.0**-4 if cast.dtype is E4M3 else 2.0**-3
    assert bool(((result - x).abs()[normal] <= half_step * 1.001 * x.abs()[normal]).all())


def test_values_that_are_not_finite_stay_visible():
    for value in (torch.inf, -torch.inf, torch.nan):
        x = torch.randn(16, 32)
        x[3, 4] = value
        for cast in CASTS.values():
            assert not quantized(x, cast, 1).isfinite().all()
        assert not quantized(x, Cast(), 1, torch.tensor(2.0)).isfinite().all()


def test_shares_of_clipped_and_lost_values():
    x = torch.tensor([[100.0, -50.0, 1e-7, 0.0], [1.0, 2.0, 3.0, -4.0]])
    clipped, lost = saturated_and_flushed(x, Cast(), 1)
    assert (float(clipped), float(lost)) == (0.0, pytest.approx(1 / 7))
    clipped, lost = saturated_and_flushed(x, Cast(), 1, torch.tensor(3.5))
    assert (float(clipped), float(lost)) == (pytest.approx(3 / 7), pytest.approx(1 / 7))


def make_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))


def results(network, x):
    """Output and all gradients."""
    x = x.clone().requires_grad_()
    output = network(x)
    output.square().mean().backward()
    return [output.detach(), x.grad, *(parameter.grad for parameter in network.parameters())]


def converted(recipe, backend, network=None, **arguments):
    network = copy.deepcopy(network or make_network())
    return FP8Precision(recipe, backend, **arguments).convert_module(network)


def relative(found, expected):
    return max(float((f - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchao_backend_is_torchaos_own_layer_to_the_bit(recipe):
    float8 = pytest.importorskip("torchao.float8")
    x = torch.randn(48, 64)
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    expected = results(float8.convert_to_float8_training(make_network(), config=config), x)
    for found, value in zip(results(converted(recipe, "torchao"), x), expected, strict=True):
        assert torch.equal(found, value)


@pytest.mark.parametrize("recipe", BACKEND_RECIPES["torchao"])
def test_emulation_is_what_torchao_computes(recipe):
    pytest.importorskip("torchao")
    x = torch.randn(48, 64)
    found, expected = results(converted(recipe, "emulated"), x), results(converted(recipe, "torchao"), x)
    per_tensor = recipe in ("tensorwise", "delayed")
    assert relative(found, expected) <= (2e-6 if per_tensor else 0.05)  # the rowwise kernel returns bfloat16 only
    if not per_tensor:
        layer, other = (converted(recipe, backend, nn.Linear(64, 32)) for backend in ("emulated", "torchao"))
        other.load_state_dict(layer.state_dict())
        assert relative(results(layer, x)[:1], results(other, x)[:1]) <= 2.0**-8


@pytest.mark.parametrize("backend", ["emulated", "torchao"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_of_zeros_change_nothing(recipe, backend):
    if recipe not in BACKEND_RECIPES[backend]:
        return
    if backend == "torchao":
        pytest.importorskip("torchao")
    x = torch.randn(21, 64)
    layer = nn.Linear(64, 32)
    odd, even = converted(recipe, backend, layer), converted(recipe, backend, layer)
    padded = torch.cat((x, torch.zeros(11, 64)))
    odd(x).square().sum().backward()
    even(padded)[:21].square().sum().backward()
    assert torch.equal(odd(x), even(padded)[:21])
    assert torch.equal(odd.weight.grad, even.weight.grad)
    assert torch.equal(odd.bias.grad, even.bias.grad)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (64,), (1, 64), (3, 5, 64)])
def test_any_shape_of_rows(shape):
    layer = converted("rowwise", "emulated", nn.Linear(64, 32))
    x = torch.randn(*shape, requires_grad=True)
    output = layer(x)
    assert output.shape == (*shape[:-1], 32)
    output.sum().backward()
    assert layer.weight.grad.shape == (32, 64)
    assert x.grad.shape == x.shape
    assert bool((layer.weight.grad == 0).all()) == (x.numel() == 0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_weights_pass_gradients_on_and_get_none(recipe):
    layer = converted(recipe, "emulated", nn.Linear(64, 32))
    x = torch.randn(16, 64)
    expected = results(layer, x)[1]
    layer.zero_grad()
    layer.requires_grad_(False)
    x = x.requires_grad_()
    layer(x).square().mean().backward()
    assert torch.equal(x.grad, expected)
    assert layer.weight.grad is None


@pytest.mark.parametrize("backend", ["emulated", "torchao"])
def test_autocast_decides_the_dtype_of_outputs_and_not_of_weights(backend):
    if backend == "torchao":
        pytest.importorskip("torchao")
    network = converted("rowwise", backend)
    x = torch.randn(32, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = network(x)
    assert output.dtype == torch.bfloat16
    output.float().square().mean().backward()
    assert {parameter.grad.dtype for parameter in network.parameters()} == {torch.float32}
    torch.testing.assert_close(output.float(), network(x), rtol=0.05, atol=0.05)


COMPILED = {"emulated": ("rowwise", "delayed", "mxfp8"), "torchao": ("rowwise", "delayed")}


@pytest.mark.parametrize(
    ("recipe", "backend"), [(recipe, backend) for backend, recipes in COMPILED.items() for recipe in recipes]
)
def test_compiled_in_one_graph(recipe, backend):
    if backend == "torchao":
        pytest.importorskip("torchao")
    torch.compiler.reset()
    x = torch.randn(30, 64)
    eager, compiled = converted(recipe, backend), converted(recipe, backend)
    expected = results(eager, x)
    found = results(torch.compile(compiled, fullgraph=True, backend="aot_eager"), x)
    assert relative(found, expected) <= 1e-6
    if recipe == "delayed":
        for layer, other in zip((eager[0], eager[2]), (compiled[0], compiled[2]), strict=True):
            assert torch.equal(layer.fp8.amax.seen, other.fp8.amax.seen)
            assert bool((layer.fp8.amax.seen > 0).all())
