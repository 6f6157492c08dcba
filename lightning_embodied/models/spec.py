"""What a policy must know about its robot and data beside its weights.

It is written into every checkpoint as plain values, so that a checkpoint alone can run a robot: no dataset, no YAML.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.features import Feature, FeatureStats
from lightning_embodied.packing import SampleEncoder

_DATAMODULE_ATTRIBUTES = (
    "features",
    "stats",
    "action_horizon",
    "fps",
    "tasks",
    "robot_type",
    "dataset_fingerprint",
)


@dataclass(frozen=True)
class PolicySpec:
    """Features, statistics and token path of the data a policy is trained on.

    Attributes:
        features: The dataset's features by LeRobot key, pictures included.
        stats: Exact statistics of the features that are not pictures, over the training episodes.
        encoder: `SampleEncoder.to_config()`: how samples become tokens.
        action_horizon: Actions per chunk.
        fps: Frames (and actions) per second.
        tasks: Instructions of the training data.
        robot_type: The robot, if the dataset names it.
        dataset_fingerprint: Identifies the training data.
    """

    features: dict[str, Feature]
    stats: dict[str, FeatureStats]
    encoder: dict[str, Any]
    action_horizon: int
    fps: int
    tasks: list[str]
    robot_type: str | None
    dataset_fingerprint: str

    @property
    def action_key(self) -> str:
        """Name of the feature that holds the actions."""
        return str(self.encoder["action_key"])

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Names of the features that make up the state token, in order."""
        return tuple(self.encoder["state_keys"])

    @property
    def cameras(self) -> tuple[str, ...]:
        """Keys of the pictures, sorted."""
        return tuple(sorted(key for key, feature in self.features.items() if feature.is_visual))

    def stats_of(self, keys: tuple[str, ...]) -> list[FeatureStats]:
        """Statistics of some features.

        Raises:
            ConfigError: One of them has none; names it and those that exist.
        """
        for key in keys:
            if key not in self.stats:
                raise ConfigError(
                    "the dataset has no such numeric feature",
                    where="encoder",
                    found=key,
                    expected=", ".join(sorted(self.stats)),
                    mend="correct `state_keys` or `action_key` of the encoder",
                )
        return [self.stats[key] for key in keys]

    @classmethod
    def from_datamodule(cls, datamodule: object, encoder: Mapping[str, Any] | None = None) -> PolicySpec:
        """Reads the spec off a DataModule that is set up, such as `LeRobotDataModule`.

        Args:
            datamodule: It.
            encoder: How samples become tokens. Default: as its collator does it.

        Raises:
            ConfigError: The DataModule lacks one of the attributes, or its collator does not pack.
        """
        missing = [name for name in _DATAMODULE_ATTRIBUTES if not hasattr(datamodule, name)]
        if missing:
            raise ConfigError(
                "the DataModule does not say what the policy needs to know",
                where=type(datamodule).__name__,
                found=f"no attribute {', '.join(missing)}",
                mend="use LeRobotDataModule, or give your DataModule these attributes, or set `policy.spec` yourself",
            )
        values = {name: getattr(datamodule, name) for name in _DATAMODULE_ATTRIBUTES}
        if encoder is None:
            collator: Any = getattr(datamodule, "collator", None)
            if not hasattr(collator, "encoder"):
                raise ConfigError(
                    "the policy reads packed batches, which the DataModule does not make",
                    where=f"{type(datamodule).__name__}.collator",
                    found=type(collator).__name__,
                    expected="VarlenPackingCollator",
                )
            encoder = collator.encoder.to_config()
        return cls(encoder=dict(encoder), **{**values, "tasks": list(values["tasks"])})

    def adopt(self, datamodule: object) -> None:
        """Has a DataModule encode samples as this spec says, or refuses it.

        Only statistics may differ, and then those of the spec count: a policy that is trained on stays in its units.
        A DataModule without an encoder makes batches of its own, which are not looked at.

        Raises:
            ConfigError: It encodes samples otherwise, or actions, states or cameras are others; names the first.
        """
        collator: Any = getattr(datamodule, "collator", None)
        if not hasattr(collator, "encoder"):
            return
        there = collator.encoder.to_config()
        for key, own in self.encoder.items():
            if key != "state_range" and there.get(key) != own:
                text = key == "tokenizer_json"  # too long to show
                found, expected = ("another tokenizer", "the policy's") if text else (there.get(key), own)
                raise _other_data(f"collator.encoder: {key.removesuffix('_json')}", found, expected)
        self._check_features(datamodule)
        if there != self.encoder:
            collator.encoder = SampleEncoder.from_config(self.encoder)

    def _check_features(self, datamodule: object) -> None:
        horizon = getattr(datamodule, "action_horizon", self.action_horizon)
        if horizon != self.action_horizon:
            raise _other_data("action_horizon", horizon, self.action_horizon)
        features: Mapping[str, Feature] = getattr(datamodule, "features", self.features)
        for key in (*self.state_keys, self.action_key):
            wanted = list(self.features[key].shape)
            found = list(features[key].shape) if key in features else "no such feature"
            if found != wanted:
                raise _other_data(key, found, wanted)
        unknown = [key for key, feature in features.items() if feature.is_visual and key not in self.cameras]
        if unknown:
            raise _other_data("cameras", ", ".join(unknown), f"some of {', '.join(self.cameras) or 'none'}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what `torch.load(weights_only=True)` and JSON can hold."""
        return {
            "features": {key: feature.to_dict() for key, feature in self.features.items()},
            "stats": {key: stats.to_dict() for key, stats in self.stats.items()},
            "encoder": self.encoder,
            "action_horizon": self.action_horizon,
            "fps": self.fps,
            "tasks": self.tasks,
            "robot_type": self.robot_type,
            "dataset_fingerprint": self.dataset_fingerprint,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> PolicySpec:
        """Reads what `to_dict` wrote.

        Raises:
            CheckpointError: An entry is missing or of the wrong kind.
        """
        try:
            return cls(
                features={str(key): Feature.from_dict(entry) for key, entry in value["features"].items()},
                stats={str(key): FeatureStats.from_dict(entry) for key, entry in value["stats"].items()},
                encoder=dict(value["encoder"]),
                action_horizon=int(value["action_horizon"]),
                fps=int(value["fps"]),
                tasks=[str(task) for task in value["tasks"]],
                robot_type=None if value["robot_type"] is None else str(value["robot_type"]),
                dataset_fingerprint=str(value["dataset_fingerprint"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                "the policy's spec is damaged",
                where="policy_spec",
                found=f"{type(error).__name__}: {error}",
                mend="train again, or take another checkpoint of the run",
            ) from error


def _other_data(where: str, found: object, expected: object) -> ConfigError:
    return ConfigError(
        "the policy was made for data of another layout",
        where=f"the DataModule's {where}",
        found=found,
        expected=expected,
        mend="set the DataModule as in the run that the policy is from, or train a new one",
    )
