"""GR00T as a policy: packed equals alone, draws share the backbone, robots keep apart, what is frozen stays."""

import pytest
import torch

from lightning_embodied.errors import ConfigError
from lightning_embodied.models import GrootN15Policy, load_policy
from lightning_embodied.models.groot import GrootSizes
from lightning_embodied.packing import VarlenPackingCollator
from tests.models.conftest import ACTION, CAMERAS, HORIZON, make_samples, make_spec, make_trainer, observations_of
from tests.models.groot.policies import SIZES, GrootData, make_arguments, make_collator, make_encoder, make_policy

WIDTH = SIZES["head"]["max_action_dim"]


@pytest.fixture
def policy():
    return make_policy(tune_llm=True)


def draws(count, repeats=1):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(count, repeats, HORIZON, WIDTH, generator=generator)
    return noise, torch.rand(count, repeats, generator=generator)


def gradients(policy, total):
    policy.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-5 * max(1.0, float(value.abs().max())), name


def test_packed_equals_one_sample_at_a_time(policy):
    collate, samples = make_collator(), make_samples(9)
    noise, time = draws(9)
    packed = policy(collate(samples), noise, time)
    alone = [policy(collate([sample]), noise[i : i + 1], time[i : i + 1]) for i, sample in enumerate(samples)]
    total, count = sum(terms.total for terms in alone), sum(terms.count for terms in alone)
    assert packed.count == count
    assert torch.allclose(packed.total, total, rtol=1e-5)
    assert_same_gradients(gradients(policy, packed.total / count), gradients(policy, total / count))


def test_draws_share_one_backbone_pass(policy):
    batch = make_collator()(make_samples(5))
    noise, time = draws(5, 3)
    shared = policy(batch, noise, time)
    separate = [policy(batch, noise[:, r : r + 1], time[:, r : r + 1]) for r in range(3)]
    total, count = sum(terms.total for terms in separate), sum(terms.count for terms in separate)
    assert shared.count == count
    assert_same_gradients(gradients(policy, shared.total / count), gradients(policy, total / count))


@pytest.mark.parametrize("longer", [False, True])
def test_samples_do_not_see_each_other(policy, longer):
    collate, samples = make_collator(), make_samples(6)
    noise = torch.randn(6, HORIZON, WIDTH)
    before = policy.sample_actions(collate(samples), noise=noise)
    samples[2] = {**samples[2], "observation.state": samples[2]["observation.state"] + 1,
                  CAMERAS[1]: 255 - samples[2][CAMERAS[1]]}  # fmt: skip
    if longer:
        samples[2]["task"] += " and push it on and on"
    after = policy.sample_actions(collate(samples), noise=noise)
    others = [0, 1, 3, 4, 5]
    if longer:  # the others' rows lie elsewhere in the matrices, which may be summed in another order
        torch.testing.assert_close(before[others], after[others], rtol=0, atol=1e-6)
    else:
        assert torch.equal(before[others], after[others])
    assert not torch.allclose(before[2], after[2], atol=1e-3)


def test_pictures_instruction_and_state_matter(policy):
    sample = make_samples(4)[3]
    noise = torch.randn(1, HORIZON, WIDTH)
    collate = make_collator()
    before = policy.sample_actions(collate([sample]), noise=noise)
    changes = (
        {CAMERAS[1]: 255 - sample[CAMERAS[1]]},
        {"task": "push"},
        {"observation.state": sample["observation.state"] + 1},
    )
    for change in changes:
        assert not torch.allclose(policy.sample_actions(collate([{**sample, **change}]), noise=noise), before)
    lacking = {key: value for key, value in sample.items() if key != CAMERAS[1]}
    assert not torch.allclose(policy.sample_actions(collate([lacking]), noise=noise), before)


def test_every_parameter_takes_part_even_without_pictures(policy):
    samples = make_samples(8)
    names = dict(policy.named_parameters()).keys()
    found = gradients(policy, policy(make_collator()(samples)).total)
    assert found.keys() == names
    untouched = {name for name, gradient in found.items() if not gradient.any()}
    assert all(name.endswith("to_k.bias") for name in untouched)
    without = [sample for sample in samples if not any(camera in sample for camera in CAMERAS)]
    assert gradients(policy, policy(make_collator()(without)).total).keys() == names


def test_adapters_that_nothing_reads_do_not_train():
    sizes = {**SIZES, "vision": {**SIZES["vision"], "vision_use_head": True}}
    policy = make_policy(sizes=sizes, lora={"target_modules": ["*"], "also_train": ["model.action_head.vlln.*"]})
    found = gradients(policy, policy(make_collator()(make_samples(4))).total)
    assert found.keys() == {name for name, p in policy.named_parameters() if p.requires_grad}
    assert any("vision_model" in name for name in found)


PARTS = {
    "tune_llm": ("backbone.eagle_model.language_model.",),
    "tune_visual": ("backbone.eagle_model.vision_model.", "backbone.eagle_model.mlp1."),
    "tune_projector": tuple(f"action_head.{part}." for part in ("state_encoder", "action_encoder", "action_decoder",
                                                                "position_embedding")),
    "tune_diffusion_model": ("action_head.model.",),
}  # fmt: skip


@pytest.mark.parametrize("flag", PARTS)
def test_what_is_not_tuned_stays(flag):
    flags = {name: name != flag for name in PARTS}
    policy = GrootN15Policy(**make_arguments(**flags, learning_rate=0.01))
    data = GrootData(make_samples(8), 4)
    policy.spec = make_spec(encoder=make_encoder().to_config())
    policy.configure_model()
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    make_trainer(max_steps=2, limit_val_batches=0).fit(policy, datamodule=data)
    for name, value in policy.model.state_dict().items():
        frozen = name.startswith(PARTS[flag])
        if frozen:
            assert torch.equal(value, before[name]), name
    assert {n for n, p in policy.model.named_parameters() if not p.requires_grad} == {
        n for n, _ in policy.model.named_parameters() if n.startswith(PARTS[flag])
    }
    policy.train()
    assert policy.model.action_head.model.training == (flag != "tune_diffusion_model")
    assert policy.model.action_head.vl_self_attention.training


def test_the_published_defaults_freeze_the_language_model_alone():
    frozen = {name for name, p in make_policy().model.named_parameters() if not p.requires_grad}
    assert frozen
    assert all(name.startswith("backbone.eagle_model.language_model.") for name in frozen)


def test_dropout_only_in_training():
    policy, batch = make_policy(), make_collator()(make_samples(4))
    noise, time = draws(4)
    assert torch.equal(policy(batch, noise, time).total, policy(batch, noise, time).total)
    policy.train()
    assert not torch.equal(policy(batch, noise, time).total, policy(batch, noise, time).total)


def test_each_dataset_of_a_mixture_is_its_own_robot():
    samples = [{**sample, "dataset": index % 2} for index, sample in enumerate(make_samples(6))]
    noise = torch.randn(6, HORIZON, WIDTH)
    batch = make_collator()(samples)
    mixed = make_policy(embodiment_id=[2, 0]).sample_actions(batch, noise=noise)
    for dataset, robot in enumerate((2, 0)):
        alone = make_policy(embodiment_id=robot).sample_actions(batch, noise=noise)
        assert torch.allclose(mixed[dataset::2], alone[dataset::2], atol=1e-5)
        assert not torch.allclose(mixed[1 - dataset :: 2], alone[1 - dataset :: 2], atol=1e-3)


@pytest.mark.parametrize("parts", [["vision"], ["language"], ["head"], ["vision", "language", "head"]])
def test_recomputing_activations_changes_no_gradient(parts):
    batch, (noise, time) = make_collator()(make_samples(5)), draws(5)
    plain = make_policy(tune_llm=True)
    recomputing = make_policy(tune_llm=True, activation_checkpointing=parts)
    eagle = recomputing.model.backbone.eagle_model
    layers = {
        "vision": eagle.vision_model.vision_model.encoder.layers,
        "language": eagle.language_model.model.layers,
        "head": recomputing.model.action_head.model.transformer_blocks,
    }
    runs = dict.fromkeys(layers, 0)
    for part, those in layers.items():
        for layer in those:
            layer.register_forward_pre_hook(lambda *_, part=part: runs.update({part: runs[part] + 1}))
    expected = gradients(plain, plain(batch, noise, time).total)
    assert_same_gradients(gradients(recomputing, recomputing(batch, noise, time).total), expected)
    assert runs == {part: len(those) * (2 if part in parts else 1) for part, those in layers.items()}


def test_only_dimensions_of_the_data_count():
    policy, batch = make_policy(), make_collator()(make_samples(4))
    terms = policy(batch)
    valid = int((~batch.action_is_pad).sum())
    assert int(terms.count) == valid * ACTION
    head = policy.model.action_head
    with torch.no_grad():
        noise, time = draws(4)
        before = policy(batch, noise, time).total
        head.action_decoder.layer2.b[:, ACTION:] += 10.0
        assert torch.equal(policy(batch, noise, time).total, before)


def test_learns_actions_that_the_state_decides():
    samples = make_samples(64)[::4]  # those without pictures
    for sample in samples:
        sample["action"] = (sample["observation.state"][:ACTION] * 0.2 - 1.4).expand(HORIZON, ACTION).clone()
        sample["action_is_pad"] = torch.zeros(HORIZON, dtype=torch.bool)
    torch.manual_seed(0)
    policy = GrootN15Policy(**make_arguments(learning_rate=5e-3, noise_samples_per_observation=4, denoising_steps=10))
    data = GrootData(samples, 16)
    data.collator = VarlenPackingCollator(make_encoder(prompt="pi0"))
    make_trainer(max_epochs=120, gradient_clip_val=1.0, limit_val_batches=0).fit(policy, datamodule=data)
    policy.eval()
    with torch.no_grad():
        batch = data.collator(samples)
        predicted = policy.action_normalizer.unnormalize(policy.sample_actions(batch))
    error = (predicted - batch.actions).square().mean()
    assert error < 0.25 * batch.actions.var(), (error, batch.actions.var())


@pytest.mark.parametrize(("precision", "weights"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_half_precision(precision, weights):
    policy = GrootN15Policy(**make_arguments(tune_llm=True))
    trainer = make_trainer(max_steps=2, precision=precision, limit_val_batches=1, val_check_interval=1)
    trainer.fit(policy, datamodule=GrootData(make_samples(8), 4))
    assert torch.isfinite(trainer.callback_metrics["train/loss"])
    assert {p.dtype for p in policy.parameters()} == {weights}
    assert all(torch.isfinite(p).all() for p in policy.parameters())


def test_half_precision_is_near_full_precision(policy):
    batch, (noise, time) = make_collator()(make_samples(5)), draws(5)
    expected = policy(batch, noise, time).mean
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = policy(batch, noise, time).mean
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)
    assert found != expected


def test_a_checkpoint_acts_the_same(tmp_path):
    policy = GrootN15Policy(**make_arguments())
    trainer = make_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(policy, datamodule=GrootData(make_samples(8), 4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    observations = observations_of(make_samples(8)[3::4])
    policy.eval()
    loaded = load_policy(tmp_path / "a.ckpt")
    assert torch.equal(loaded.predict_action_chunk(observations), policy.predict_action_chunk(observations))
    assert loaded.predict_action_chunk(observations).shape == (2, HORIZON, ACTION)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embodiment_id": 3}, "embodiment_id"),
        ({"embodiment_id": []}, "embodiment_id"),
        ({"denoising_steps": 0}, "denoising_steps"),
        ({"activation_checkpointing": ["backbone"]}, "activation_checkpointing"),
        ({"preset": "huge"}, "preset"),
        ({"sizes": {"language": {"hidden_size": 32}}}, "hidden_size"),
        ({"sizes": {"vision": {"num_attention_heads": 5}}}, "vision.hidden_size"),
        ({"sizes": {"vision": {"depth": 5}}}, "sizes.vision.depth"),
        ({"sizes": {"head": {"diffusion_model": {"num_layers": 0}}}}, "num_layers"),
        ({"sizes": {"head": {"diffusion_model": 3}}}, "diffusion_model"),
    ],
)
def test_arguments_that_cannot_be_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        GrootN15Policy(**make_arguments(**arguments))


@pytest.mark.parametrize(
    ("encoder", "sizes", "message"),
    [
        ({"prompt": "instruction"}, {}, "prompt"),
        ({"image_size": (32, 32)}, {}, "image_size"),
        ({}, {"language": {"vocab_size": 999}}, "vocab_size"),
        ({}, {"head": {"max_action_dim": ACTION - 1}}, "max_action_dim"),
        ({}, {"head": {"max_state_dim": 4}}, "max_state_dim"),
        ({}, {"head": {"max_seq_len": HORIZON - 1}}, "max_seq_len"),
    ],
)
def test_data_that_do_not_fit_are_named(encoder, sizes, message):
    merged = {part: {**SIZES[part], **sizes.get(part, {})} for part in SIZES}
    policy = GrootN15Policy(**make_arguments(sizes=merged))
    policy.spec = make_spec(encoder=make_encoder(**encoder).to_config())
    with pytest.raises(ConfigError, match=message):
        policy.configure_model()


def test_published_sizes():
    with torch.device("meta"):
        policy = GrootN15Policy()
        policy.use_network()
    assert policy.network_sizes == GrootSizes()
    assert sum(p.numel() for p in policy.parameters()) == 1_068_806_144 + 1_344_716_736
