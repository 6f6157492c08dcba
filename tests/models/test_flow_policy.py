"""The small policy: packed equals per sample, cached equals recomputed, shared prefix equals separate passes."""

import pytest
import torch

from lightning_embodied.errors import ConfigError
from lightning_embodied.models import FlowMatchingPolicy, euler_sample
from tests.models.conftest import ACTION, CAMERAS, HORIZON, make_collator, make_policy, make_samples, observations_of


def gradients(policy, total):
    policy.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def draws(samples, repeats=1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(samples, repeats, HORIZON, ACTION, generator=generator)
    return noise, torch.rand(samples, repeats, generator=generator)


def assert_same_gradients(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= tolerance * max(1.0, float(value.abs().max())), name


def test_packed_equals_one_sample_at_a_time(policy):
    collate, samples = make_collator(), make_samples(9)
    noise, time = draws(9)
    packed = policy(collate(samples), noise, time)
    alone = [policy(collate([sample]), noise[i : i + 1], time[i : i + 1]) for i, sample in enumerate(samples)]
    total, count = sum(terms.total for terms in alone), sum(terms.count for terms in alone)
    assert packed.count == count
    assert torch.allclose(packed.total / packed.count, total / count, rtol=1e-5)
    assert_same_gradients(gradients(policy, packed.total / packed.count), gradients(policy, total / count))


def test_every_parameter_learns(policy):
    noise, time = draws(8)
    found = gradients(policy, policy(make_collator()(make_samples(8)), noise, time).total)
    assert found.keys() == dict(policy.named_parameters()).keys()
    assert all(bool(g.abs().max() > 0) for g in found.values()), [n for n, g in found.items() if not g.abs().max() > 0]


def test_every_parameter_takes_part_even_without_pictures(policy):
    samples = [sample for sample in make_samples(8) if not any(camera in sample for camera in CAMERAS)]
    found = gradients(policy, policy(make_collator()(samples)).total)  # else ranks would wait for each other forever
    assert found.keys() == dict(policy.named_parameters()).keys()


def test_samples_do_not_see_each_other(policy):
    collate, samples = make_collator(), make_samples(6)
    noise = torch.randn(6, HORIZON, ACTION)
    before = policy.sample_actions(collate(samples), noise=noise)
    samples[2] = {**samples[2], "observation.state": samples[2]["observation.state"] + 1}
    after = policy.sample_actions(collate(samples), noise=noise)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(before[others], after[others])
    assert not torch.allclose(before[2], after[2])


@pytest.mark.parametrize("repeats", [2, 4])
def test_shared_prefix_equals_separate_passes(repeats):
    policy = make_policy(noise_samples_per_observation=repeats)
    batch = make_collator()(make_samples(7))
    noise, time = draws(7, repeats)
    shared = policy(batch, noise, time)
    separate = [policy(batch, noise[:, r : r + 1], time[:, r : r + 1]) for r in range(repeats)]
    total, count = sum(terms.total for terms in separate), sum(terms.count for terms in separate)
    assert shared.count == count
    assert torch.allclose(shared.total, total, rtol=1e-5)
    assert_same_gradients(gradients(policy, shared.total / count), gradients(policy, total / count))


def test_sampling_with_cache_equals_recomputation(policy):
    batch = make_collator()(make_samples(5))
    noise = torch.randn(5, HORIZON, ACTION)

    def recompute(x, t):
        return policy.velocity(policy.encode_prefix(batch), x[:, None], t[:, None])[:, 0]

    with torch.no_grad():
        expected = euler_sample(recompute, noise, policy.denoising_steps)
        found = policy.sample_actions(batch, noise=noise)
    assert torch.allclose(found, expected, atol=1e-5)


def test_the_prefix_is_the_same_for_all_actions(policy):
    batch = make_collator()(make_samples(4))
    noise, time = draws(4)
    prefix = policy.encode_prefix(batch)
    before = [value.clone() for pair in prefix.cache for value in pair]
    first = policy.velocity(prefix, noise, time)
    assert not torch.allclose(first, policy.velocity(prefix, noise + 1, time))
    assert torch.equal(first, policy.velocity(prefix, noise, time))
    assert all(torch.equal(a, b) for a, b in zip(before, [v for pair in prefix.cache for v in pair], strict=True))


def test_camera_identity_matters(policy):
    sample = make_samples(2)[1]
    front, wrist = CAMERAS
    other = {key: value for key, value in sample.items() if key != front} | {wrist: sample[front]}
    noise = torch.randn(1, HORIZON, ACTION)
    collate = make_collator()
    a, b = (policy.sample_actions(collate([s]), noise=noise) for s in (sample, other))
    assert not torch.allclose(a, b)


def test_acting_is_a_function_of_the_observation(policy):
    samples = [s for s in make_samples(16) if all(camera in s for camera in CAMERAS)]
    together = policy.predict_action_chunk(observations_of(samples))
    assert together.shape == (4, HORIZON, ACTION)
    assert together.dtype == torch.float32
    alone = torch.cat([policy.predict_action_chunk(observations_of([sample])) for sample in samples])
    assert torch.allclose(together, alone, atol=1e-5)


def test_generator_decides_the_noise():
    policy = make_policy(sampling_seed=None)
    observations = observations_of(make_samples(4)[3:])
    first, again, other = (
        policy.predict_action_chunk(observations, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_a_generator_for_each_row_makes_rows_independent(policy):
    observations = observations_of([make_samples(4)[3]] * 3)
    rows = [torch.Generator().manual_seed(seed) for seed in (1, 2, 1)]
    first, second, third = policy.predict_action_chunk(observations, generator=rows)
    assert torch.allclose(first, third, atol=1e-5)
    assert not torch.allclose(first, second)


def test_every_row_needs_its_generator(policy):
    with pytest.raises(ConfigError, match="1 generators"):
        policy.predict_action_chunk(observations_of([make_samples(4)[3]] * 2), generator=[torch.Generator()])


def test_missing_camera_is_left_out_not_zeroed(policy):
    sample = make_samples(4)[3]
    both = policy.predict_action_chunk(observations_of([sample]))
    one = policy.predict_action_chunk(observations_of([sample], CAMERAS[:1]))
    black = policy.predict_action_chunk(observations_of([{**sample, CAMERAS[1]: torch.zeros_like(sample[CAMERAS[1]])}]))
    assert not torch.allclose(one, both)
    assert not torch.allclose(one, black)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda o: o.pop("observation.state"), "observation.state"),
        (lambda o: o.pop("task"), "task"),
        (lambda o: o.update(task="push"), "task"),
        (lambda o: o.update({"observation.images.top": o[CAMERAS[0]]}), "observation.images.top"),
        (lambda o: o.update({"observation.state": torch.zeros(3, 5)}), "observation.state"),
        (lambda o: o.update({"observation.state": torch.full((1, 5), float("nan"))}), "observation.state"),
        (lambda o: o.update({"observation.state": torch.zeros(1, 4)}), "observation.state"),
        (lambda o: o.update({CAMERAS[0]: torch.zeros(1, 16, 16, 3, dtype=torch.uint8)}), CAMERAS[0]),
        (lambda o: o.update({CAMERAS[0]: torch.zeros(1, 3, 16, 16)}), CAMERAS[0]),
        (lambda o: [o.pop(camera) for camera in CAMERAS], "observation.images"),
    ],
)
def test_wrong_observations_name_the_key(policy, change, key):
    observations = observations_of(make_samples(4)[3:])
    change(observations)
    with pytest.raises(ConfigError) as error:
        policy.predict_action_chunk(observations)
    assert key in str(error.value)


def test_needs_a_spec():
    with pytest.raises(ConfigError, match="does not know its data"):
        FlowMatchingPolicy().predict_action_chunk({})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("noise_samples_per_observation", 0),
        ("noise_samples_per_observation", 1.5),
        ("depth", 0),
        ("heads", 0),
        ("head_dim", 7),
        ("expert_width", 25),
        ("stem_channels", 0),
        ("learning_rate", -1.0),
        ("learning_rate", float("nan")),
        ("weight_decay", -0.1),
        ("warmup", 2.0),
        ("image_shift", -1),
    ],
)
def test_impossible_options_are_named(option, value):
    with pytest.raises(ConfigError, match=option):
        FlowMatchingPolicy(**{option: value})
