"""What quantising does to actions: the same held-out observations and noise before and after, in the robot's units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_embodied.errors import ConfigError
from lightning_embodied.features import Feature
from lightning_embodied.models import PolicyModule, PolicySpec
from lightning_embodied.packing import PackedBatch


@dataclass(frozen=True)
class ActionComparison:
    """Actions before and after quantising; lists have one value for each dimension, in the dataset's units.

    Attributes:
        names: Of the dimensions.
        spread: Standard deviation of the demonstrated actions, to compare with.
        change_rms: Root of the mean square of what quantising changed.
        change_max: Largest change.
        error_before: Mean distance of the policy's actions from the demonstrated ones, before quantising.
        error_after: The same afterwards.
        frames: Number of held-out frames.
    """

    names: list[str]
    spread: list[float]
    change_rms: list[float]
    change_max: list[float]
    error_before: list[float]
    error_after: list[float]
    frames: int


@torch.no_grad()
def predict_actions(policy: PolicyModule, batches: Sequence[PackedBatch]) -> list[Tensor]:
    """The actions of a policy on recorded observations, from the same noise each time.

    Args:
        policy: Ready to act.
        batches: Recorded samples.

    Returns:
        float32 `[B, H, A]` in the dataset's units for each batch, on the CPU.
    """
    actions = []
    for number, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(number)
        sampled = policy.sample_actions(batch.to(policy.device), generator=generator)
        actions.append(policy.action_normalizer.unnormalize(sampled).cpu())
    return actions


def compare_actions(
    before: Sequence[Tensor], after: Sequence[Tensor], batches: Sequence[PackedBatch], spec: PolicySpec
) -> ActionComparison:
    """Compares two policies' actions with each other and with what was demonstrated.

    Args:
        before: `predict_actions` of the one.
        after: Of the other.
        batches: What both were given; frames past the end of an episode do not count.
        spec: Of the policy, for names and spread.

    Raises:
        ConfigError: There are no frames, or actions are not finite.
    """
    valid = torch.cat([~batch.action_is_pad.cpu() for batch in batches]) if batches else torch.zeros(0)
    if not valid.any():
        raise ConfigError("there are no held-out actions to compare")
    first, second, demonstrated = (
        torch.cat(list(parts))[valid].double() for parts in (before, after, [batch.actions.cpu() for batch in batches])
    )
    if not bool(first.isfinite().all() and second.isfinite().all()):
        raise ConfigError("the policy's actions are not finite", mend="take a checkpoint from before the run diverged")
    change = second - first
    return ActionComparison(
        names=dimension_names(spec.features[spec.action_key]),
        spread=[float(value) for value in spec.stats[spec.action_key].std.reshape(-1)],
        change_rms=change.square().mean(0).sqrt().tolist(),
        change_max=change.abs().amax(0).tolist(),
        error_before=(first - demonstrated).abs().mean(0).tolist(),
        error_after=(second - demonstrated).abs().mean(0).tolist(),
        frames=int(valid.any(1).sum()),
    )


def dimension_names(feature: Feature) -> list[str]:
    """Names of a vector's dimensions: the dataset's, or numbers."""
    names = feature.names
    if isinstance(names, dict):
        names = next(iter(names.values()), None)
    size = torch.Size(feature.shape).numel()
    return (
        [str(name) for name in names] if isinstance(names, list) and len(names) == size else list(map(str, range(size)))
    )
