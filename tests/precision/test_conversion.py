"""What conversion leaves alone, which layers it takes and why, and how it says so."""

import copy
import logging
from fnmatch import fnmatchcase

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import summarize
from torch import nn

from lightning_embodied.errors import ConfigError
from lightning_embodied.models import FlowMatchingPolicy, GrootN15Policy, LoRA, Pi05Policy
from lightning_embodied.models.lora import add_lora
from lightning_embodied.precision import FP8Linear, FP8Precision, fp8_layers, high_precision
from lightning_embodied.precision.recipes import BACKEND_RECIPES, RECIPES
from tests.models.conftest import make_policy, make_spec
from tests.precision.networks import DiT, FlowModule, batch, gradients, loader, relative_error, trainer


def emulated(**arguments):
    return FP8Precision("rowwise", "emulated", **arguments)


def test_a_layer_keeps_everything_but_its_class():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
            self.second.weight = self.first.weight
            self.again = self.first

    model = Tied().eval()
    model.first.bias.requires_grad_(False)
    called = []
    model.first.register_forward_hook(lambda *_: called.append("hook"))
    before = dict(model.named_parameters(remove_duplicate=False))
    state, modules = model.state_dict(), list(model.named_modules(remove_duplicate=False))
    assert emulated().convert_module(model) is model
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert [id(module) for _, module in model.named_modules(remove_duplicate=False)] == [id(m) for _, m in modules]
    assert list(model.state_dict()) == list(state)
    assert not model.first.bias.requires_grad
    assert not any(module.training for module in model.modules())
    model.first(torch.randn(2, 32))
    assert called == ["hook"]
    assert isinstance(model.first, FP8Linear)
    assert isinstance(model.first, nn.Linear)


def test_twice_is_once_and_another_plugin_takes_over():
    model = DiT()
    plugin = emulated()
    plugin.convert_module(model)
    report = dict(plugin.report)
    plugin.convert_module(model)
    assert plugin.report == report
    other = FP8Precision("tensorwise", "emulated", exclude=["blocks.0.*"])
    other.convert_module(model)
    assert type(model.blocks[0].fc1) is nn.Linear
    assert model.blocks[1].fc1.fp8.recipe == "tensorwise"


def test_converted_in_configure_model_and_again_as_a_whole():
    plugin, model = emulated(exclude=["*fc2"]), FlowModule()
    plugin.convert_module(model.net)
    plugin.convert_module(model)
    assert set(plugin.report) == {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


def test_fabrics_modules_of_equal_names_are_told_apart():
    plugin = FP8Precision("delayed", "emulated")
    first, second = plugin.convert_module(nn.Sequential(nn.Linear(32, 32))), nn.Sequential(nn.Linear(32, 32))
    plugin.convert_module(second)
    assert list(plugin.report) == ["0", "0#2"]
    first(torch.ones(4, 32)).sum().backward()
    second(torch.full((4, 32), 2.0)).sum().backward()
    plugin.optimizer_step(torch.optim.SGD([*first.parameters(), *second.parameters()]))
    histories = plugin.state_dict()["amax_history"]
    assert [float(histories[name][0, 0]) for name in ("0", "0#2")] == [1.0, 2.0]


def test_subclasses_and_adapters_stay():
    model = DiT()
    add_lora(model, LoRA(target_modules=["*.fc1"], rank=16))
    plugin = emulated()
    plugin.convert_module(model)
    assert plugin.report["blocks.0.fc1"].reason == "LoRALinear is a class of its own"
    assert plugin.report["blocks.0.fc2"].fp8


def kept(plugin):
    return {name for name, verdict in plugin.report.items() if not verdict.fp8}


def test_safe_defaults_of_a_dit():
    plugin, model = FP8Precision("rowwise", "emulated"), DiT()
    plugin.convert_module(model)
    sensitive = {f"blocks.{i}.{name}" for i in range(3) for name in ("adaLN_modulation.1", "attention_out")}
    assert kept(plugin) == {"action_in", "action_out", "time_mlp.0", "time_mlp.2", *sensitive}
    assert plugin.report["blocks.0.attention_out"].reason == "carries attention's values (safe default)"
    assert plugin.report["time_mlp.0"].reason == "reads the flow time (safe default)"
    daring = emulated(safe_defaults=False)
    daring.convert_module(DiT())
    assert kept(daring) == {"action_in", "action_out"}
    assert "multiples of 16" in daring.report["action_in"].reason


def test_safe_defaults_of_the_policies():
    expected = {
        FlowMatchingPolicy: {"expert.action_in", "expert.action_out", "expert.time.*", "*modulation", "state_in.*"}
        | {"*attention_out", "expert.layers.0.*"},
        Pi05Policy: {"model.action_*_proj", "model.time_mlp_*", "*layernorm.dense", "*gemma_expert.model.norm.dense"}
        | {"*v_proj", "*o_proj", "*.out_proj", "*gemma_expert.model.layers.0.*"},
        GrootN15Policy: {"*.norm1.linear", "*timestep_encoder.*", "*proj_out_?", "*lm_head"}
        | {"*.to_v", "*.to_out.0", "*.[vo]_proj", "*.out_proj", "*action_head.model.transformer_blocks.0.*"},
    }
    for kind, patterns in expected.items():
        policy = kind(width=32, expert_width=32) if kind is FlowMatchingPolicy else kind(preset="tiny")
        with torch.device("meta"):
            if kind is FlowMatchingPolicy:
                policy.spec = make_spec()
                policy.configure_model()
            else:
                policy.model = policy.make_network()
        plugin = emulated()
        plugin.convert_module(policy)
        for pattern in patterns:
            names = [name for name in plugin.report if fnmatchcase(name, pattern)]
            assert names, pattern
            assert not any(plugin.report[name].fp8 for name in names), pattern
        unexpected = {name for name in kept(plugin) if not any(fnmatchcase(name, p) for p in patterns)}
        assert all("multiples" in plugin.report[name].reason for name in unexpected), unexpected


def test_globs_choose_layers():
    plugin = emulated(include=["blocks.*"], exclude=["*.fc?"])
    plugin.convert_module(DiT())
    assert {name for name, verdict in plugin.report.items() if verdict.fp8} == {f"blocks.{i}.qkv" for i in range(3)}
    assert plugin.report["blocks.1.fc1"].reason == "excluded by '*.fc?'"
    assert plugin.report["action_in"].reason == "not included"


def test_names_are_those_without_wrappers():
    model = DiT()
    model.blocks[0] = torch.compile(model.blocks[0])
    plugin = emulated(exclude=["blocks.0.fc1"])
    plugin.convert_module(model)
    assert not plugin.report["blocks.0.fc1"].fp8
    assert plugin.report["blocks.0.fc2"].fp8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"exclude": ["*.fc9"]}, r"FP8Precision.exclude\n.*fc9"),
        ({"include": ["expert.*"]}, r"FP8Precision.include\n.*expert"),
        ({"include": ["action_in"]}, r"(?s)no layer is left.*not included"),
    ],
)
def test_patterns_that_come_to_nothing(arguments, message):
    with pytest.raises(ConfigError, match=message):
        emulated(**arguments).convert_module(DiT())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", BACKEND_RECIPES)
def test_impossible_combinations_are_refused_at_once(recipe, backend):
    if recipe in BACKEND_RECIPES[backend]:
        assert FP8Precision(recipe, backend).report == {}
    else:
        with pytest.raises(ConfigError, match=r"(?s)has no recipe.*choose one of them, or backend: .*emulated"):
            FP8Precision(recipe, backend)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": "fp4"}, "no such recipe"),
        ({"backend": "cutlass"}, "no such backend"),
        ({"recipe": "delayed", "amax_history_len": 0}, "amax_history_len"),
    ],
)
def test_unknown_values(arguments, message):
    with pytest.raises(ConfigError, match=message):
        FP8Precision(**arguments)


def test_a_device_without_fp8_is_refused_before_training(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "A100")
    from lightning_embodied.precision.recipes import check_device

    cuda = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"(?s)A100, capability 8.0.*8.9 or more.*emulated"):
        check_device("rowwise", "torchao", cuda)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    check_device("rowwise", "torchao", cuda)
    with pytest.raises(ConfigError, match=r"10.0 or more"):
        check_device("mxfp8", "transformer_engine", cuda)
    check_device("mxfp8", "emulated", cuda)
    with pytest.raises(ConfigError, match=r"(?s)transformer_engine.*found: +cpu"):
        check_device("delayed", "transformer_engine", torch.device("cpu"))


def test_verdicts_are_logged_and_the_summary_names_the_layers(caplog):
    model, plugin = FlowModule(), emulated()
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        fit = trainer(max_steps=1, plugins=plugin, callbacks=[ModelSummary(max_depth=4)], enable_model_summary=True)
        fit.fit(model, loader())
    text = caplog.text
    assert "FP8 (rowwise, emulated): 9 of 19 linear layers" in text
    assert "2 in high precision, reads the flow time (safe default): net.time_mlp.0, net.time_mlp.2" in text
    assert "FP8Linear" in text
    plugin.convert_module(model)
    summary = summarize(model, max_depth=4)
    types = dict(zip(summary.layer_names, summary.layer_types, strict=True))
    assert types["net.blocks.0.fc1"] == "FP8Linear"
    assert types["net.action_in"] == "Linear"


def test_high_precision_switches_fp8_off_for_a_while():
    model, plain = DiT(), DiT()
    plain.load_state_dict(model.state_dict())
    emulated().convert_module(model)
    one = batch()
    inputs = one["noise"], one["time"]
    with high_precision(model):
        assert torch.equal(model(*inputs), plain(*inputs))
    assert not torch.equal(model(*inputs), plain(*inputs))


def test_shown_in_the_modules_own_text():
    model = DiT()
    emulated().convert_module(model)
    assert "FP8Linear(in_features=64, out_features=256, bias=True, recipe=rowwise, backend=emulated)" in repr(model)
    names = ("qkv", "fc1", "fc2")
    assert list(fp8_layers(model)) == [f"blocks.{i}.{name}" for i in range(3) for name in names]


def test_a_copy_computes_the_same():
    model = DiT()
    FP8Precision("delayed", "emulated").convert_module(model)
    one = batch()
    assert torch.equal(copy.deepcopy(model)(one["noise"], one["time"]), model(one["noise"], one["time"]))


def test_recomputed_activations_give_the_same_gradients():
    plain, recomputed = FlowModule(), FlowModule(recompute=True)
    for recipe in ("rowwise", "delayed"):
        for model in (plain, recomputed):
            FP8Precision(recipe, "emulated").convert_module(model)
        one = batch()
        expected = gradients(plain, lambda m, one=one: m(one))
        found = gradients(recomputed, lambda m, one=one: m(one))
        assert relative_error(found, expected) == 0


def test_fabric_trains_and_steps_the_scaling():
    torch.manual_seed(0)
    plugin = FP8Precision("delayed", "emulated", amax_history_len=2)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    model = FlowModule()
    one = batch()
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(one)
        fabric.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[0]
    history = plugin.state_dict()["amax_history"]["net.blocks.0.fc1"]
    assert history.shape == (3, 2)
    assert bool((history > 0).all())


def test_a_policy_trains_from_yaml_arguments():
    policy = make_policy(width=32, expert_width=32)
    plugin = emulated()
    plugin.convert_module(policy)
    assert plugin.report["prefix.layers.0.qkv"].fp8
