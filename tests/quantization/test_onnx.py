"""The denoising step as ONNX computes what the policy computes, for every kind of flow-matching policy."""

import numpy as np
import pytest
import torch

from lightning_embodied.errors import ConfigError
from lightning_embodied.models import PolicyModule
from lightning_embodied.quantization import (
    DenoisingStep,
    Recipe,
    example_observation,
    export_denoising_step,
    quantize_policy,
)
from tests.models.conftest import TASKS, make_policy
from tests.models.groot.policies import make_policy as make_groot
from tests.precision.networks import tiny_pi05

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

POLICIES = {"small": make_policy, "pi05": lambda: tiny_pi05(4)[0], "groot": make_groot}


@pytest.mark.parametrize(("name", "weights"), [("small", "fp8_block"), ("pi05", "fp8_row"), ("groot", "int8_row")])
def test_onnxruntime_denoises_as_torch_does(name, weights, tmp_path):
    """Not one step alone, which the export compares: whole chunks, step after step, from another observation."""
    policy = POLICIES[name]().eval()
    quantize_policy(policy, Recipe(weights))
    path = tmp_path / "step.onnx"
    assert export_denoising_step(policy, example_observation(policy, TASKS[0]), path) < 1e-4
    stored = {onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in onnx.load(path).graph.initializer}
    assert ("INT8" if weights == "int8_row" else "FLOAT8E4M3FN") in stored

    batch = example_observation(policy, TASKS[0])
    batch.state = batch.state + 0.01
    batch.pixel_values = torch.randint(0, 256, batch.pixel_values.shape).to(batch.pixel_values.dtype)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    with torch.no_grad():
        observed = {key: value.numpy() for key, value in DenoisingStep(policy, batch).observed.items()}
        noise = policy.initial_noise(1, action_dim=policy.action_width)
        expected = policy.sample_actions(batch, noise=noise)
    sample, steps = noise[:, None].numpy(), policy.denoising_steps
    direction = 1 - 2 * policy.noise_time
    for step in range(steps):
        time = np.full((1, 1), policy.noise_time + direction * step / steps, np.float32)
        inputs = {"noisy": sample, "time": time, **observed}
        known = {entry.name for entry in session.get_inputs()}
        (velocity,) = session.run(None, {key: value for key, value in inputs.items() if key in known})
        sample = sample + direction / steps * velocity
    found = torch.from_numpy(sample)[:, 0, :, : expected.shape[-1]]
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))


def test_what_cannot_be_exported(tmp_path):
    policy = make_policy()
    two = policy.encoder.encode_observations(
        {
            **{key: torch.zeros(2, 3, 16, 16, dtype=torch.uint8) for key in policy.spec.cameras},
            "observation.state": torch.zeros(2, 5),
            "task": list(TASKS[:2]),
        }
    )
    with pytest.raises(ConfigError, match="2 observations"):
        export_denoising_step(policy, two, tmp_path / "step.onnx")

    class Other(PolicyModule):
        def build(self, spec):
            pass

        def forward(self, batch):
            raise NotImplementedError

        def sample_actions(self, batch, *, generator=None):
            raise NotImplementedError

    with pytest.raises(ConfigError, match="flow-matching"):
        export_denoising_step(Other(), example_observation(policy, TASKS[0]), tmp_path / "step.onnx")
    assert not (tmp_path / "step.onnx").exists()
