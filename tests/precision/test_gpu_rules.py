"""CUDA's rules for FP8 products, checked on a CPU: the calls a layer makes are repeated on fake CUDA tensors.

Fake tensors run the checks of CUDA's kernels without the kernels; the CPU's kernels take any shape.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lightning_embodied.precision import FP8Precision
from lightning_embodied.precision.products import products
from lightning_embodied.precision.recipes import BACKEND_RECIPES

pytest.importorskip("torchao")
RECIPES = BACKEND_RECIPES["torchao"]


class ScaledProducts(TorchDispatchMode):
    """Collects the arguments of every `_scaled_mm`."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if types:
            return NotImplemented  # torchao's tensors first: they turn into the call that is looked for
        if function is torch.ops.aten._scaled_mm.default:
            self.calls.append((args, kwargs or {}))
        return function(*args, **(kwargs or {}))

    def repeat_on_cuda(self):
        """Results' shapes of the same calls, same shapes, strides and dtypes, on fake CUDA tensors."""
        with FakeTensorMode():

            def on_cuda(tensor):
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

            calls = tree_map_only(torch.Tensor, on_cuda, self.calls)
            return [tuple(torch.ops.aten._scaled_mm.default(*args, **kwargs).shape) for args, kwargs in calls]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 15, 16, 20, 1018])
@pytest.mark.parametrize("recipe", RECIPES)
def test_all_products_of_a_layer_are_what_cuda_takes(recipe, rows, dtype):
    layer = nn.Linear(96, 48)
    FP8Precision(recipe, "torchao").convert_module(layer)
    x = torch.randn(rows, 96, dtype=dtype, requires_grad=True)
    with ScaledProducts() as scaled:
        layer(x).sum().backward()
    padded = rows + -rows % 16
    expected = [(padded, 48), (padded, 96), (48, 96)]
    assert scaled.repeat_on_cuda() == (expected[:2] if recipe == "rowwise_with_gw_hp" else expected)


@pytest.mark.parametrize(
    ("product", "rows", "k", "n"), [("output", 32, 40, 48), ("grad_input", 32, 96, 24), ("grad_weight", 20, 96, 48)]
)
def test_the_rules_are_in_force(product, rows, k, n):
    x, w, g = torch.randn(rows, k), torch.randn(n, k), torch.randn(rows, n)
    arguments = {"output": (x, w), "grad_input": (g, w), "grad_weight": (g, x)}[product]
    with ScaledProducts() as scaled:
        getattr(products("tensorwise", "torchao"), product)(*arguments, None)
    with pytest.raises(RuntimeError, match=r"(?i)divisible"):
        scaled.repeat_on_cuda()


@pytest.mark.parametrize(("k", "n"), [(40, 48), (96, 24), (8, 64)])
def test_a_layer_that_breaks_the_rules_is_not_converted(k, n):
    plugin = FP8Precision("rowwise", "torchao")
    plugin.convert_module(nn.ModuleDict({"odd": nn.Linear(k, n), "even": nn.Linear(64, 64)}))
    assert not plugin.report["odd"].fp8
    assert "multiples of 16" in plugin.report["odd"].reason
    assert plugin.report["even"].fp8
