"""Any policy of LeRobot, trained by Lightning: `LeRobotPolicyModule`.

Configuration, model, processors, optimizer and schedule are LeRobot's own, used through its public interface (lerobot
0.6: `configs/policies.py`, `policies/factory.py`, `policies/pretrained.py`), so that what trains here is what its own
script trains; batches, ranks, precision, checkpoints and evaluation are Lightning's and this package's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_embodied.errors import ConfigError, import_extra
from lightning_embodied.features import STATISTICS, Feature
from lightning_embodied.models.loss import LossTerms
from lightning_embodied.models.module import PolicyModule
from lightning_embodied.models.observations import Observations, check_observations
from lightning_embodied.models.spec import PolicySpec

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import OptimizerLRScheduler

Batch = dict[str, Any]
"""Stacked samples, as `LeRobotDataModule` makes them without a collator."""

_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "min": (0.0,) * 3, "max": (1.0,) * 3}


class LeRobotPolicyModule(PolicyModule):
    """A policy of LeRobot (ACT, diffusion, SmolVLA …) as a LightningModule; needs the `lerobot` extra.

    Train it with `LeRobotDataModule` without a collator; which frames a sample holds follows from the policy. Where
    the YAML has no `optimizer:` and the Trainer no `gradient_clip_val`, LeRobot's presets for the policy hold. The
    loss is LeRobot's, a mean over samples; accumulated and over ranks it stays one, whatever their batch sizes.

    Some policies leave parameters unused in some steps: on several devices use `ddp_find_unused_parameters_true`, as
    LeRobot does. Unlike its script, this trains on the last frames of an episode also for a policy that names
    `drop_n_last_frames`.

    Args:
        policy_type: LeRobot's name of the policy, such as `act`. Default: that of `pretrained_path`.
        config: Options of the policy's LeRobot configuration, by their names there; the others keep their defaults.
        pretrained_path: Directory or hub name to take configuration and weights from.

    Raises:
        ConfigError: Neither a type nor a path is given.
    """

    batch_type = dict

    def __init__(
        self,
        policy_type: str | None = None,
        config: dict[str, Any] | None = None,
        pretrained_path: str | None = None,
    ) -> None:
        super().__init__(sampling_seed=None)
        self.hparams.clear()  # the base class's arguments mean nothing here
        self.save_hyperparameters("policy_type", "config", "pretrained_path")
        if policy_type is None and pretrained_path is None:
            raise ConfigError("which policy is not said", where="policy_type, pretrained_path", found="neither")
        self.policy_type, self.config, self.pretrained_path = policy_type, dict(config or {}), pretrained_path
        self._pipelines: tuple[torch.device, Any, Any] | None = None

    # What LeRobot says.

    @cached_property
    def lerobot_config(self) -> Any:  # noqa: ANN401
        """The policy's LeRobot configuration, a `PreTrainedConfig`.

        Raises:
            ConfigError: There is no such policy, or an option is unknown or wrong.
        """
        options = self.config
        policy_type = self.policy_type
        if self.pretrained_path is not None:
            pretrained = _config_class().from_pretrained(self.pretrained_path)
            options = {**_encode(pretrained), **options}
            policy_type = policy_type or pretrained.type
        return _decode(str(policy_type), {**options, "device": "cpu"})  # Lightning moves it

    def frame_windows(self, features: Mapping[str, Feature]) -> dict[str, list[int]]:
        """Which frames, relative to a sample's own, the policy reads of each feature; the DataModule asks."""
        windows: dict[str, list[int]] = {}
        for prefix, indices in (
            ("observation.", self.lerobot_config.observation_delta_indices),
            ("action", self.lerobot_config.action_delta_indices),
            ("next.reward", self.lerobot_config.reward_delta_indices),
        ):
            if indices is not None:
                windows |= {key: list(indices) for key in features if key.startswith(prefix)}
        return windows

    # Lightning's hooks.

    def configure_model(self) -> None:
        """Builds LeRobot's model once the data is known."""
        self._find_spec()
        if self._built or self._spec is None:
            return
        config = self.lerobot_config
        features = _policy_features(self._spec.features)
        config.output_features = {key: value for key, value in features.items() if value.type.value == "ACTION"}
        if not config.input_features:
            config.input_features = {key: value for key, value in features.items() if key not in config.output_features}
        policy_class = _lerobot("policies.factory").get_policy_class(config.type)
        if self.pretrained_path is None:
            self.policy = policy_class(config)
        else:
            self.policy = policy_class.from_pretrained(self.pretrained_path, config=config).train()
        self._built = True

    def _read_spec(self, datamodule: object) -> PolicySpec:
        features = _policy_features(getattr(datamodule, "features", {}))
        state = [key for key, value in features.items() if value.type.value in ("STATE", "ENV")]
        spec = PolicySpec.from_datamodule(datamodule, encoder={"state_keys": state, "action_key": "action"})
        return replace(spec, action_horizon=int(getattr(self.lerobot_config, "n_action_steps", 1)))

    def forward(self, batch: Batch) -> LossTerms:  # type: ignore[override]
        """LeRobot's loss of a batch of stacked samples, times their number."""
        return self._loss(batch)[0]

    def _loss(self, batch: Batch) -> tuple[LossTerms, Mapping[str, Any]]:
        loss, logged = self.policy(self._processors()[0](_with_float_pictures(batch)))
        count = torch.tensor(float(len(batch["task"])), device=loss.device)
        return LossTerms(loss * count, count), logged or {}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # type: ignore[override]
        """One micro-batch; what the policy reports beside its loss is logged, too."""
        terms, logged = self._loss(batch)
        size = int(terms.count)
        self.log("train/loss", terms.mean, prog_bar=True, batch_size=size)
        for name, value in logged.items():
            if isinstance(value, int | float) and name != "loss":
                self.log(f"train/{name}", float(value), batch_size=size)
        return self._global_mean.step(terms, self._mean_over_ranks)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """LeRobot's presets of the policy.

        Raises:
            ConfigError: The policy wants several optimizers.
        """
        optimizer = self.lerobot_config.get_optimizer_preset().build(self.policy.get_optim_params())
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError("the policy wants several optimizers", found=self.lerobot_config.type, expected="one")
        preset = self.lerobot_config.get_scheduler_preset()
        if preset is None:
            return optimizer
        schedule = preset.build(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips as the Trainer says, else by the norm in LeRobot's preset."""
        value = gradient_clip_val
        if value is None:
            value = self.lerobot_config.get_optimizer_preset().grad_clip_norm or None
        self.clip_gradients(optimizer, value, gradient_clip_algorithm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what `load_policy` needs, LeRobot's whole configuration instead of a path to it among it."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["policy_class"]["init_args"] = {
            "policy_type": self.lerobot_config.type,
            "config": _encode(self.lerobot_config),
            "pretrained_path": None,
        }

    # Acting.

    @torch.no_grad()
    def predict_action_chunk(self, observations: Observations) -> Tensor:  # type: ignore[override]
        """Chooses the next `n_action_steps` actions, from a fresh `reset()` of the policy.

        A policy that reads several observations sees the present one repeated, as LeRobot's do at an episode's start.
        Noise comes from torch's random state.

        Args:
            observations: As in `PolicyModule.predict_action_chunk`.

        Returns:
            float32 `[B, n_action_steps, A]` in the dataset's units, on the policy's device, not clipped.

        Raises:
            ConfigError: An observation is unknown, missing or has another layout; names its key.
        """
        before, after = self._processors()
        batch = before(_with_float_pictures(check_observations(self.spec, observations)))
        training = self.policy.training
        self.policy.reset()
        try:
            actions = [after(self.policy.select_action(dict(batch))) for _ in range(self.spec.action_horizon)]
        finally:
            self.policy.train(training)
        return torch.stack(actions, dim=1).to(self.device, torch.float32)

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the policy as LeRobot does: configuration, weights and processors, for all of its tools."""
        for part in (self.policy, *self._processors()):
            part.save_pretrained(directory)

    def _processors(self) -> tuple[Any, Any]:
        """LeRobot's pipelines around the policy, for the device that it is on."""
        if self._pipelines is None or self._pipelines[0] != self.device:
            self.lerobot_config.device = self.device.type
            make = _lerobot("policies.factory").make_pre_post_processors
            self._pipelines = (self.device, *make(self.lerobot_config, dataset_stats=_dataset_stats(self.spec)))
        return self._pipelines[1:]


def _lerobot(module: str) -> Any:  # noqa: ANN401
    return import_extra(f"lerobot.{module}", "lerobot")


def _config_class() -> Any:  # noqa: ANN401
    _lerobot("policies")  # registers the policies
    return _lerobot("configs.policies").PreTrainedConfig


def _decode(policy_type: str, options: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """A LeRobot configuration of plain values, by way of the file that LeRobot reads itself."""
    config_class = _config_class()
    known: Sequence[str] = sorted(config_class.get_known_choices())
    if policy_type not in known:
        raise ConfigError(
            "LeRobot has no such policy", where="policy_type", found=policy_type, expected=", ".join(known)
        )
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps({"type": policy_type, **options}))
        try:
            return config_class.from_pretrained(directory)
        except Exception as error:  # draccus raises several of its own, and policies ValueError and others
            raise ConfigError(
                f"LeRobot cannot make a configuration of {policy_type!r}",
                where="config",
                found=f"{type(error).__name__}: {error}",
                expected="options of the policy's LeRobot configuration",
            ) from error


def _encode(config: Any) -> dict[str, Any]:  # noqa: ANN401
    """A LeRobot configuration as plain values, without its type."""
    with TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        values: dict[str, Any] = json.loads((Path(directory) / "config.json").read_text())
    return {key: value for key, value in values.items() if key not in ("type", "pretrained_path")}


def _policy_features(features: Mapping[str, Feature]) -> dict[str, Any]:
    """What LeRobot's `dataset_to_policy_features` makes of a dataset's features."""
    types = _lerobot("configs.types")
    found = {}
    for key, feature in features.items():
        if feature.is_visual:
            height, width, channels = feature.shape
            found[key] = types.PolicyFeature(type=types.FeatureType.VISUAL, shape=(channels, height, width))
        elif key.startswith(("observation", "action")) and feature.dtype != "string":
            kind = "ENV" if key == "observation.environment_state" else "STATE"
            kind = "ACTION" if key.startswith("action") else kind
            found[key] = types.PolicyFeature(type=types.FeatureType(kind), shape=feature.shape)
    return found


def _dataset_stats(spec: PolicySpec) -> dict[str, dict[str, Tensor]]:
    """The statistics in LeRobot's form; pictures have ImageNet's, as in its training script."""
    stats = {
        key: {name: torch.as_tensor(getattr(value, name), dtype=torch.float32) for name in STATISTICS}
        for key, value in spec.stats.items()
    }
    pictures = {name: torch.tensor(values).view(3, 1, 1) for name, values in _IMAGENET.items()}
    return stats | dict.fromkeys(spec.cameras, pictures)


def _with_float_pictures(batch: Mapping[str, Any]) -> Batch:
    """Pictures uint8 to float32 in [0, 1], as LeRobot's script hands them to the processors."""
    return {
        key: value.float() / 255 if isinstance(value, Tensor) and value.dtype == torch.uint8 else value
        for key, value in batch.items()
    }
