"""pi0 and pi0.5 against LeRobot's own runs: same weights in, same numbers out, for every set of cameras.

The tolerances are those of the fixtures' READMEs.
"""

import json

import numpy as np
import pytest
import torch

from lightning_embodied.features import FeatureStats
from lightning_embodied.models.normalizer import Normalizer
from lightning_embodied.models.pi import PiPolicy
from lightning_embodied.packing import PackedBatch, SampleEncoder, resize_with_pad
from tests.models.pi_golden import CAMERAS, CLASSES, COMBINATIONS, FIXTURES, Golden

combination = pytest.mark.parametrize("combination", COMBINATIONS)


@pytest.fixture(scope="module", params=CLASSES)
def golden(request) -> Golden:
    return Golden(request.param)


@pytest.fixture(scope="module")
def policy(golden) -> PiPolicy:
    return golden.policy()


def close(found, expected, *, rtol=0.0, atol=2e-5):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def velocity_of(policy: PiPolicy, golden: Golden, batch: PackedBatch, samples=slice(None)):
    """Velocity `[B, H, max_action_dim]` at the golden noise and time, and what the network should have said."""
    actions = torch.nn.functional.pad(batch.actions, (0, 3))
    noise, time = golden["noise"][samples], golden["time"][samples]
    noisy = time[:, None, None] * noise + (1 - time[:, None, None]) * actions
    prefix = policy.encode_prefix(batch)
    velocity = policy.velocity(prefix, policy.padded_state(batch), noisy[:, None], time[:, None])[:, 0]
    return velocity, noise - actions


def test_pictures(golden):
    for index, camera in enumerate(CAMERAS):
        found = resize_with_pad(golden["images"][:, index], (28, 28), "bilinear") * (2 / 255) - 1
        close(found, golden[f"preprocessed_images/{camera.split('.')[-1]}"], atol=1e-6)


@combination
def test_prefix_embeddings(golden, policy, combination):
    batch = golden.batch(policy, combination)
    found = policy.embed_prefix(batch).split(batch.cu_seqlens.diff().tolist())
    tokens = policy.encoder.tokens_per_image
    valid = torch.cat((golden.present(combination).repeat_interleave(tokens, dim=1), golden["token_mask"]), dim=1)
    for index, embeddings in enumerate(golden[f"{combination}/prefix_embeddings"]):
        close(found[index], embeddings[valid[index]])


@combination
def test_velocity_and_loss(golden, policy, combination):
    batch = golden.batch(policy, combination)
    velocity, target = velocity_of(policy, golden, batch)
    close(velocity, golden[f"{combination}/v_t"])
    loss = (velocity - target).square()
    close(loss, golden[f"{combination}/loss"], rtol=1e-5, atol=1e-4)
    terms = policy(batch, golden["noise"][:, None], golden["time"][:, None])
    close(terms.mean, golden[f"{combination}/loss"][..., :5].mean(), rtol=1e-5, atol=1e-4)
    if combination != "mixed":
        close(terms.mean, golden[f"{combination}/policy_loss"][0], rtol=1e-5, atol=1e-4)
        close(loss[..., :5].mean((1, 2)), golden[f"{combination}/policy_loss_per_sample"], rtol=1e-5, atol=1e-4)


@combination
def test_sample_by_sample(golden, policy, combination):
    for index in range(4):
        batch = golden.batch(policy, combination, [index])
        velocity, _ = velocity_of(policy, golden, batch, slice(index, index + 1))
        close(velocity[0], golden[f"{combination}/v_t"][index])


def test_gradient_norms(golden):
    policy = golden.policy()
    terms = policy(golden.batch(policy, "cameras_3"), golden["noise"][:, None], golden["time"][:, None])
    (terms.total / terms.count).backward()
    gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
    norms = [gradients[name].norm() if gradients[name] is not None else torch.zeros(())
             for name in golden.config["gradient_norm_names"]]  # fmt: skip
    close(torch.stack(norms), golden["cameras_3/gradient_norms"], rtol=1e-4, atol=1e-6)
    without = {name for name, gradient in gradients.items() if gradient is None}
    heads = {name for name in golden.config["parameters_without_gradient"] if "lm_head" in name}
    # of the last layer LeRobot also computes queries, whose gradient is exactly 0
    query = f"model.{policy.model.unread_parameters[0]}"
    assert query.endswith(".self_attn.q_proj.weight")
    assert golden["cameras_3/gradient_norms"][golden.config["gradient_norm_names"].index(query)] == 0
    assert without == {*golden.config["parameters_without_gradient"], query} - heads
    assert without == {f"model.{name}" for name in policy.model.unread_parameters}


@combination
def test_sampled_actions(golden, policy, combination):
    batch, velocities = golden.batch(policy, combination), []
    kept = policy.model.velocity
    policy.model.velocity = lambda *arguments: velocities.append(kept(*arguments)) or velocities[-1]
    try:
        with torch.no_grad():
            actions = policy.sample_actions(batch, noise=golden["initial_noise"])
    finally:
        del policy.model.velocity
    close(actions, golden[f"{combination}/sampled_actions"][..., :5])
    back = batch.cu_seqlens.diff().sort(stable=True).indices.argsort()
    assert len(velocities) == 10
    close(velocities[0][back], golden[f"{combination}/first_step_velocity"])
    close(velocities[-1][back], golden[f"{combination}/last_step_velocity"])


def test_the_last_prefix_layer_is_cut_to_what_is_read(golden, policy):
    last = policy.model.language.layers[-1]
    calls = []
    handles = [m.register_forward_hook(lambda m, *_: calls.append(m)) for m in last.modules()]
    policy.encode_prefix(golden.batch(policy, "mixed"))
    for handle in handles:
        handle.remove()
    assert last.self_attn.k_proj in calls
    assert last.self_attn.v_proj in calls
    assert last.self_attn.q_proj not in calls
    assert last.mlp not in calls


PROCESSING = json.loads((FIXTURES / "pi05" / "processing.json").read_text())


def lerobot_stats() -> FeatureStats:
    low, high = np.array(PROCESSING["q01"]), np.array(PROCESSING["q99"])
    raw = np.array(PROCESSING["raw_state"])
    return FeatureStats(
        min=raw.min(0), max=raw.max(0), mean=raw.mean(0), std=raw.std(0),
        q01=low, q10=low, q50=low, q90=high, q99=high, count=len(raw),
    )  # fmt: skip


def test_normalisation_is_lerobots():
    normalizer = Normalizer([lerobot_stats()], "lerobot_quantile")
    raw, expected = torch.tensor(PROCESSING["raw_state"]), torch.tensor(PROCESSING["normalized_state"])
    close(normalizer.normalize(raw), expected, rtol=1e-5, atol=1e-6)
    close(normalizer.normalize(raw), torch.tensor(PROCESSING["normalized_action"]), rtol=1e-5, atol=1e-6)
    close(normalizer.unnormalize(expected), torch.tensor(PROCESSING["unnormalized_action"]), rtol=1e-5, atol=1e-6)


def test_mean_and_deviation_are_lerobots():
    normalizer = Normalizer([lerobot_stats()], "lerobot_mean_std")
    stats, raw = lerobot_stats(), torch.tensor(PROCESSING["raw_state"])
    expected = (raw.double().numpy() - stats.mean) / (stats.std + 1e-8)
    close(normalizer.normalize(raw).double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6)
    close(normalizer.unnormalize(normalizer.normalize(raw)), raw, atol=1e-6)


def test_prompts_are_lerobots():
    encoder = SampleEncoder(prompt="pi05", max_instruction_tokens=200)
    encoder.use_statistics({"observation.state": lerobot_stats()})
    for task, state, prompt in zip(PROCESSING["tasks"], PROCESSING["raw_state"], PROCESSING["prompts"], strict=True):
        sample = {"task": task, "observation.state": torch.tensor(state), "action": torch.zeros(1, 1)}
        plain = SampleEncoder(state_keys=(), max_instruction_tokens=200).encode({**sample, "task": prompt})
        assert torch.equal(encoder.encode(sample).input_ids, plain.input_ids), prompt
