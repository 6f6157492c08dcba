"""Ten things that go wrong with Lightning's own TransformerEnginePrecision, and do not with FP8Precision."""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from lightning_embodied.models.lora import LoRALinear
from lightning_embodied.precision import FP8Linear, FP8Precision
from lightning_embodied.precision.recipes import RECIPES
from tests.precision.networks import FlowModule, batch, loader, trainer


def plugin(recipe="delayed"):
    return FP8Precision(recipe, "emulated")


def test_1_checkpoints_resume_and_load_in_any_precision(tmp_path):
    saved = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    run = {"callbacks": [saved], "enable_checkpointing": True}
    trainer(max_steps=2, plugins=plugin(), **run).fit(FlowModule(), loader())
    path = saved.last_model_path
    assert list(torch.load(path)["state_dict"]) == list(FlowModule().state_dict())
    FlowModule.load_from_checkpoint(path)
    for recipe in ("delayed", "rowwise", None):
        plugins = plugin(recipe) if recipe else None
        resumed = trainer(max_steps=3, plugins=plugins)
        resumed.fit(FlowModule(), loader(), ckpt_path=path)
        assert resumed.global_step == 3


def test_2_frozen_weights_stay_frozen():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].requires_grad_(False)
    plugin().convert_module(model)
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True]
    model(torch.randn(4, 32)).sum().backward()
    assert model[0].weight.grad is None


def test_3_ties_hold_and_train():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    plugin().convert_module(model)
    assert model[1].weight is model[0].weight
    assert len(list(model.parameters())) == 3
    model(torch.randn(4, 32)).sum().backward()
    assert model[0].weight.grad is model[1].weight.grad


def test_4_hooks_and_eval_flags_survive():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].eval()
    called = []
    model[0].register_forward_pre_hook(lambda *_: called.append("before"))
    model[0].register_full_backward_hook(lambda *_: called.append("backward"))
    plugin().convert_module(model)
    assert [layer.training for layer in model] == [False, True]
    model(torch.randn(4, 32, requires_grad=True)).sum().backward()
    assert called == ["before", "backward"]


def test_5_subclasses_of_linear_are_not_replaced():
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = nn.Sequential(Doubled(32, 32), LoRALinear(nn.Linear(32, 32), 4, 8.0), nn.Linear(32, 32))
    made = plugin()
    made.convert_module(model)
    assert [type(layer) for layer in model] == [Doubled, LoRALinear, FP8Linear]
    assert made.report["0"].reason == "Doubled is a class of its own"


def test_6_norms_without_weights_or_bias_are_left_alone():
    model = nn.Sequential(nn.LayerNorm(32, elementwise_affine=False), nn.LayerNorm(32, bias=False), nn.Linear(32, 32))
    plugin().convert_module(model)
    assert model[0].weight is None
    assert model[1].bias is None
    model(torch.randn(4, 32)).sum().backward()


def test_7_a_root_that_is_a_linear_layer_is_converted():
    layer = nn.Linear(32, 32)
    assert plugin().convert_module(layer) is layer
    assert isinstance(layer, FP8Linear)


@pytest.mark.parametrize("high_precision", ["32-true", "bf16-mixed"])
def test_8_weights_buffers_and_inputs_keep_their_dtype_and_values(high_precision):
    model = FlowModule()
    std = model.action_std.clone()
    fit = trainer(max_steps=2, plugins=FP8Precision("rowwise", "emulated", high_precision=high_precision))
    fit.fit(model, loader())
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    assert torch.equal(model.action_std, std)
    assert model.seen_dtypes == {torch.float32}
    assert all(torch.isfinite(torch.tensor(model.losses)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_9_any_number_of_rows(recipe):
    model = FlowModule()
    plugin(recipe).convert_module(model)
    for size in (1, 3, 20):
        assert model(batch(size)).isfinite()
    layer = plugin(recipe).convert_module(nn.Linear(32, 48))
    for rows in (0, 1, 7, 20):
        assert layer(torch.randn(rows, 32)).shape == (rows, 48)


def test_10_every_recipe_is_its_own():
    """Not delayed scaling under whatever options; and FSDP2 and sharding come before conversion (test_ranks.py)."""
    torch.manual_seed(0)
    x = torch.randn(16, 256)
    x[:, 0] = 3e4  # drowns what shares its scale
    layers = {recipe: plugin(recipe).convert_module(nn.Linear(256, 64)) for recipe in RECIPES}
    for layer in layers.values():
        layer.load_state_dict(layers["rowwise"].state_dict())
        layer.weight.data[:, 0] = 0
    assert {recipe: layer.fp8.recipe for recipe, layer in layers.items()} == {recipe: recipe for recipe in RECIPES}
    assert {recipe for recipe, layer in layers.items() if layer.fp8.amax is not None} == {"delayed"}
    for layer in layers.values():
        layer(x).square().sum().backward()
    gradients = [layer.weight.grad for recipe, layer in layers.items() if recipe != "delayed"]
    assert not any(torch.equal(a, b) for i, a in enumerate(gradients) for b in gradients[:i])


def test_fsdp_of_the_first_generation_says_no_by_itself():
    with pytest.raises(TypeError, match=r"(?i)precision"):
        FSDPStrategy(precision_plugin=plugin())


class Manual(FlowModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self(batch))
        optimizer.step()


def test_manual_optimization_steps_the_scaling_as_well():
    made, model = plugin(), Manual()
    assert isinstance(model, LightningModule)
    trainer(max_steps=3, plugins=made).fit(model, loader())
    history = made.state_dict()["amax_history"]["net.blocks.0.fc1"]
    assert (history[0] > 0).sum() == 3
