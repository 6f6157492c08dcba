"""Policies in a closed loop: batched inference whose randomness belongs to the episode and not to the batch.

The noise a policy samples from is seeded by (evaluation seed, task, episode seed, chunk number), as in counter-based
generators; so an episode comes out the same whichever slot runs it, whatever runs beside it and in whatever order.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_embodied.models import PolicyModule

Observations = dict[str, Tensor | list[str]]
"""A batch of observations: pictures uint8 `[B, C, H, W]`, vectors float32 `[B, D]`, and `task`, a list of texts."""


class ChunkPolicy(Protocol):
    """Anything that predicts action chunks can be evaluated.

    A policy that samples takes the keyword `generator`, here a list of one `torch.Generator` (on the CPU) a row, and
    draws each row's noise from its own. Without that keyword it is asked one observation at a time, with torch's
    random state seeded for each. One with a `sampling_seed`, as `PolicyModule` has, acts by its own fixed noise.
    """

    def predict_action_chunk(self, observations: Observations) -> Tensor:
        """Actions `[B, H, A]` in robot units."""


def chunk_seed(seed: int, task: str, episode_seed: int, chunk: int) -> int:
    """The seed of one inference, a pure function of what is being inferred."""
    words = np.random.SeedSequence([seed, zlib.crc32(task.encode()), episode_seed, chunk]).generate_state(2, np.uint32)
    return int(words[0]) << 31 ^ int(words[1])


def predict(policy: ChunkPolicy, observations: Observations, seeds: Sequence[int], *, batched: bool) -> NDArray[Any]:
    """Predicts one action chunk per observation.

    Args:
        policy: The policy.
        observations: A batch of `B` observations.
        seeds: One seed a row, from `chunk_seed`.
        batched: Whether rows may share a forward pass. Then a row's rounding depends on its neighbours (about 1e-7 of
            an action); one by one it does not.

    Returns:
        Actions, float32 `[B, H, A]`.
    """
    keys = getattr(policy, "observation_keys", tuple(observations))
    device = device_of(policy)
    batch = {key: _to(value, device) for key, value in observations.items() if key in keys}
    alone = not batched or _draws_from_global_state(policy)
    rows = [slice(i, i + 1) for i in range(len(seeds))] if alone else [slice(0, len(seeds))]
    with torch.inference_mode(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        chunks = [_chunks(policy, {key: value[row] for key, value in batch.items()}, seeds[row]) for row in rows]
    return torch.cat(chunks).to("cpu", torch.float32).numpy()


def device_of(policy: object) -> torch.device:
    """Where a policy's weights are; the CPU if it has none."""
    parameter = next(policy.parameters(), None) if isinstance(policy, nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


def as_tensors(observations: Mapping[str, NDArray[Any]], instructions: Sequence[str]) -> Observations:
    """Turns a vector environment's observations into what policies take.

    Args:
        observations: LeRobot key to array: pictures uint8 `[B, H, W, C]`, vectors `[B, D]`.
        instructions: What to tell the policy, one a row.
    """
    batch: Observations = {"task": list(instructions)}
    for key, array in observations.items():
        if array.dtype == np.uint8 and array.ndim == 4:
            batch[key] = torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))
        else:
            batch[key] = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    return batch


def untrained_twin(policy: PolicyModule, seed: int) -> PolicyModule:
    """The same class with the same arguments and spec, and fresh weights: what no training gives.

    Args:
        policy: The trained policy.
        seed: Seed of the fresh weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        twin = type(policy)(**dict(policy.hparams))
        twin.spec = policy.spec
        twin.configure_model()
    return twin.to(device_of(policy)).eval()


def _draws_from_global_state(policy: ChunkPolicy) -> bool:
    fixed = getattr(policy, "sampling_seed", None) is not None
    return not fixed and "generator" not in inspect.signature(policy.predict_action_chunk).parameters


def _chunks(policy: ChunkPolicy, observations: Observations, seeds: Sequence[int]) -> Tensor:
    if _draws_from_global_state(policy):
        torch.manual_seed(seeds[0])
    elif getattr(policy, "sampling_seed", None) is None:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        chunks: Tensor = cast("Any", policy).predict_action_chunk(observations, generator=generators)
        return chunks
    return policy.predict_action_chunk(observations)


def _to(value: Tensor | list[str], device: torch.device) -> Tensor | list[str]:
    return value.to(device) if isinstance(value, Tensor) else value
