"""A small spec, its encoder and synthetic samples for the policies' tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from lightning_embodied.features import Feature, FeatureStats
from lightning_embodied.models import FlowMatchingPolicy, PolicySpec
from lightning_embodied.packing import SampleEncoder, VarlenPackingCollator

CAMERAS = ("observation.images.front", "observation.images.wrist")
TASKS = ("open the drawer", "push", "put the red block on the green pad")
STATE, ACTION, HORIZON = 5, 3, 4


def stats_of(values) -> FeatureStats:
    values = np.asarray(values, dtype=np.float64)
    quantiles = {f"q{p:02d}": np.quantile(values, p / 100, axis=0) for p in (1, 10, 50, 90, 99)}
    return FeatureStats(
        min=values.min(0),
        max=values.max(0),
        mean=values.mean(0),
        std=values.std(0),
        **quantiles,
        count=len(values),
    )


def make_spec(**changes) -> PolicySpec:
    rng = np.random.default_rng(0)
    values = {
        "features": {
            "observation.state": Feature("float32", (STATE,)),
            "action": Feature("float32", (ACTION,)),
            **{camera: Feature("video", (16, 16, 3)) for camera in CAMERAS},
        },
        "stats": {
            "observation.state": stats_of(rng.normal(2.0, 3.0, (500, STATE))),
            "action": stats_of(rng.normal(-1.0, 0.5, (500, ACTION))),
        },
        "encoder": SampleEncoder(image_size=(16, 16), patch_size=8).to_config(),
        "action_horizon": HORIZON,
        "fps": 10,
        "tasks": list(TASKS),
        "robot_type": "arm",
        "dataset_fingerprint": "abc",
    }
    return PolicySpec(**{**values, **changes})


def make_samples(count: int, seed: int = 0) -> list[dict]:
    """Samples with 0 to 2 cameras, instructions of three lengths and padded chunk ends."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(count):
        cameras = [(), CAMERAS[:1], CAMERAS[1:], CAMERAS][index % 4]
        pad = torch.arange(HORIZON) >= HORIZON - index % 3
        samples.append(
            {
                **{key: torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8, generator=generator) for key in cameras},
                "observation.state": torch.randn(STATE, generator=generator) * 3 + 2,
                "action": torch.randn(HORIZON, ACTION, generator=generator) * 0.5 - 1,
                "action_is_pad": pad,
                "task": TASKS[index % len(TASKS)],
                "episode_index": index // 4,
                "frame_index": index,
                "dataset": 0,
            }
        )
    return samples


def make_policy(**arguments) -> FlowMatchingPolicy:
    """A tiny policy with all weights random, modulations included."""
    tiny = {"width": 32, "expert_width": 24, "depth": 3, "heads": 2, "head_dim": 8, "stem_channels": 8}
    torch.manual_seed(0)
    policy = FlowMatchingPolicy(**{**tiny, **arguments})
    policy.spec = make_spec()
    policy.configure_model()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return policy


def make_collator() -> VarlenPackingCollator:
    return VarlenPackingCollator(SampleEncoder(image_size=(16, 16), patch_size=8))


def observations_of(samples: list[dict], cameras=CAMERAS) -> dict:
    """Batched observations; every sample must have the cameras asked for."""
    keys = ["observation.state", *cameras]
    return {**{key: torch.stack([s[key] for s in samples]) for key in keys}, "task": [s["task"] for s in samples]}


@pytest.fixture
def policy() -> FlowMatchingPolicy:
    return make_policy()


class TinyDataModule(LightningDataModule):
    """Synthetic samples behind the attributes that a policy reads off a DataModule."""

    features, stats = make_spec().features, make_spec().stats
    action_horizon, fps, tasks, robot_type, dataset_fingerprint = HORIZON, 10, list(TASKS), "arm", "abc"

    def __init__(self, samples: list[dict], batch_size: int) -> None:
        super().__init__()
        self.samples, self.batch_size, self.collator = samples, batch_size, make_collator()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.samples, self.batch_size, collate_fn=self.collator)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.samples, self.batch_size, collate_fn=self.collator)


def make_trainer(**arguments) -> Trainer:
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return Trainer(**{**quiet, **arguments})
