"""Delayed scaling: what is remembered, when, and that a resumed run cannot be told from an uninterrupted one."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from lightning_embodied.errors import CheckpointError
from lightning_embodied.precision import FP8Precision, fp8_layers
from tests.precision.networks import FlowModule, loader, trainer

NAME = "net.blocks.1.fc1"


def plugin(**arguments):
    return FP8Precision("delayed", "emulated", **arguments)


def fit(model, made, steps, ckpt_path=None, **arguments):
    trainer(max_steps=steps, plugins=made, **arguments).fit(model, loader(), ckpt_path=ckpt_path)
    return made.state_dict()["amax_history"]


def test_history_is_the_largest_values_of_the_last_steps_youngest_first():
    layer = nn.Linear(32, 16, bias=False)
    made = plugin(amax_history_len=3)
    made.convert_module(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for step in range(1, 5):
        for part in (0.5, 1.0, 0.25):  # gradient accumulation: the largest of all micro-batches counts
            layer(torch.full((4, 32), part * step)).mul(-step).sum().backward()
        assert torch.equal(layer.fp8.amax.used > 0, torch.full((3,), step > 1))
        made.optimizer_step(optimizer)
    history = made.state_dict()["amax_history"][""]
    weight = float(layer.weight.abs().max())
    torch.testing.assert_close(history, torch.tensor([[4.0, 3.0, 2.0], [weight] * 3, [4.0, 3.0, 2.0]]))
    assert torch.equal(layer.fp8.amax.used, history.amax(1))
    made.optimizer_step(optimizer)  # nothing was computed: nothing is forgotten
    assert torch.equal(made.state_dict()["amax_history"][""], history)


def test_values_beyond_the_remembered_ones_saturate_in_training():
    layer = nn.Linear(16, 16, bias=False)
    made = plugin()
    made.convert_module(layer)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(16))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    layer(torch.ones(2, 16)).sum().backward()
    made.optimizer_step(optimizer)
    assert torch.equal(layer(torch.full((2, 16), 3.0)), torch.ones(2, 16))
    made.optimizer_step(optimizer)
    assert torch.equal(layer(torch.full((2, 16), 3.0)), torch.full((2, 16), 3.0))


def test_values_that_are_not_finite_are_not_remembered():
    layer = nn.Linear(16, 16)
    made = plugin()
    made.convert_module(layer)
    for value in (1.0, torch.inf, torch.nan):
        layer(torch.full((2, 16), value)).sum().backward()
        made.optimizer_step(torch.optim.SGD(layer.parameters(), lr=0.0))
    history = made.state_dict()["amax_history"][""]
    assert history.isfinite().all()
    assert (history[0] > 0).sum() == 1


class Looking(Callback):
    def __init__(self):
        self.before, self.after = [], []

    def seen(self, model):
        return torch.stack([layer.fp8.amax.seen for layer in fp8_layers(model).values()]).clone()

    def on_validation_start(self, trainer, pl_module):
        self.before.append(self.seen(pl_module))

    def on_validation_end(self, trainer, pl_module):
        self.after.append(self.seen(pl_module))


def test_evaluation_is_not_remembered():
    looking, model, made = Looking(), FlowModule(), plugin()
    run = trainer(max_steps=4, plugins=made, callbacks=[looking], val_check_interval=2, limit_val_batches=2)
    run.fit(model, loader(), loader(seed=3))
    assert len(looking.after) == 2
    assert all(torch.equal(before, after) for before, after in zip(looking.before, looking.after, strict=True))
    without = fit(FlowModule(), plugin(), 4)
    assert all(torch.equal(history, without[name]) for name, history in made.state_dict()["amax_history"].items())


def test_recomputation_is_remembered_once():
    models = FlowModule(), FlowModule(recompute=True)
    expected, found = (fit(model, plugin(), 4) for model in models)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert_weights(*models)


def test_resuming_is_bitwise_the_uninterrupted_run(tmp_path):
    straight, begun, resumed, forgetful = (FlowModule() for _ in range(4))
    expected = fit(straight, plugin(), -1, max_epochs=3)
    saved = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    fit(begun, plugin(), -1, max_epochs=1, callbacks=[saved], enable_checkpointing=True)
    found = fit(resumed, plugin(), -1, saved.last_model_path, max_epochs=3)
    assert all(torch.equal(found[name], history) for name, history in expected.items())
    assert_weights(resumed, straight)

    content = torch.load(saved.last_model_path)
    del content["FP8Precision"]
    torch.save(content, tmp_path / "without.ckpt")
    fit(forgetful, plugin(), -1, tmp_path / "without.ckpt", max_epochs=3)
    with pytest.raises(AssertionError):
        assert_weights(forgetful, straight)


def assert_weights(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


def test_dynamic_recipes_have_no_state():
    made = FP8Precision("rowwise", "emulated")
    trainer(max_steps=1, plugins=made).fit(FlowModule(), loader())
    assert made.state_dict() == {}


def test_state_of_another_recipe_or_length_or_model():
    state = plugin(amax_history_len=4)
    fit(FlowModule(), state, 3)
    saved = state.state_dict()
    FP8Precision("rowwise", "emulated").load_state_dict(saved)
    for length in (2, 9):
        made = plugin(amax_history_len=length)
        made.load_state_dict(saved)  # before the conversion
        made.convert_module(FlowModule())
        history = made.state_dict()["amax_history"][NAME]
        kept = min(length, 4)
        assert history.shape == (3, length)
        assert torch.equal(history[:, :kept], saved["amax_history"][NAME][:, :kept])
    other = plugin()
    layer = other.convert_module(nn.Linear(32, 32))
    other.load_state_dict(saved)
    assert not layer.fp8.amax.used.any()


def test_state_that_cannot_be_read():
    made = plugin()
    made.convert_module(nn.Linear(32, 32))
    with pytest.raises(CheckpointError, match="another version"):
        made.load_state_dict({"version": 2, "amax_history": {}})
    with pytest.raises(CheckpointError, match="wrong shape"):
        made.load_state_dict({"version": 1, "amax_history": {"": torch.zeros(4, 16)}})
