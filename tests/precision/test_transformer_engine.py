"""The Transformer Engine backend with a stand-in of its interface: the real one needs a GPU and a CUDA build."""

import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_embodied.errors import ConfigError, MissingExtraError
from lightning_embodied.precision import FP8Precision
from lightning_embodied.precision.transformer_engine import engine_context
from tests.precision.networks import FlowModule, loader, trainer

entered = []


class Linear(nn.Module):
    """As of Transformer Engine 2.20: parameters of its own, scaling state as `_extra_state`."""

    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        assert not bias
        self.calls = 0

    def forward(self, rows):
        assert rows.shape[0] % 16 == 0
        self.calls += 1
        return functional.linear(rows, self.weight)

    def get_extra_state(self):
        return torch.tensor([self.calls], dtype=torch.uint8)

    def set_extra_state(self, state):
        self.calls = int(state)


class Recipe:
    def __init__(self, **options):
        self.options = options


@contextmanager
def autocast(enabled, recipe):
    entered.append((type(recipe).__name__, recipe.options))
    yield


@pytest.fixture
def engine(monkeypatch):
    names = ("transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe")
    modules = {name: ModuleType(name) for name in (*names, "transformer_engine.pytorch")}
    for recipe in ("Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling", "MXFP8BlockScaling"):
        setattr(modules[names[2]], recipe, type(recipe, (Recipe,), {}))
    modules["transformer_engine.pytorch"].Linear = Linear
    modules["transformer_engine.pytorch"].autocast = autocast
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    entered.clear()


def test_it_computes_on_the_layers_own_weight_and_adds_nothing_to_the_model(engine):
    plain = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
    keys, x = list(plain.state_dict()), torch.randn(5, 64)
    expected = plain(x)
    FP8Precision("delayed", "transformer_engine").convert_module(plain)
    torch.testing.assert_close(plain(x), expected, rtol=1e-6, atol=1e-6)  # the bias is added by another kernel
    plain(x).sum().backward()
    assert plain[0].weight.grad is not None
    assert list(plain.state_dict()) == keys
    assert len(list(plain.modules())) == 3


def test_its_scaling_state_is_the_plugins(engine):
    first, second = (FP8Precision("delayed", "transformer_engine") for _ in range(2))
    layer = first.convert_module(nn.Linear(64, 32))
    for _ in range(3):
        layer(torch.randn(16, 64))
    state = first.state_dict()
    second.load_state_dict(state)
    restored = second.convert_module(nn.Linear(64, 32))
    assert int(restored.fp8.engine.state()) == 3
    second.teardown()
    assert int(second.state_dict()["engine"][""]) == 3
    assert FP8Precision("tensorwise", "transformer_engine").state_dict() == {}


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("tensorwise", ("Float8CurrentScaling", {})),
        ("delayed", ("DelayedScaling", {"amax_history_len": 4, "amax_compute_algo": "max"})),
        ("blockwise", ("Float8BlockScaling", {})),
        ("mxfp8", ("MXFP8BlockScaling", {})),
    ],
)
def test_recipes_are_its_own_classes(engine, recipe, expected):
    with engine_context(recipe, 4):
        assert entered == [expected]


@pytest.mark.parametrize(("recipe", "multiple"), [("tensorwise", 16), ("mxfp8", 32), ("blockwise", 128)])
def test_its_kernels_want_larger_multiples(engine, recipe, multiple):
    plugin = FP8Precision(recipe, "transformer_engine")
    plugin.convert_module(nn.Sequential(nn.Linear(multiple, multiple), nn.Linear(multiple, multiple // 2)))
    assert [verdict.fp8 for verdict in plugin.report.values()] == [True, False]
    assert f"multiples of {multiple}" in plugin.report["1"].reason


def test_without_a_gpu_it_says_so_before_training(engine):
    with pytest.raises(ConfigError, match=r"(?s)cannot run the FP8 recipe 'delayed' with transformer_engine.*cpu"):
        trainer(max_steps=1, plugins=FP8Precision("delayed", "transformer_engine")).fit(FlowModule(), loader())


def test_half_an_installation_is_a_missing_extra(monkeypatch, tmp_path):
    (tmp_path / "transformer_engine").mkdir()
    broken = "raise RuntimeError('cudnn shared object not found')"
    (tmp_path / "transformer_engine" / "__init__.py").write_text(broken)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError, match=r"(?s)cudnn shared object.*\[cuda\]"):
        FP8Precision("delayed", "transformer_engine").convert_module(nn.Linear(32, 32))
