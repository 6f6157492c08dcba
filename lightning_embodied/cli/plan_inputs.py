"""What a fit YAML says, as the planner takes it: a policy on the meta device, and a batch of its shapes."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_embodied.data import LeRobotDataset
from lightning_embodied.errors import ConfigError
from lightning_embodied.features import STATISTICS, Feature, FeatureStats
from lightning_embodied.models import PolicyModule, PolicySpec
from lightning_embodied.models.pretrained import PretrainedPolicy
from lightning_embodied.packing import EncodedSample, SampleEncoder, pack_samples
from lightning_embodied.planning import AbstractExecution, SampleSize

Features = dict[str, Feature]


@dataclass(frozen=True)
class FitOptions:
    """What counts of a fit YAML.

    Attributes:
        model: The policy, not built.
        encoder: How samples become tokens.
        action_horizon: Actions of a chunk.
        batch_size: Samples of a batch on each rank.
        precision: Lightning's name of it.
        accumulate: Batches of an optimizer step.
    """

    model: PolicyModule
    encoder: SampleEncoder
    action_horizon: int
    batch_size: int
    precision: str
    accumulate: int


def fit_options(model: PolicyModule, data: LightningDataModule, trainer: Mapping[str, Any]) -> FitOptions:
    """Reads the options.

    Raises:
        ConfigError: The DataModule makes no packed batches.
    """
    encoder = getattr(getattr(data, "collator", None), "encoder", None)
    if not isinstance(encoder, SampleEncoder):
        raise ConfigError(
            "the DataModule makes no packed batches, whose sizes could be planned",
            where="data.collator",
            found=type(getattr(data, "collator", None)).__name__,
            expected="VarlenPackingCollator",
            mend="for another kind of batch use `lightning_embodied.planning.make_plan` in Python",
        )
    return FitOptions(
        model=model,
        encoder=encoder,
        action_horizon=int(getattr(data, "action_horizon", 16)),
        batch_size=int(getattr(data, "batch_size", 1)),
        precision=_precision(trainer.get("precision") or "32-true"),
        accumulate=int(trainer.get("accumulate_grad_batches") or 1),
    )


def _precision(value: object) -> str:
    known = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}
    return known.get(str(value), str(value))


def spec_of(
    data: LightningDataModule, *, cameras: int, picture_size: Sequence[int], state_dim: int, action_dim: int
) -> tuple[Features, dict[str, FeatureStats]]:
    """Features of the dataset, or of one as described; statistics of any values, since only shapes count.

    Args:
        data: Its `root` is looked at.
        cameras: Pictures of a sample.
        picture_size: Their height and width.
        state_dim: Numbers of the state.
        action_dim: Numbers of an action.
    """
    root = getattr(data, "root", None)
    if root is not None and (Path(root) / "meta").is_dir():
        features = dict(LeRobotDataset(root, cameras=getattr(data, "cameras", None)).features)
    else:
        encoder = getattr(getattr(data, "collator", None), "encoder", None)
        state_keys = getattr(encoder, "state_keys", ("observation.state",))
        features = {
            f"observation.images.camera{number}": Feature("video", (*map(int, picture_size), 3))
            for number in range(cameras)
        }
        features |= {key: Feature("float32", (state_dim if not i else 1,)) for i, key in enumerate(state_keys)}
        features[getattr(encoder, "action_key", "action")] = Feature("float32", (action_dim,))
    numbers = {key: feature for key, feature in features.items() if feature.dtype.startswith("float")}
    return features, {key: _any_stats(feature.shape) for key, feature in numbers.items()}


def _any_stats(shape: tuple[int, ...]) -> FeatureStats:
    values = {name: np.full(shape, float(rank)) for rank, name in enumerate(sorted(STATISTICS))}
    values |= {"std": np.ones(shape), "min": np.full(shape, -1.0), "q01": np.zeros(shape), "q99": np.ones(shape)}
    return FeatureStats(**values, count=1)


def build_from(
    options: FitOptions, features: Features, stats: dict[str, FeatureStats], instruction: str
) -> tuple[EncodedSample, Callable[[], nn.Module]]:
    """One encoded sample, and how to build the policy that reads it.

    Args:
        options: Of the YAML.
        features: Of the dataset.
        stats: Their statistics.
        instruction: Of the sample.
    """
    encoder = options.encoder
    encoder.use_statistics(stats)
    spec = PolicySpec(
        features=features,
        stats=stats,
        encoder=encoder.to_config(),
        action_horizon=options.action_horizon,
        fps=10,
        tasks=[instruction],
        robot_type=None,
        dataset_fingerprint="",
    )
    sample: dict[str, Any] = {key: torch.zeros(3, *encoder.image_size, dtype=torch.uint8) for key in spec.cameras}
    sample |= {key: torch.full(features[key].shape, 0.5) for key in spec.state_keys}
    sample[spec.action_key] = torch.zeros(options.action_horizon, *features[spec.action_key].shape)

    def build() -> nn.Module:
        policy = deepcopy(options.model)
        if isinstance(policy, PretrainedPolicy):
            policy.pretrained = None
        policy.log = lambda *_, **__: None  # type: ignore[method-assign]
        policy.spec = spec
        policy.configure_model()
        return policy.train()

    return encoder.encode({**sample, "task": instruction}), build


def batch_of(encoded: EncodedSample, size: int) -> Callable[[nn.Module, AbstractExecution], Tensor]:
    """The forward pass of a micro-batch of `size` such samples."""
    batch = pack_samples([encoded] * size)

    def step(policy: nn.Module, execution: AbstractExecution) -> Tensor:
        imagined = {
            name: execution.empty(*value.shape, dtype=value.dtype)
            for name, value in vars(batch).items()
            if torch.is_tensor(value) and (value.is_floating_point() or name == "pixel_values")
        }
        total: Tensor = policy(batch.replace(**imagined)).total
        return total

    return step


def sample_size(features: Features, encoded: EncodedSample, bytes_per_pixel: float) -> SampleSize:
    """What a sample reads from storage."""
    pictures = [feature.shape for feature in features.values() if feature.is_visual]
    pixels = max((math.prod(shape[:2]) for shape in pictures), default=0)
    numbers = 4 * (encoded.state.numel() + encoded.actions.numel())
    return SampleSize(len(pictures), pixels, encoded_bytes_per_pixel=bytes_per_pixel, other_bytes=numbers)


def optimizer_of(section: Mapping[str, Any] | None) -> Callable[[Sequence[nn.Parameter]], Optimizer]:
    """Makes the optimizer of a YAML's section; AdamW without one, as `PolicyModule` does.

    Raises:
        ConfigError: There is no such class.
    """
    section = section or {"class_path": "torch.optim.AdamW"}
    path = str(section.get("class_path"))
    module, _, name = path.rpartition(".")
    try:
        kind: Any = getattr(importlib.import_module(module or "torch.optim"), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError("there is no such optimizer", where="optimizer.class_path", found=path) from error
    arguments = dict(section.get("init_args") or {})
    if "foreach" in inspect.signature(kind).parameters and not arguments.get("fused"):
        arguments.setdefault("foreach", True)  # torch's default on a GPU

    def make(parameters: Sequence[nn.Parameter]) -> Optimizer:
        optimizer: Optimizer = kind(parameters, **arguments)
        return optimizer

    return make
