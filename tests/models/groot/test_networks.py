"""N1.5's action head and backbone against golden files that NVIDIA's own code wrote; names and shapes at full size.

NVIDIA's head ignores the mask of the backbone's padding. Packing padded tokens as if they were valid reproduces its
batch to the digit, gradients included; packing the valid ones reproduces every sample run alone.
"""

import json

import pytest
import torch

from lightning_embodied.models.flow_matching import euler_sample, interpolate
from lightning_embodied.models.groot.action_head import ActionHead, ActionHeadSizes
from lightning_embodied.models.groot.backbone import EagleBackbone
from lightning_embodied.models.groot.qwen3 import Qwen3Sizes
from lightning_embodied.models.siglip import SiglipConfig
from tests.models.groot.conftest import BACKBONE, HEAD, config, golden, rows_of

ATOL = 2e-5
LENGTHS = [13, 9, 5, 11]


def observe(head, data, lengths):
    features = torch.cat([rows[:length] for rows, length in zip(data["backbone_features"], lengths, strict=True)])
    return head.observe(features, rows_of(lengths), data["state"][:, 0], data["embodiment_id"])


def denoise(head, data, lengths, steps):
    """Sampled actions `[B, H, A]`."""
    observed = observe(head, data, lengths)

    def velocity(noisy, time):
        return head(observed, noisy, head.discretize(time))

    return euler_sample(velocity, data["initial_noise"][:, None], steps, noise_time=0)[:, 0]


def velocity_of(head, data, lengths):
    """Predicted and true velocities `[B, H, A]`."""
    noisy = interpolate(data["noise"], data["action"], data["time"])[:, None]
    timestep = head.discretize(data["time"])[:, None]
    return head(observe(head, data, lengths), noisy, timestep)[:, 0], data["action"] - data["noise"]


def loss_of(head, data, lengths):
    predicted, target = velocity_of(head, data, lengths)
    return ((predicted - target).square() * data["action_mask"]).sum() / data["action_mask"].sum()


def test_padding_taken_for_tokens_is_nvidias_batch(head):
    data, padded = golden(HEAD), [13] * 4
    features = head.features(data["backbone_features"].flatten(0, 1), rows_of(padded))
    assert torch.allclose(features, data["vl_features"].flatten(0, 1), atol=ATOL)
    assert torch.equal(head.discretize(data["time"]), data["time_discretized"])
    assert torch.allclose(velocity_of(head, data, padded)[0], data["predicted_velocity"], atol=ATOL)
    loss = loss_of(head, data, padded)
    assert torch.allclose(loss, data["loss"], rtol=1e-5)
    loss.backward()
    names = config(HEAD)["gradient_norm_names"]
    norms = torch.stack([head.get_parameter(name).grad.norm() for name in names])
    assert torch.allclose(norms, data["gradient_norms"], rtol=1e-4, atol=1e-6)  # a key bias has none but rounding
    assert {name for name, _ in head.named_parameters()} == set(names)


@pytest.mark.parametrize("steps", [4, 10])
def test_sampled_actions(head, steps):
    data = golden(HEAD)
    expected = data[f"sampled_actions_{steps}_steps"]
    assert torch.allclose(denoise(head, data, [13] * 4, steps), expected, atol=ATOL)
    observed = observe(head, data, [13] * 4)
    first = head(observed, data["initial_noise"][:, None], torch.zeros(4, 1, dtype=torch.int64))[:, 0]
    assert torch.allclose(first, data[f"first_step_velocity_{steps}_steps"], atol=ATOL)


def test_packed_samples_equal_those_run_alone_without_padding(head):
    data = golden(HEAD)
    predicted, target = velocity_of(head, data, LENGTHS)
    sampled = denoise(head, data, LENGTHS, 4)
    for sample in range(4):
        assert torch.allclose(predicted[sample], data[f"unpadded/{sample}/predicted_velocity"][0], atol=ATOL)
        assert torch.allclose(sampled[sample], data[f"unpadded/{sample}/sampled_actions_4_steps"][0], atol=ATOL)
        mask = data["action_mask"][sample]
        loss = ((predicted[sample] - target[sample]).square() * mask).sum() / mask.sum()
        assert torch.allclose(loss, data[f"unpadded/{sample}/loss"], rtol=1e-5)
    full = LENGTHS.index(13)  # the sample that has no padding is NVIDIA's in the batch as well
    assert torch.allclose(predicted[full], data["predicted_velocity"][full], atol=ATOL)


def test_draws_share_one_observation(head):
    data, generator = golden(HEAD), torch.Generator().manual_seed(0)
    noisy = torch.randn(4, 3, 8, 6, generator=generator)
    timestep = torch.randint(0, 1000, (4, 3), generator=generator)
    weights = torch.randn(4, 3, 8, 6, generator=generator)
    together = head(observe(head, data, LENGTHS), noisy, timestep)
    separate = torch.cat(
        [head(observe(head, data, LENGTHS), noisy[:, r : r + 1], timestep[:, r : r + 1]) for r in range(3)], dim=1
    )
    assert torch.allclose(together, separate, atol=ATOL)
    found = torch.autograd.grad((together * weights).sum(), list(head.parameters()))
    expected = torch.autograd.grad((separate * weights).sum(), list(head.parameters()))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5 * max(1.0, float(other.abs().max()))


def test_one_embodiment_for_all_equals_the_same_number_for_each(head):
    data = golden(HEAD)
    each = velocity_of(head, {**data, "embodiment_id": torch.full((4,), 2)}, LENGTHS)[0]
    assert torch.allclose(velocity_of(head, {**data, "embodiment_id": 2}, LENGTHS)[0], each, atol=1e-6)


def test_flow_times_are_the_buckets_that_nvidia_counts(head):
    for steps in range(1, 101):
        times = []
        euler_sample(lambda x, t, times=times: times.append(t) or x, torch.zeros(1, 1, 1), steps, noise_time=0)
        assert head.discretize(torch.cat(times)).tolist() == [int(step / steps * 1000) for step in range(steps)]


def test_flow_times_favour_noise(head):
    torch.manual_seed(0)
    times = head.sample_time((100_000,), torch.device("cpu"))
    assert float(times.max()) <= 1.0
    assert float(times.mean()) == pytest.approx(1 - 0.6 / 0.999, abs=2e-3)  # Beta(1.5, 1) has the mean 0.6


def test_backbone_features(backbone):
    data = golden(BACKBONE)
    valid = data["attention_mask"].bool()
    lengths = valid.sum(1).tolist()
    ids = data["input_ids"][valid]
    picture_rows = torch.nonzero(ids == config(BACKBONE)["image_token_index"])[:, 0]
    features = backbone(ids, data["pixel_values"], picture_rows, rows_of(lengths))
    for sample, found in enumerate(features.split(lengths)):
        assert torch.allclose(found, data[f"unpadded/{sample}/backbone_features"], atol=ATOL)
        assert torch.allclose(found, data["backbone_features"][sample][valid[sample]], atol=ATOL)
    pictures = backbone.eagle_model.mlp1(backbone.eagle_model.vision_model(data["pixel_values"]))
    assert torch.allclose(pictures, data["mlp1_output"], atol=ATOL)


def test_names_and_shapes_at_full_size():
    with torch.device("meta"):
        networks = {
            "action_head": ActionHead(ActionHeadSizes()),
            "backbone": EagleBackbone(SiglipConfig(), Qwen3Sizes()),
        }
    for name, network in networks.items():
        expected = json.loads((HEAD / f"full_size_{name}.json").read_text())["state_dict"]
        prefix = "" if name == "action_head" else "backbone."
        assert {prefix + key: list(value.shape) for key, value in network.state_dict().items()} == expected
