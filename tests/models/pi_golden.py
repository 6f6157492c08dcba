"""LeRobot's golden runs of pi0 and pi0.5 as a policy of ours and packed batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models

from lightning_embodied.features import Feature, FeatureStats
from lightning_embodied.models import Pi0Policy, Pi05Policy, PolicySpec
from lightning_embodied.models.pi import PiPolicy
from lightning_embodied.packing import EncodedSample, PackedBatch, SampleEncoder, pack_samples, resize_with_pad

FIXTURES = Path(__file__).parents[1] / "fixtures"
CLASSES: dict[str, type[PiPolicy]] = {"pi05": Pi05Policy, "pi0": Pi0Policy}
CAMERAS = ("observation.images.base", "observation.images.left_wrist", "observation.images.right_wrist")
COMBINATIONS = ("cameras_1", "cameras_2", "cameras_3", "mixed")


class Golden:
    """The fixture of one policy.

    Attributes:
        config: `config.json`.
        values: `golden.npz` as tensors.
    """

    def __init__(self, name: str) -> None:
        self.name, self.path = name, FIXTURES / name
        self.config = json.loads((self.path / "config.json").read_text())
        with np.load(self.path / "golden.npz") as file:
            self.values = {key: torch.from_numpy(file[key]) for key in file.files}

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.values[key]

    def policy(self, **arguments) -> PiPolicy:
        """The policy with the fixture's weights, and data whose units are normalised ones."""
        return CLASSES[self.name].from_pretrained(self.path, spec=self.spec(), **arguments)

    def spec(self) -> PolicySpec:
        words = self.config["sizes"]["paligemma"]["vocab_size"]
        tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))  # noqa: S106
        encoder = {**SampleEncoder(image_size=(28, 28), patch_size=14, prompt=self.name, resize="bilinear").to_config()}
        features = {
            "observation.state": Feature("float32", (4,)),
            "action": Feature("float32", (5,)),
            **{camera: Feature("video", (40, 56, 3)) for camera in CAMERAS},
        }
        return PolicySpec(
            features=features,
            stats={"observation.state": unit_stats(4), "action": unit_stats(5)},
            encoder={**encoder, "tokenizer_json": tokenizer.to_str(), "state_range": [[-1.0] * 4, [1.0] * 4]},
            action_horizon=10,
            fps=10,
            tasks=["w1"],
            robot_type=None,
            dataset_fingerprint="golden",
        )

    def present(self, combination: str) -> torch.Tensor:
        """Which cameras each sample has: bool `[B, 3]`."""
        if combination == "mixed":
            return self["mixed/camera_mask"]
        return (torch.arange(3) < int(combination[-1])).expand(4, 3)

    def batch(self, policy: PiPolicy, combination: str, samples=range(4)) -> PackedBatch:
        """The packed samples: no token for an absent camera or for padding."""
        return pack_samples([self.sample(policy, combination, i) for i in samples])

    def sample(self, policy: PiPolicy, combination: str, index: int) -> EncodedSample:
        encoder, present = policy.encoder, self.present(combination)[index]
        pictures = resize_with_pad(self["images"][index][present], encoder.image_size, encoder.resize)
        words = self["tokens"][index][self["token_mask"][index]]
        placeholders = torch.full((len(pictures) * encoder.tokens_per_image,), encoder.image_token_id)
        return EncodedSample(
            input_ids=torch.cat((placeholders, words)),
            pixel_values=pictures,
            state=self["state"][index],
            actions=self["actions"][index],
            action_is_pad=torch.zeros(10, dtype=torch.bool),
        )


def unit_stats(dim: int) -> FeatureStats:
    """Statistics under which every scaling changes nothing."""
    zero, one = np.zeros(dim), np.ones(dim)
    return FeatureStats(
        min=-one, max=one, mean=zero, std=one, q01=-one, q10=-one, q50=zero, q90=one, q99=one, count=100
    )
