"""Adapters on the small policy: only they train, checkpoints act the same, merged equals unmerged."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_embodied.cli import EmbodiedCLI
from lightning_embodied.cli.config_files import shipped_configs
from lightning_embodied.errors import ConfigError
from lightning_embodied.models import FlowMatchingPolicy, load_policy
from lightning_embodied.models.lora import LoRALinear, merged_state_dict
from tests.models.conftest import TinyDataModule, make_policy, make_samples, make_trainer, observations_of

LORA = {"target_modules": ["*.qkv", "expert.layers.*.mlp.*"], "rank": 2, "also_train": ["expert.action_out.*"]}
SIZES = {"width": 32, "expert_width": 24, "depth": 2, "heads": 2, "head_dim": 8, "stem_channels": 8}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A policy adapted by a few steps, its weights before, its run directory and its observations."""
    run = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    policy = FlowMatchingPolicy(**SIZES, lora=LORA, learning_rate=0.01)
    data = TinyDataModule(make_samples(8), 4)
    policy.spec = make_policy().spec
    policy.configure_model()
    before = copy.deepcopy(policy.state_dict())
    trainer = make_trainer(max_steps=4, limit_val_batches=0, callbacks=[EMAWeightAveraging(decay=0.5)])
    trainer.fit(policy, datamodule=data)
    trainer.save_checkpoint(run / "a.ckpt")
    return load_policy(run), before, run, observations_of(make_samples(8)[3::4])


def is_trainable(name):
    return "lora_" in name or name.startswith("expert.action_out")


def test_only_adapters_and_what_was_asked_for_train(trained):
    policy, before, _, _ = trained
    for name, value in policy.state_dict().items():
        assert torch.equal(value, before[name]) != is_trainable(name), name
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == set(filter(is_trainable, before))
    assert sum(isinstance(layer, LoRALinear) for layer in policy.modules()) == 1 + 2 + 2 * 2


def test_base_weights_keep_their_names(trained):
    plain = make_policy(depth=2).state_dict()
    assert {name for name in trained[1] if "lora_" not in name} == set(plain)


def test_untrained_adapters_change_nothing():
    samples = observations_of(make_samples(8)[3::4])
    policy, reference = FlowMatchingPolicy(**SIZES, lora=LORA), make_policy(depth=2)
    policy.spec = reference.spec
    policy.configure_model()
    policy.load_state_dict(reference.state_dict(), strict=False)
    assert torch.equal(policy.predict_action_chunk(samples), reference.predict_action_chunk(samples))


def test_a_checkpoint_acts_the_same_and_trains_on(trained):
    policy, _, run, observations = trained
    again = load_policy(run)
    assert torch.equal(again.predict_action_chunk(observations), policy.predict_action_chunk(observations))
    lightnings = FlowMatchingPolicy.load_from_checkpoint(run / "a.ckpt")
    assert lightnings.lora == LORA
    trainer = make_trainer(max_steps=6, limit_val_batches=0)
    trainer.fit(
        FlowMatchingPolicy(**SIZES, lora=LORA), datamodule=TinyDataModule(make_samples(8), 4), ckpt_path=run / "a.ckpt"
    )
    assert trainer.global_step == 6


def test_merged_acts_as_unmerged(trained, tmp_path):
    policy, _, run, observations = trained
    expected = policy.predict_action_chunk(observations)
    state = merged_state_dict(policy)
    merged = load_policy(run)
    merged.merge_lora()
    assert not any(isinstance(layer, LoRALinear) for layer in merged.modules())
    assert torch.allclose(merged.predict_action_chunk(observations), expected, atol=1e-6)
    for name, value in merged.state_dict().items():
        assert torch.equal(value, state.pop(name)), name
    assert not state
    assert any(isinstance(layer, LoRALinear) for layer in policy.modules())
    trainer = make_trainer()
    trainer.strategy.connect(merged)
    trainer.save_checkpoint(tmp_path / "merged.ckpt")
    loaded = load_policy(tmp_path / "merged.ckpt")
    assert loaded.lora is None
    assert torch.allclose(loaded.predict_action_chunk(observations), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("lora", "where"),
    [
        ({"target_modules": ["*.q_projection"]}, "lora.target_modules"),
        ({"target_modules": ["*.qkv", "expert"]}, "lora.target_modules"),
        ({"target_modules": ["*.qkv"], "also_train": ["expert.head.*"]}, "lora.also_train"),
        ({"target_modules": ["*.qkv"], "rank": 0}, "lora.rank"),
        ({"target_modules": ["*.qkv"], "ranks": 4}, "ranks"),
        ({"target_modules": []}, "target_modules"),
        ({"rank": 4}, "target_modules"),
    ],
)
def test_what_matches_nothing_is_named(lora, where):
    with pytest.raises(ConfigError, match=where):
        make_policy(lora=lora)


class OnlyBuild(EmbodiedCLI):
    def fit(self, **kwargs):
        pass


def test_in_yaml(tmp_path):
    (tmp_path / "lora.yaml").write_text(
        "model:\n  init_args:\n    lora:\n      target_modules: ['*.qkv']\n      rank: 4\n"
    )
    quickstart = str(shipped_configs()["quickstart.yaml"])
    args = ["fit", "--config", quickstart, "--config", str(tmp_path / "lora.yaml"), "--wandb=disabled"]
    assert OnlyBuild(args=args).model.lora == {"target_modules": ["*.qkv"], "rank": 4}
    with pytest.raises(SystemExit):
        OnlyBuild(args=[*args, "--model.init_args.lora", '{"targets": ["*.qkv"]}'])
