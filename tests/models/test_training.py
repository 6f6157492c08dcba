"""Training under a real Trainer: the exact global mean, learning, averaging of weights, the learning rate."""

import math

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging

from lightning_embodied.errors import ConfigError
from lightning_embodied.models import FlowMatchingPolicy, load_policy
from lightning_embodied.models.optimization import adamw, warmup_cosine
from tests.models.conftest import (
    ACTION,
    HORIZON,
    TinyDataModule,
    make_collator,
    make_policy,
    make_samples,
    make_trainer,
)


def fixed_noise(frame_index):
    """Noise and time that belong to a sample, however it is batched."""
    draws = [torch.Generator().manual_seed(int(frame)) for frame in frame_index]
    noise = torch.stack([torch.randn(1, HORIZON, ACTION, generator=g) for g in draws])
    return noise, torch.stack([torch.rand(1, generator=g) for g in draws])


class FixedNoisePolicy(FlowMatchingPolicy):
    """The policy with its randomness tied to the samples, to compare ways of batching them."""

    def forward(self, batch, noise=None, time=None):
        return super().forward(batch, *fixed_noise(batch.frame_index))


class KeepGradients(Callback):
    """Gradients as the optimizer sees them, after clipping, and the logged clip norm."""

    def __init__(self):
        self.gradients = []

    def on_before_zero_grad(self, trainer, module, optimizer):
        self._keep(module)

    def on_train_end(self, trainer, module):
        self._keep(module)

    def _keep(self, module):
        found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        if found:
            self.gradients.append(found)


def fixed_policy():
    policy = FixedNoisePolicy(width=32, expert_width=24, depth=2, heads=2, head_dim=8, stem_channels=8, learning_rate=0)
    reference = make_policy(depth=2)
    policy.spec = reference.spec
    policy.configure_model()
    policy.load_state_dict(reference.state_dict())
    return policy


def reference_gradients(samples):
    """Mean over every valid target of all samples, in one plain pass."""
    policy = fixed_policy()
    terms = policy(make_collator()(samples))
    (terms.total / terms.count).backward()
    return {name: p.grad for name, p in policy.named_parameters()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-5 * max(1.0, float(value.abs().max())), name


@pytest.mark.parametrize(("accumulation", "batch_size"), [(1, 9), (3, 4), (3, 3), (8, 4)])
def test_gradient_is_the_global_mean(accumulation, batch_size):
    samples, keep = make_samples(9), KeepGradients()
    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=accumulation, callbacks=[keep], limit_val_batches=0)
    trainer.fit(fixed_policy(), datamodule=TinyDataModule(samples, batch_size))
    assert len(keep.gradients) == 1
    assert_equal(keep.gradients[0], reference_gradients(samples))


def test_clipping_sees_the_global_mean():
    samples, keep = make_samples(9), KeepGradients()
    trainer = make_trainer(
        max_epochs=1, accumulate_grad_batches=3, gradient_clip_val=1e-3, callbacks=[keep], limit_val_batches=0
    )
    trainer.fit(fixed_policy(), datamodule=TinyDataModule(samples, 3))
    norm = math.sqrt(sum(float(g.square().sum()) for g in keep.gradients[0].values()))
    assert norm == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true"])
def test_half_precisions_train_on_states_and_actions_that_nothing_rounded(precision):
    class Keep(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.batch = batch

    samples, keep = make_samples(4), Keep()
    trainer = make_trainer(max_steps=1, precision=precision, callbacks=[keep])
    trainer.fit(fixed_policy(), datamodule=TinyDataModule(samples, 4))
    assert torch.equal(keep.batch.actions, torch.stack([sample["action"] for sample in samples]))
    assert torch.equal(keep.batch.state, torch.stack([sample["observation.state"] for sample in samples]))
    exact = fixed_policy()(make_collator()(samples)).mean
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(float(exact), rel=0.05)


class RandomStateKept(Callback):
    def on_validation_batch_start(self, *_):
        self.state = torch.get_rng_state()

    def on_validation_batch_end(self, *_):
        assert torch.equal(torch.get_rng_state(), self.state)


def test_validation_is_the_global_mean_and_leaves_the_random_state():
    samples = make_samples(9)
    policy = fixed_policy()
    trainer = make_trainer(callbacks=[RandomStateKept()])
    trainer.validate(policy, datamodule=TinyDataModule(samples, 4), verbose=False)
    terms = policy(make_collator()(samples))
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(float(terms.mean), rel=1e-5)


def test_learns_actions_that_the_state_decides():
    samples = make_samples(64)
    for sample in samples:
        sample["action"] = (sample["observation.state"][:ACTION] * 0.2 - 1.4).expand(HORIZON, ACTION).clone()
        sample["action_is_pad"] = torch.zeros(HORIZON, dtype=torch.bool)
    torch.manual_seed(0)
    policy = FlowMatchingPolicy(width=32, expert_width=32, depth=2, heads=2, head_dim=16, learning_rate=5e-3)
    data = TinyDataModule(samples, 32)
    trainer = make_trainer(max_epochs=40, gradient_clip_val=1.0, limit_val_batches=0)
    trainer.fit(policy, datamodule=data)
    with torch.no_grad():
        batch = make_collator()(samples)
        predicted = policy.action_normalizer.unnormalize(policy.sample_actions(batch))
    error = (predicted - batch.actions).square().mean()
    assert error < 0.1 * batch.actions.var(), (error, batch.actions.var())


def test_image_shift_trains_and_needs_no_random_state():
    policy = make_policy(image_shift=2)
    make_trainer(max_steps=2, limit_val_batches=0).fit(policy, datamodule=TinyDataModule(make_samples(8), 4))


def test_averaged_weights_are_those_in_the_checkpoint(tmp_path):
    name, weights = "expert.action_out.weight", []

    class Read(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            weights.append(module.get_parameter(name).detach().clone())

    policy = make_policy()
    trainer = make_trainer(max_steps=4, callbacks=[Read(), EMAWeightAveraging(decay=0.5)], limit_val_batches=0)
    trainer.fit(policy, datamodule=TinyDataModule(make_samples(8), 4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    average = weights[0]
    for weight in weights[1:]:
        average = 0.5 * average + 0.5 * weight
    averaged = load_policy(tmp_path / "a.ckpt").state_dict()
    torch.testing.assert_close(averaged[name], average)
    assert not torch.allclose(average, weights[-1])
    for buffer in ("centre", "scale"):
        key = f"action_normalizer.{buffer}"
        assert torch.equal(averaged[key], make_policy().state_dict()[key])


def test_policy_built_by_the_trainer_itself_with_averaging():
    policy = FlowMatchingPolicy(width=32, expert_width=24, depth=2, heads=2, head_dim=8)
    trainer = make_trainer(max_steps=2, callbacks=[EMAWeightAveraging(decay=0.5)])
    trainer.fit(policy, datamodule=TinyDataModule(make_samples(8), 4))
    assert policy.spec.action_horizon == HORIZON


def test_only_matrices_decay():
    policy = make_policy()
    optimizer = adamw(policy.parameters(), 1e-3, 0.1)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert all(decays[id(p)] == (0.1 if p.dim() >= 2 else 0.0) for p in policy.parameters())


def test_schedule_warms_up_and_falls():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warmup_cosine(optimizer, total_steps=100, warmup=0.1, final=0.05)
    rates = []
    for _ in range(100):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(1 / 11)
    assert rates.index(max(rates)) == 10
    assert max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert schedule.get_last_lr()[0] == pytest.approx(0.05)
    assert warmup_cosine(optimizer, math.inf, 0.0, 0.05).get_last_lr()[0] == 1.0


def test_batches_of_another_collator_are_refused():
    loader = torch.utils.data.DataLoader([{"action": torch.zeros(HORIZON, ACTION)}] * 4, batch_size=2)
    with pytest.raises(ConfigError, match=r"does not read[\s\S]*dict[\s\S]*VarlenPackingCollator"):
        make_trainer(max_steps=1).fit(make_policy(), loader)
