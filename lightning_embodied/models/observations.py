"""Checks what an environment or robot hands to a policy, before any of it reaches a network.

A wrong key or layout would otherwise show only as a robot that moves badly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.features import Feature
from lightning_embodied.models.spec import PolicySpec

Observations = Mapping[str, Tensor | Sequence[str]]
"""`observation.images.<camera>` uint8 `[B, C, H, W]`, vectors `[B, D]`, `task` list of `B` strings."""


def observation_keys(spec: PolicySpec) -> tuple[str, ...]:
    """Keys a policy reads: its cameras, its state and `task`."""
    return (*spec.cameras, *spec.state_keys, "task")


def check_observations(spec: PolicySpec, observations: Observations) -> dict[str, Any]:
    """Checks observations and keeps those the policy reads.

    Raises:
        ConfigError: A key is unknown or missing, a value has another dtype, shape or batch size, or a state is not
            finite; names the key.
    """
    known = {*observation_keys(spec), *spec.features}
    for key in observations:
        if key not in known:
            raise _wrong(key, "the policy knows no such observation", key, ", ".join(observation_keys(spec)))
    tasks = observations.get("task")
    if isinstance(tasks, str | Tensor) or tasks is None or not all(isinstance(task, str) for task in tasks):
        raise _wrong("task", "the instructions are missing or no list of strings", type(tasks).__name__, "list of str")
    kept: dict[str, Any] = {"task": list(tasks)}
    cameras = [key for key in spec.cameras if key in observations]
    if spec.cameras and not cameras:
        raise _wrong("observation.images", "no camera of the policy is there", "none", ", ".join(spec.cameras))
    for key in (*cameras, *spec.state_keys):
        if key not in observations:
            raise _wrong(key, "an observation that the policy needs is missing", ", ".join(observations), key)
        kept[key] = _checked(key, torch.as_tensor(observations[key]), spec.features[key], len(kept["task"]))
    return kept


def _checked(key: str, value: Tensor, feature: Feature, batch_size: int) -> Tensor:
    found = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value.dim() > 0 and value.shape[0] != batch_size:
        raise _wrong(key, "batch sizes differ", f"{found} beside {batch_size} instructions", f"[{batch_size}, …]")
    if feature.is_visual:
        channels = feature.shape[-1]
        if value.dtype != torch.uint8 or value.dim() != 4 or value.shape[1] != channels:
            raise _wrong(key, "pictures have another layout", found, f"uint8 [B, {channels}, H, W]")
        return value
    size = int(torch.Size(feature.shape).numel())
    if value.dim() != 2 or value.shape[1] != size:
        raise _wrong(key, "a vector has another shape", found, f"float32 [B, {size}]")
    value = value.float()
    if not bool(value.isfinite().all()):
        raise _wrong(key, "an observation is NaN or infinite", "a value that is not finite", "finite values")
    return value


def check_environment(spec: PolicySpec, features: Mapping[str, Feature]) -> None:
    """Checks that an environment offers what a policy was trained on, before an evaluation starts.

    Args:
        spec: The policy's.
        features: The environment's, actions included.

    Raises:
        CheckpointError: A feature is missing or has another shape; names it.
    """
    for key in (*spec.cameras, *spec.state_keys, spec.action_key):
        wanted, offered = spec.features[key], features.get(key)
        same_kind = offered is not None and offered.is_visual == wanted.is_visual
        if offered is None or not same_kind or (not wanted.is_visual and offered.shape != wanted.shape):
            raise CheckpointError(
                "the policy was trained on another feature set",
                where=key,
                found="no such feature" if offered is None else f"{offered.dtype} {list(offered.shape)}",
                expected=f"{wanted.dtype} {list(wanted.shape)}",
                mend="use the environment (and its cameras) that the demonstrations were collected in",
            )


def _wrong(key: str, problem: str, found: str, expected: str) -> ConfigError:
    return ConfigError(
        problem,
        where=f"observations[{key!r}]",
        found=found,
        expected=expected,
        mend="hand the policy the keys in `policy.observation_keys`, laid out as in its dataset",
    )
