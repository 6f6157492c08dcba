"""pi0 and pi0.5 in training: packing, shared prefixes, caches, freezing, recomputation, bf16, ranks, and YAML."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_embodied.cli import main
from lightning_embodied.data import LeRobotDataset
from lightning_embodied.models import euler_sample, load_policy
from lightning_embodied.packing import SampleEncoder, VarlenPackingCollator, pack_samples
from tests.models.conftest import make_trainer
from tests.models.pi_golden import CLASSES, Golden
from tests.strategies.ranks import run_ranks

DATASET = Path(__file__).parents[1] / "fixtures" / "lerobot_v30_image" / "dataset"


@pytest.fixture(scope="module", params=CLASSES)
def golden(request) -> Golden:
    return Golden(request.param)


def draws(repeats: int = 1, samples: int = 4):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(samples, repeats, 10, 8, generator=generator)
    return noise, torch.rand(samples, repeats, generator=generator)


def gradients(policy, total):
    policy.zero_grad()
    total.backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}


def assert_same(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= tolerance * max(1.0, float(value.abs().max())), name


def test_packed_equals_one_sample_at_a_time(golden):
    policy, (noise, time) = golden.policy(), draws()
    packed = policy(golden.batch(policy, "mixed"), noise, time)
    found = gradients(policy, packed.total)
    alone = [policy(golden.batch(policy, "mixed", [i]), noise[i : i + 1], time[i : i + 1]) for i in range(4)]
    total = sum(terms.total for terms in alone)
    torch.testing.assert_close(packed.total, total, rtol=1e-5, atol=0)
    assert packed.count == sum(terms.count for terms in alone)
    assert_same(found, gradients(policy, total))


@pytest.mark.parametrize("repeats", [2, 4])
def test_shared_prefix_equals_separate_passes(golden, repeats):
    policy, (noise, time) = golden.policy(noise_samples_per_observation=repeats), draws(repeats)
    batch = golden.batch(policy, "mixed")
    shared = policy(batch, noise, time)
    found = gradients(policy, shared.total / shared.count)
    separate = [policy(batch, noise[:, r : r + 1], time[:, r : r + 1]) for r in range(repeats)]
    total, count = sum(terms.total for terms in separate), sum(terms.count for terms in separate)
    assert shared.count == count
    torch.testing.assert_close(shared.total, total, rtol=1e-5, atol=0)
    assert_same(found, gradients(policy, total / count))
    assert policy(batch).count == count


def test_the_prefix_is_computed_once_whatever_the_draws(golden):
    policy, (noise, time) = golden.policy(noise_samples_per_observation=4), draws(4)
    batch, tokens = golden.batch(policy, "mixed"), []
    policy.model.language.layers[0].mlp.register_forward_hook(lambda _, inputs, out: tokens.append(len(inputs[0])))
    policy.model.vision.register_forward_hook(lambda _, inputs, out: tokens.append(len(inputs[0])))
    policy(batch, noise, time)
    pictures = int(golden.present("mixed").sum())
    assert tokens == [pictures, 4 * pictures + int(golden["token_mask"].sum())]
    tokens.clear()
    policy.sample_actions(batch)
    assert len(tokens) == 2


def test_denoising_with_the_cache_equals_recomputation(golden):
    policy, noise = golden.policy(), golden["initial_noise"]
    batch = golden.batch(policy, "mixed")
    state = policy.padded_state(batch)

    def recompute(x, t):
        return policy.velocity(policy.encode_prefix(batch), state, x[:, None], t[:, None])[:, 0]

    with torch.no_grad():
        expected = euler_sample(recompute, noise, 10)[..., :5]
        torch.testing.assert_close(policy.sample_actions(batch, noise=noise), expected, rtol=0, atol=1e-5)


def test_samples_do_not_see_each_other(golden):
    policy, noise = golden.policy(), golden["initial_noise"]
    samples = [golden.sample(policy, "mixed", i) for i in range(4)]
    before = policy.sample_actions(pack_samples(samples), noise=noise)
    changed = copy.copy(samples[2])
    object.__setattr__(changed, "pixel_values", 255 - samples[2].pixel_values)
    object.__setattr__(changed, "state", samples[2].state + 1)
    after = policy.sample_actions(pack_samples([*samples[:2], changed, samples[3]]), noise=noise)
    others = [0, 1, 3]
    assert torch.equal(before[others], after[others])
    assert not torch.allclose(before[2], after[2])


@pytest.mark.parametrize("towers", [["vision"], ["language"], ["expert"], ["vision", "language", "expert"]])
def test_recomputed_activations_give_the_same_gradients(golden, towers):
    (noise, time), plain = draws(2), golden.policy(noise_samples_per_observation=2)
    batch = golden.batch(plain, "mixed")
    expected = gradients(plain, plain(batch, noise, time).total)
    policy = golden.policy(noise_samples_per_observation=2, activation_checkpointing=towers)
    layers = {
        "vision": policy.model.vision.vision_model.encoder.layers,
        "language": policy.model.language.layers[:-1],
        "expert": policy.model.expert.layers,
    }
    runs = dict.fromkeys(layers, 0)
    for tower, those in layers.items():
        for layer in those:
            layer.register_forward_pre_hook(lambda *_, tower=tower: runs.update({tower: runs[tower] + 1}))
    assert_same(gradients(policy, policy(batch, noise, time).total), expected, 1e-6)
    assert runs == {tower: len(those) * (2 if tower in towers else 1) for tower, those in layers.items()}


def test_learns(golden):
    torch.manual_seed(0)
    policy, (noise, time) = golden.policy(learning_rate=1e-2, noise_samples_per_observation=4), draws(4)
    before = float(policy(golden.batch(policy, "mixed"), noise, time).mean)
    make_trainer(max_steps=100, gradient_clip_val=1.0).fit(policy, train_dataloaders=loader(golden, policy, 400))
    assert float(policy(golden.batch(policy, "mixed"), noise, time).mean) < 0.6 * before


class Samples(Dataset):
    """The golden samples over and over."""

    def __init__(self, golden, policy, length):
        self.samples = [golden.sample(policy, "mixed", i) for i in range(4)]
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.samples[index % 4]


def loader(golden, policy, length=12):
    return DataLoader(Samples(golden, policy, length), batch_size=4, collate_fn=pack_samples)


FROZEN = {"nothing": (), "vision": ("vision_tower",), "prefix": (".paligemma.",)}


@pytest.mark.parametrize("freeze", FROZEN)
def test_frozen_parts_stay_and_the_others_learn(golden, freeze):
    policy = golden.policy(freeze=freeze, learning_rate=1e-2)
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    trainer = make_trainer(max_steps=3)
    trainer.fit(policy, train_dataloaders=loader(golden, policy))
    changed = {name for name, value in policy.model.state_dict().items() if not torch.equal(value, before[name])}
    unread = set(policy.model.unread_parameters)
    still = {name for name in before if any(part in f".{name}" for part in FROZEN[freeze])} | unread
    assert changed == before.keys() - still
    trained = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert len(trained) == len(changed)


def test_adapters_train_where_somebody_reads_them(golden, tmp_path):
    policy = golden.policy(lora={"target_modules": ["*.q_proj", "*.v_proj", "*.down_proj"], "rank": 2})
    terms = policy(golden.batch(policy, "mixed"), *draws())
    found = gradients(policy, terms.total)
    assert found.keys() == {name for name, p in policy.named_parameters() if p.requires_grad}
    assert any("language_model.layers.0.self_attn.q_proj.lora_a" in name for name in found)
    assert any("language_model.layers.1.self_attn.v_proj.lora_a" in name for name in found)
    assert not any("language_model.layers.1.self_attn.q_proj" in name for name in found)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01)
    policy.save_pretrained(tmp_path)
    again = CLASSES[golden.name].from_pretrained(tmp_path, spec=golden.spec())
    torch.testing.assert_close(
        again(golden.batch(policy, "mixed"), *draws()).total, policy(golden.batch(policy, "mixed"), *draws()).total
    )


def test_a_frozen_prefix_keeps_no_activations(golden):
    policy = golden.policy(freeze="prefix")
    assert not any(value.requires_grad for pair in policy.encode_prefix(golden.batch(policy, "mixed")).cache
                   for value in pair)  # fmt: skip


def test_a_batch_without_pictures_uses_every_parameter(golden):
    policy, (noise, time) = golden.policy(), draws()
    samples = [golden.sample(policy, "mixed", i) for i in range(4)]
    for sample in samples:
        words = sample.input_ids != policy.encoder.image_token_id
        object.__setattr__(sample, "input_ids", sample.input_ids[words])
        object.__setattr__(sample, "pixel_values", sample.pixel_values[:0])
    found = gradients(policy, policy(pack_samples(samples), noise, time).total)
    assert found.keys() == {name for name, p in policy.named_parameters() if p.requires_grad}
    vision = [value for name, value in found.items() if "vision_tower" in name]
    assert not any(value.any() for value in vision)


def test_half_precision_keeps_weights_norms_and_time_in_float32(golden):
    policy = golden.policy(learning_rate=1e-3)
    dtypes = {}

    def note(name):
        return lambda module, inputs, output: dtypes.update({name: (inputs[0].dtype, output[0].dtype)})

    expert = policy.model.expert.layers[0]
    modules = {"q": expert.self_attn.q_proj, "prefix layer": policy.model.language.layers[0],
               "actions": policy.model.action_in_proj, "velocity": policy.model.action_out_proj}  # fmt: skip
    time = policy.model.time_mlp_in if policy.adaptive else policy.model.action_time_mlp_in
    for name, module in {**modules, "time": time}.items():
        module.register_forward_hook(note(name))
    trainer = make_trainer(max_steps=2, precision="bf16-mixed")
    trainer.fit(policy, train_dataloaders=loader(golden, policy))
    half, full = (torch.bfloat16,) * 2, (torch.float32,) * 2
    assert dtypes == {"q": half, "prefix layer": half, "actions": full, "velocity": full, "time": full}
    assert all(parameter.dtype == torch.float32 for parameter in policy.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in policy.parameters())


def test_weights_in_half_precision_train_too(golden):
    policy = golden.policy(learning_rate=1e-3)
    before = policy.model.action_out_proj.weight.clone()
    make_trainer(max_steps=2, precision="bf16-true").fit(policy, train_dataloaders=loader(golden, policy))
    after = policy.model.action_out_proj.weight
    assert after.dtype == torch.bfloat16
    assert not torch.equal(after, before.bfloat16())
    assert all(torch.isfinite(parameter).all() for parameter in policy.parameters())


def test_half_precision_is_near_full_precision(golden):
    policy, (noise, time) = golden.policy(), draws(4)
    batch = golden.batch(policy, "mixed")
    expected = policy(batch, noise, time).mean
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = policy(batch, noise, time).mean
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)
    assert found != expected


def test_double_precision_says_how_exact_single_precision_is(golden):
    policy, (noise, time) = golden.policy(), draws(2)
    batch = golden.batch(policy, "mixed")
    found = gradients(policy, policy(batch, noise, time).total)
    exact = copy.deepcopy(policy).double()
    expected = gradients(exact, exact(batch, noise.double(), time.double()).total)
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-4 * value.norm() + 1e-5, name


def train_both(rank):
    """The weights of each policy after three steps."""
    states = {}
    for name in CLASSES:
        golden = Golden(name)
        policy = golden.policy(learning_rate=1e-3, activation_checkpointing=["language", "expert"])
        trainer = make_trainer(max_steps=3, strategy="ddp", devices=2, use_distributed_sampler=True)
        trainer.fit(policy, train_dataloaders=loader(golden, policy, 24))
        states[name] = policy.state_dict()
    return states


def test_other_data_is_read_by_the_quantiles_that_the_policy_knows():
    """Trained on with other statistics, pi0.5 would read one number in its prompts for two states."""
    golden = Golden("pi05")
    spec = golden.spec()
    encoder = SampleEncoder.from_config({**spec.encoder, "state_range": [[-9.0] * 4, [9.0] * 4]})
    data = SimpleNamespace(collator=VarlenPackingCollator(encoder), features=spec.features, action_horizon=10)
    spec.adopt(data)
    sample = {"task": "w1 w2", "observation.state": torch.full((4,), 0.5), "action": torch.zeros(10, 5)}
    assert torch.equal(data.collator.encoder.encode(sample).input_ids, golden.policy().encoder.encode(sample).input_ids)
    assert data.collator.encoder.to_config() == spec.encoder


@pytest.mark.slow
def test_two_ranks_train_without_looking_for_unused_parameters(tmp_path):
    ranks = run_ranks(2, train_both, tmp_path)
    for name in CLASSES:
        first, second = (states[name] for states in ranks)
        before = Golden(name).policy().state_dict()
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert any(not torch.equal(first[key], before[key]) for key in first)


@pytest.mark.parametrize("name", CLASSES)
def test_trains_from_yaml_and_its_checkpoint_acts(name, tmp_path):
    options = {
        "data.root": DATASET,
        "data.batch_size": 4,
        "data.val_episodes": 0,
        "data.collator.init_args.encoder.init_args.prompt": name,
        "model": CLASSES[name].__name__,
        "trainer.max_steps": 2,
        "trainer.precision": "bf16-mixed",
        "trainer.accelerator": "cpu",
        "trainer.default_root_dir": tmp_path / "run",
        "wandb": "disabled",
    }
    arguments = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    assert main(["fit", "--config", "configs/pi05.yaml", *arguments]) == 0
    policy = load_policy(tmp_path / "run")
    assert type(policy) is CLASSES[name]
    assert not policy.training
    sample = LeRobotDataset(str(DATASET))[0]
    observations = {key: sample[key][None] for key in policy.observation_keys if key != "task"}
    actions = policy.predict_action_chunk({**observations, "task": [sample["task"]]})
    assert actions.shape == (1, 8, 4)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("last.ckpt")
    more = [*arguments, "--trainer.max_steps=3", f"--ckpt_path={saved}"]  # `sizes` come from the YAML
    assert main(["fit", "--config", "configs/pi05.yaml", *more]) == 0
    assert torch.load(saved, weights_only=True)["global_step"] == 3
    without_wrist = {key: value for key, value in observations.items() if not key.endswith("wrist")}
    other = policy.predict_action_chunk({**without_wrist, "task": [sample["task"]]})
    assert not torch.allclose(actions, other)
