"""Quantised layers behave as the layers they were, with the weight that their codes stand for."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_embodied.quantization import FORMATS, dequantize, quantize
from lightning_embodied.quantization.layers import QUANTIZED, QuantizedLinear, quantize_layer, scaled_product
from tests.precision.test_gpu_rules import ScaledProducts

all_kinds = pytest.mark.parametrize("kind", FORMATS.values(), ids=lambda kind: kind.name)
E4M3 = torch.float8_e4m3fn


def layers():
    torch.manual_seed(0)
    return [
        (nn.Linear(20, 12), torch.randn(3, 5, 20)),
        (nn.Linear(16, 32, bias=False), torch.randn(7, 16)),
        (nn.Embedding(30, 8), torch.tensor([[0, 29], [3, 3]])),
        (nn.Conv2d(3, 6, 3, stride=2, padding=1), torch.randn(2, 3, 9, 9)),
    ]


@all_kinds
@pytest.mark.parametrize("index", range(4))
def test_it_computes_with_the_stored_weight(kind, index):
    layer, input = layers()[index]
    expected = copy.deepcopy(layer)
    with torch.no_grad():
        expected.weight.copy_(dequantize(*quantize(layer.weight, kind)))
    original = type(layer)
    quantize_layer(layer, kind)
    assert type(layer) is QUANTIZED[original]
    assert isinstance(layer, original)
    assert torch.equal(layer.weight, expected.weight)
    assert torch.equal(layer(input), expected(input))
    assert torch.equal(copy.deepcopy(layer)(input), expected(input))


@all_kinds
def test_codes_stay_eight_bits_in_another_precision(kind):
    layer, input = layers()[0]
    quantize_layer(layer, kind)
    codes, scale = layer.codes.clone(), layer.weight_scale.clone()
    layer.to(torch.bfloat16)
    assert layer.codes.dtype == kind.dtype
    assert torch.equal(layer.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(layer.weight_scale, scale)
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert layer(input.bfloat16()).dtype == torch.bfloat16


@all_kinds
def test_the_state_is_codes_and_scales(kind):
    layer, _ = layers()[1]
    quantize_layer(layer, kind)
    assert set(layer.state_dict()) == {"codes", "weight_scale"}
    assert not list(layer.parameters())


@pytest.mark.parametrize("name", ["fp8_row", "fp8_tensor", "fp8_block"])
def test_calibrated_inputs_are_cast(name):
    layer, _ = layers()[1]
    quantize_layer(layer, FORMATS[name])
    input = torch.randn(5, 16)
    layer.input_scale = input.abs().max() / 448
    cast = (input / layer.input_scale).to(E4M3).float() * layer.input_scale
    assert torch.equal(layer(input), F.linear(cast, layer.weight))
    assert not torch.equal(layer(input), F.linear(input, layer.weight))
    assert torch.equal(layer(10 * input).abs() <= 1e9, torch.ones(5, 32, dtype=torch.bool))  # saturates
    assert layer(input[:0]).shape == (0, 32)


@pytest.mark.parametrize("name", ["fp8_row", "fp8_tensor"])
def test_the_kernel_computes_what_is_emulated(name):
    """The call that FP8 cores get, on torch's own CPU kernel; it rounds its result to bfloat16."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, bias=False)
    quantize_layer(layer, FORMATS[name])
    assert isinstance(layer, QuantizedLinear)
    input = torch.randn(20, 64)
    layer.input_scale = input.abs().max() / 448
    codes = (input / layer.input_scale).to(E4M3)
    found = scaled_product(codes, layer.codes, layer.input_scale, layer.weight_scale)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), layer(input), atol=2**-8 * float(layer(input).abs().max()))


@pytest.mark.parametrize("name", ["fp8_row", "fp8_tensor"])
@pytest.mark.parametrize("rows", [1, 50])
def test_cudas_kernel_takes_the_shapes(name, rows):
    """A GPU's rules are stricter than a CPU's; fake tensors are checked by them."""
    scale = {"fp8_row": (48, 1), "fp8_tensor": (1, 1)}[name]

    def product(columns):
        with ScaledProducts() as calls:
            codes, weight = (torch.zeros(side, columns, dtype=E4M3) for side in (rows, 48))
            scaled_product(codes, weight, torch.ones(()), torch.ones(scale))
        return calls.repeat_on_cuda()

    assert product(64) == [(rows, 48)]
    with pytest.raises(RuntimeError, match="16"):
        product(40)


def test_only_exact_classes_are_known():
    class Own(nn.Linear):
        pass

    with pytest.raises(KeyError):
        quantize_layer(Own(4, 4), FORMATS["fp8_row"])
