"""`PolicyModule`: the LightningModule to subclass for a policy that maps observations to action chunks.

A subclass says what it is made of (`build`), its loss (`forward`) and how it acts (`sample_actions`), all in
normalised units; units, token path, exact loss mean, optimizer and checkpoints are done here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.features import Feature
from lightning_embodied.models.arguments import plain_arguments
from lightning_embodied.models.augmentation import shift_pictures
from lightning_embodied.models.base import LightningModule
from lightning_embodied.models.checks import check_batch, check_ranges
from lightning_embodied.models.lora import LoRA, add_lora, merge_lora
from lightning_embodied.models.loss import GlobalMean, LossTerms
from lightning_embodied.models.noise import Generators, draw_noise
from lightning_embodied.models.normalizer import Normalization, Normalizer
from lightning_embodied.models.observations import (
    Observations,
    check_environment,
    check_observations,
    observation_keys,
)
from lightning_embodied.models.optimization import adamw, warmup_cosine
from lightning_embodied.models.spec import PolicySpec
from lightning_embodied.packing import PackedBatch, SampleEncoder

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import OptimizerLRScheduler


class PolicyModule(LightningModule):
    """Base of policies; implement `build`, `forward` and `sample_actions`.

    The spec (features, statistics, token path) comes from the DataModule when training starts, from the checkpoint
    when it is loaded, or from `policy.spec = …`. Layers are built in `configure_model`, so sharding strategies work.

    Without `optimizer:` and `lr_scheduler:` sections in the YAML, AdamW with linear warm-up and cosine decay over the
    run is used, with the numbers below.

    Args:
        learning_rate: Peak learning rate.
        weight_decay: AdamW's weight decay, on matrices only.
        warmup: Warm-up as a share of the run (at most 1000 steps).
        final_learning_rate: Learning rate at the end, as a share of the peak.
        state_normalization: How states are scaled (see `Normalizer`).
        action_normalization: How actions are scaled. Sampled actions are not clipped to any bounds.
        image_shift: Largest random shift of training pictures in pixels; 0 for none.
        sampling_seed: Seed of the noise from which actions are sampled when no generator is given: every call and
            every row starts from the same noise, so that acting is a function of the observation alone. `null` draws
            from torch's random state.
        lora: Low-rank adapters: only they train, all other weights are frozen. `target_modules` are patterns of the
            linear layers to adapt (`*.q_proj`), `rank` (8) and `alpha` (16) their size and strength, `also_train`
            patterns of parameters that train beside them.

    Attributes:
        batch_type: What the loader must give.
    """

    batch_type: ClassVar[type] = PackedBatch
    encoder: SampleEncoder
    state_normalizer: Normalizer
    action_normalizer: Normalizer

    def __init__(
        self,
        *,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        warmup: float = 0.05,
        final_learning_rate: float = 0.02,
        state_normalization: Normalization = "quantile",
        action_normalization: Normalization = "quantile",
        image_shift: int = 0,
        sampling_seed: int | None = 0,
        lora: LoRA | None = None,
    ) -> None:
        super().__init__()
        # The subclass's arguments as well; not what LightningCLI adds, so that they are arguments and nothing else.
        self.save_hyperparameters(ignore=["_class_path", "_instantiator"])
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.final_learning_rate = final_learning_rate
        self.state_normalization = state_normalization
        self.action_normalization = action_normalization
        self.image_shift = image_shift
        check_ranges(self, learning_rate=inf, weight_decay=inf, warmup=1, final_learning_rate=inf, image_shift=inf)
        self.sampling_seed = sampling_seed
        self.lora = lora
        self._spec: PolicySpec | None = None
        self._built = False
        self._global_mean = GlobalMean()

    # What a subclass implements.

    @abstractmethod
    def build(self, spec: PolicySpec) -> None:
        """Creates the layers. `self.encoder` and the normalisers exist already."""

    @abstractmethod
    def forward(self, batch: PackedBatch) -> LossTerms:
        """The loss of a batch, summed (see `LossTerms.of_actions`)."""

    @abstractmethod
    def sample_actions(self, batch: PackedBatch, *, generator: Generators | None = None) -> Tensor:
        """Normalised action chunks `[B, H, A]` for a batch whose `actions` are empty."""

    # What it may use.

    def normalized_state(self, batch: PackedBatch) -> Tensor:
        """States of the batch, about unit size and within ±10 even where training never went: float32 `[B, D]`."""
        return self.state_normalizer.normalize(batch.state).clamp(-10, 10)

    def normalized_actions(self, batch: PackedBatch) -> Tensor:
        """Action chunks of the batch, about unit size: float32 `[B, H, A]`."""
        return self.action_normalizer.normalize(batch.actions)

    def initial_noise(
        self, batch_size: int, generator: Generators | None = None, action_dim: int | None = None
    ) -> Tensor:
        """Standard normal noise `[batch_size, H, A]` to sample actions from; see `sampling_seed`.

        It is drawn on the CPU (or the generator's device), so that it is the same wherever the policy runs. `A` is
        that of the data unless `action_dim` says otherwise.
        """
        shape = (self.spec.action_horizon, action_dim or self.action_normalizer.dim)
        return draw_noise(batch_size, shape, generator, self.sampling_seed).to(self.device)

    # Acting.

    @property
    def observation_keys(self) -> tuple[str, ...]:
        """Keys that `predict_action_chunk` reads; cameras among them may be absent."""
        return observation_keys(self.spec)

    @torch.no_grad()
    def predict_action_chunk(self, observations: Observations, *, generator: Generators | None = None) -> Tensor:
        """Chooses the next actions.

        Args:
            observations: `observation.images.<camera>` uint8 `[B, C, H, W]`, state vectors `[B, D]` in the dataset's
                units, `task`: list of `B` instructions; on any device. A camera that is missing is left out.
            generator: Source of the sampling noise, one generator or one a row; default: see `sampling_seed`.

        Returns:
            float32 `[B, H, A]` in the dataset's units, on the policy's device, not clipped.

        Raises:
            ConfigError: An observation is unknown, missing or has another layout; names its key.
        """
        kept = check_observations(self.spec, observations)
        batch = self.encoder.encode_observations(kept).to(self.device)
        return self.action_normalizer.unnormalize(self.sample_actions(batch, generator=generator))

    def check_environment(self, features: Mapping[str, Feature]) -> None:
        """Raises `CheckpointError` unless an environment has the features this policy needs; names the first."""
        check_environment(self.spec, features)

    # Lightning's hooks.

    @property
    def spec(self) -> PolicySpec:
        """What the policy knows of its data.

        Raises:
            ConfigError: It is not known yet.
        """
        if self._spec is None:
            raise ConfigError(
                "the policy does not know its data yet",
                where=type(self).__name__,
                mend="train it with a DataModule, load it with `load_policy`, or set `policy.spec`",
            )
        return self._spec

    @spec.setter
    def spec(self, spec: PolicySpec) -> None:
        self._spec = spec

    def setup(self, stage: str) -> None:
        """Takes the spec from the DataModule; one from a checkpoint stays, and the statistics with it."""
        self._find_spec()
        self._adopt_data()
        plain_arguments(self)  # refuse now what no checkpoint could hold

    def configure_model(self) -> None:
        """Builds normalisers and layers once the spec is known (Lightning may call this more than once)."""
        self._find_spec()
        if self._built or self._spec is None:
            return
        self.encoder = SampleEncoder.from_config(self._spec.encoder)
        stats = self._spec.stats_of
        self.state_normalizer = Normalizer(stats(self._spec.state_keys), self.state_normalization)
        self.action_normalizer = Normalizer(stats((self._spec.action_key,)), self.action_normalization)
        self.build(self._spec)
        if self.lora is not None:
            add_lora(self, self.lora)
        self._built = True

    def merge_lora(self) -> None:
        """Makes the adapters part of the weights, for acting and export: same actions, no adapters left."""
        merge_lora(self)
        self.lora = self.hparams["lora"] = None

    def _find_spec(self) -> None:
        # Callbacks such as WeightAveraging call `configure_model` before this module's `setup`.
        if self._spec is None and self._trainer is not None:
            datamodule = getattr(self._trainer, "datamodule", None)
            if datamodule is None:
                raise ConfigError(
                    "the policy does not know its data",
                    where=f"Trainer with {type(self).__name__}",
                    found="no DataModule",
                    mend="pass `datamodule=`, or a policy from `load_policy`, or set `policy.spec`",
                )
            self._spec = self._read_spec(datamodule)

    def _adopt_data(self) -> None:
        datamodule = getattr(self._trainer, "datamodule", None)
        if datamodule is not None:
            self.spec.adopt(datamodule)

    def _read_spec(self, datamodule: object) -> PolicySpec:
        return PolicySpec.from_datamodule(datamodule)

    def on_fit_start(self) -> None:
        """Forgets an accumulation window that an interrupted run left open."""
        self._global_mean.reset()

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        """One micro-batch; its gradient becomes part of the global mean over valid targets.

        Raises:
            ConfigError: The loader makes batches of another kind.
        """
        check_batch(self, batch, self.batch_type)
        if self.image_shift:
            batch = shift_pictures(batch, self.encoder, self.image_shift, self.global_step)
        terms = self(batch)
        self.log("train/loss", terms.mean, prog_bar=True, batch_size=batch.batch_size)
        return self._global_mean.step(terms, self._mean_over_ranks)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts accumulated gradients right; Lightning calls this before it clips them."""
        self._global_mean.rescale(self.parameters(), self.trainer.accumulate_grad_batches, self._mean_over_ranks)

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        """Logs `val/loss`, the mean over all valid targets, with the same noise draws every time."""
        check_batch(self, batch, self.batch_type)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(batch_idx)
            terms = self(batch)
        count = int(terms.count)
        if count:
            self.log("val/loss", terms.mean, prog_bar=True, batch_size=count, on_epoch=True, sync_dist=True)

    def _mean_over_ranks(self, value: Tensor) -> Tensor:
        return cast(Tensor, self.trainer.strategy.reduce(value, reduce_op="mean"))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with warm-up and cosine decay over the run."""
        from lightning.pytorch.plugins.precision import MixedPrecision

        fused = not isinstance(self.trainer.precision_plugin, MixedPrecision)
        optimizer = adamw(self.parameters(), self.learning_rate, self.weight_decay, fused=fused)
        total = self.trainer.estimated_stepping_batches
        schedule = warmup_cosine(optimizer, total, self.warmup, self.final_learning_rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what `load_policy` needs: the spec, the class and its arguments, as plain values."""
        checkpoint["policy_spec"] = self.spec.to_dict()
        checkpoint["policy_class"] = {
            "class_path": f"{type(self).__module__}.{type(self).__qualname__}",
            "init_args": plain_arguments(self),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes the spec from the checkpoint and, if nothing is built yet, builds from it."""
        if "policy_spec" in checkpoint:
            self._spec = PolicySpec.from_dict(checkpoint["policy_spec"])
            self._adopt_data()
        self.configure_model()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: ANN401
        """Takes weights, as any module.

        Raises:
            CheckpointError: They are of a policy of other sizes; names the first that do not fit.
        """
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines()[1:]]
            raise CheckpointError(
                "the weights do not fit the policy",
                where=type(self).__name__,
                found=f"{lines[0][:300]}{' …' if len(lines) > 1 else ''}" if lines else error,
                mend="give the policy the arguments that the checkpoint was made with",
            ) from error
