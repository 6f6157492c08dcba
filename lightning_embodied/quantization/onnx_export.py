"""The denoising step of a policy as ONNX: from noisy actions, flow time and an encoded observation to velocities.

Weights stay in eight bits in the file. Shapes are those of one example, instruction length included; the observation
is encoded outside, once for all steps. What onnxruntime computes on a CPU is compared before the file counts.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_embodied.attention import force_backend
from lightning_embodied.errors import ConfigError, import_extra
from lightning_embodied.models import FlowMatchingModule, PolicyModule
from lightning_embodied.packing import PackedBatch

TOLERANCE = 1e-4
"""Largest difference allowed between onnxruntime and torch, relative to the largest velocity."""


@torch.no_grad()
def export_denoising_step(policy: PolicyModule, example: PackedBatch, path: str | Path) -> float:
    """Writes the denoising step as ONNX; inputs are `noisy [1, 1, H, W]`, `time [1, 1]` and the encoded observation.

    Args:
        policy: Quantised or not, on the CPU, in float32.
        example: One observation; its shapes are those of the inputs.
        path: File to write.

    Returns:
        The largest difference between onnxruntime and torch, relative to the largest velocity.

    Raises:
        ConfigError: The policy does not denoise, the example is not one observation, or onnxruntime computes
            something else.
        MissingExtraError: onnx, onnxscript or onnxruntime is not installed.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        import_extra(package, "onnx")
    if not isinstance(policy, FlowMatchingModule) or example.batch_size != 1:
        raise ConfigError(
            "only the denoising step of a flow-matching policy can be exported, for one observation",
            found=f"{type(policy).__name__}, {example.batch_size} observations",
        )
    step = DenoisingStep(policy, example)
    shape = (1, 1, policy.spec.action_horizon, policy.action_width)
    noisy = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    inputs = {"noisy": noisy, "time": torch.full((1, 1), 0.7), **step.observed}
    with force_backend("reference"), _quiet():  # the only attention that is made of ONNX's operators
        exported = torch.export.export(step, tuple(inputs.values()), strict=False)
        program = torch.onnx.export(
            exported, input_names=list(inputs), output_names=["velocity"], optimize=False, verbose=False
        )
    assert program is not None  # noqa: S101 - for the type checker
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # the lines of Python it came from: more bytes than a small policy's weights
    program.save(str(path))
    inputs["noisy"] = noisy.flip(2) * 0.5  # other values than those it was traced with
    return _difference(Path(path), inputs, step(*inputs.values()))


def example_observation(policy: PolicyModule, instruction: str) -> PackedBatch:
    """An observation with all cameras, black pictures and the mean state of the training data.

    Args:
        policy: Knows its cameras and states.
        instruction: What it is told.
    """
    spec = policy.spec
    pictures = {key: spec.features[key].shape for key in spec.cameras}
    observations: dict[str, Tensor | list[str]] = {
        key: torch.zeros(1, shape[2], *shape[:2], dtype=torch.uint8) for key, shape in pictures.items()
    }
    for key in spec.state_keys:
        observations[key] = torch.from_numpy(spec.stats[key].mean).float().reshape(1, -1)
    return policy.encoder.encode_observations({**observations, "task": [instruction]})


class DenoisingStep(nn.Module):
    """A policy's velocity as a function of tensors alone.

    Args:
        policy: The policy.
        example: One observation.

    Attributes:
        observed: What the policy made of the observation: tensors by name, in the order of the arguments.
    """

    def __init__(self, policy: FlowMatchingModule, example: PackedBatch) -> None:
        super().__init__()
        self.policy = policy
        velocity = policy.observe(example.to(policy.device))
        if not isinstance(velocity, partial) or velocity.keywords:
            raise ConfigError(
                "the policy's velocity cannot be taken apart",
                where=f"{type(policy).__name__}.observe",
                found=type(velocity).__name__,
                expected="a functools.partial of a method and what was observed",
            )
        self._function = velocity.func
        names = list(inspect.signature(velocity.func).parameters)
        self._arguments = dict(zip(names, velocity.args, strict=False))
        self.observed = dict(_tensors(self._arguments, ""))

    def forward(self, noisy: Tensor, time: Tensor, *observed: Tensor) -> Tensor:
        """Velocities, shaped like `noisy`."""
        rebuilt = _rebuilt(self._arguments, iter(observed))
        velocity: Tensor = self._function(*rebuilt.values(), noisy, time)
        return velocity


def _is_input(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401
    """The floating tensors in a nest of dataclasses, mappings and sequences, by where they are."""
    if _is_input(value):
        yield name, value
    for key, part in _parts(value).items():
        yield from _tensors(part, f"{name}_{key}" if name else str(key))


def _rebuilt(value: Any, tensors: Iterator[Tensor]) -> Any:  # noqa: ANN401
    """The same nest with other tensors, in the order of `_tensors`."""
    if _is_input(value):
        return next(tensors)
    parts = {key: _rebuilt(part, tensors) for key, part in _parts(value).items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **parts)
    if isinstance(value, dict):
        return parts
    return type(value)(parts.values()) if isinstance(value, list | tuple) else value


def _parts(value: Any) -> dict[Any, Any]:  # noqa: ANN401
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, list | tuple) else {}


def _difference(path: Path, inputs: dict[str, Tensor], expected: Tensor) -> float:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # or it reports each FP8 weight, because it cannot widen it in advance
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    read = {entry.name for entry in session.get_inputs()}
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items() if name in read})
    difference = float((torch.from_numpy(found) - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
    if not difference <= TOLERANCE:
        raise ConfigError(
            "onnxruntime computes something else than torch",
            where=path,
            found=f"a difference of {difference:.1e} of the largest velocity",
            expected=f"at most {TOLERANCE:.0e}",
        )
    return difference


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch's exporter reports that it lacks torchvision's operators, which no policy here has."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
