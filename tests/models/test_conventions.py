"""Flow conventions, adaptive norms, time embedding and rotary positions against openpi's formulas in float64."""

import math

import numpy as np
import torch

from lightning_embodied.models import euler_sample, interpolate, sample_time, velocity_target
from lightning_embodied.models.augmentation import mix_keys, random_shift
from lightning_embodied.models.layers import RotaryEmbedding, TimeConditioning, modulate, rotate, time_embedding


def test_time_embedding_is_openpis():
    time = torch.tensor([0.001, 0.3, 1.0])
    period = 4e-3 * (4.0 / 4e-3) ** np.linspace(0, 1, 8)
    angles = time.double().numpy()[:, None] / period * 2 * math.pi
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    assert np.abs(time_embedding(time, 16).numpy() - expected).max() < 1e-6


def test_time_conditioning_is_two_layers_with_silu():
    layer, time = TimeConditioning(8).double(), torch.tensor([0.25])
    w_in, b_in, w_out, b_out = (p.detach() for p in layer.parameters())
    silu = torch.nn.functional.silu
    expected = silu(silu(time_embedding(time, 8).double() @ w_in.T + b_in) @ w_out.T + b_out)
    assert torch.allclose(layer(time), expected)


def test_adaptive_norm_formula():
    x, scale, shift = torch.randn(3, 2, 4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(modulate(x, scale, shift), normed * (1 + scale) + shift, atol=1e-12)
    assert torch.allclose(
        modulate(x.float(), scale.float(), shift.float()).double(), normed * (1 + scale) + shift, atol=1e-5
    )


def test_rotary_scores_depend_on_distance_only():
    rotary = RotaryEmbedding(8)
    q, k = torch.randn(2, 1, 1, 8)
    scores = [
        float((rotate(q, rotary(torch.tensor([i]))) * rotate(k, rotary(torch.tensor([i - 3])))).sum())
        for i in (3, 10, 50)
    ]
    assert max(scores) - min(scores) < 1e-4
    assert torch.allclose(rotate(q, rotary(torch.tensor([0]))), q)
    angle = 5 * 10_000 ** (-2 / 8)  # second pair of a head of width 8 at position 5
    a, b = q[0, 0, 2:4].double().tolist()
    expected = torch.tensor([a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)])
    assert torch.allclose(rotate(q, rotary(torch.tensor([5])))[0, 0, 2:4].double(), expected.double(), atol=1e-6)


def test_path_and_target():
    actions, noise = torch.randn(2, 5, 4, 3)
    assert torch.equal(interpolate(actions, noise, torch.zeros(5)), actions)
    assert torch.equal(interpolate(actions, noise, torch.ones(5)), noise)
    time = torch.rand(5)
    step = interpolate(actions, noise, time + 1e-3) - interpolate(actions, noise, time)
    assert torch.allclose(step / 1e-3, velocity_target(actions, noise), atol=1e-2)


def test_euler_ends_at_the_actions_and_calls_at_falling_times():
    actions, noise = torch.randn(2, 5, 4, 3)
    times = []

    def velocity(x, t):
        times.append(float(t[0]))
        return noise - actions

    assert torch.allclose(euler_sample(velocity, noise, 10), actions, atol=1e-5)
    assert np.allclose(times, np.arange(1.0, 0.0, -0.1))


def test_times_are_beta_distributed():
    torch.manual_seed(0)
    times = sample_time((200_000,))
    assert float(times.min()) >= 0.001
    assert float(times.max()) <= 1.0
    mean, variance = 1.5 / 2.5, 1.5 / (2.5**2 * 3.5)
    assert abs(float(times.mean()) - (mean * 0.999 + 0.001)) < 2e-3
    assert abs(float(times.var()) - variance * 0.999**2) < 2e-3


def test_shift_is_pad_and_crop_and_a_function_of_the_key():
    pictures = torch.randint(0, 256, (50, 3, 9, 12), dtype=torch.uint8)
    keys = mix_keys(torch.arange(50), 7)
    shifted = random_shift(pictures, keys, 2)
    padded = torch.nn.functional.pad(pictures.float(), (2, 2, 2, 2), mode="replicate").byte()
    offsets = set()
    for picture, result in zip(padded, shifted, strict=True):
        crops = {(y, x) for y in range(5) for x in range(5) if torch.equal(picture[:, y : y + 9, x : x + 12], result)}
        assert crops
        offsets |= crops
    assert len(offsets) > 15
    assert torch.equal(random_shift(pictures[10:20], keys[10:20], 2), shifted[10:20])
    assert not torch.equal(random_shift(pictures, mix_keys(torch.arange(50), 8), 2), shifted)
