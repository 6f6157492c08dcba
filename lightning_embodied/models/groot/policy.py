"""GR00T N1.5 (arXiv:2503.14734) as a policy to train with Lightning, on packed batches.

NVIDIA pads every prompt to the longest of the batch, and its action head reads the padding as well. Here absent
cameras and padding have no tokens, so a sample's actions do not depend on its neighbours; a batch without padding
gives NVIDIA's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_embodied.models.augmentation import picture_positions
from lightning_embodied.models.directory import write_directory
from lightning_embodied.models.groot.action_head import ActionHead, Observed, interpolate
from lightning_embodied.models.groot.backbone import EagleBackbone
from lightning_embodied.models.groot.checks import check_encoder, check_options
from lightning_embodied.models.groot.directory import GrootDirectory, config_of
from lightning_embodied.models.groot.embodiment import Embodiment
from lightning_embodied.models.groot.qwen3 import Rows
from lightning_embodied.models.groot.sizes import GrootSizes, Preset
from lightning_embodied.models.lora import merged_state_dict
from lightning_embodied.models.loss import LossTerms
from lightning_embodied.models.module import Generators
from lightning_embodied.models.normalizer import Normalization
from lightning_embodied.models.pretrained import PretrainedPolicy
from lightning_embodied.models.spec import PolicySpec
from lightning_embodied.packing import PackedBatch

Part = Literal["vision", "language", "head"]


class GrootNetwork(nn.Module):
    """Backbone and action head under the names of NVIDIA's checkpoints.

    Args:
        sizes: Of both.
    """

    def __init__(self, sizes: GrootSizes) -> None:
        super().__init__()
        self.backbone = EagleBackbone(sizes.vision, sizes.language)
        self.action_head = ActionHead(sizes.head)


class GrootN15Policy(PretrainedPolicy):
    """GR00T N1.5: a vision-language backbone and a flow-matching action head for many robots.

    Give the encoder `prompt: eagle`.

    Args:
        preset: Sizes of the network: `base` are the published ones (2.4 billion parameters), `tiny` trains on a CPU.
        sizes: Values to change in the preset: mappings for `vision` (`SiglipConfig`), `language` (`Qwen3Sizes`) and
            `head` (`ActionHeadSizes`).
        pretrained: Directory or hub id of a GR00T N1.5 checkpoint to start from. The checkpoints that training writes
            hold all weights: `load_policy` needs the directory no more, only resuming looks for it again.
        embodiment_id: Which of the head's robots the data are of: one number, or one for each dataset of a mixture, of
            which acting takes the first. 31 is NVIDIA's number for a robot of your own.
        tune_llm: Whether the language model trains.
        tune_visual: Whether the vision tower and the layer behind it train.
        tune_projector: Whether the state and action encoders, the action decoder and the action positions train.
        tune_diffusion_model: Whether the DiT trains.
        activation_checkpointing: Parts whose activations are computed again in the backward pass instead of kept.
        noise_samples_per_observation: Noise and time draws per observation and step; they share the backbone, so each
            further draw costs only the DiT.
        denoising_steps: Euler steps from noise to actions at inference.
        learning_rate: Peak learning rate.
        state_normalization: How states are scaled; NVIDIA scales to the range of the data.
        action_normalization: How actions are scaled; likewise.
        kwargs: Options of `PolicyModule`.

    Attributes:
        network_sizes: The sizes that `preset` and `sizes` come to.
        model: The network; its parameters have NVIDIA's names.
    """

    model: GrootNetwork

    def __init__(
        self,
        *,
        preset: Preset = "base",
        sizes: dict[str, Any] | None = None,
        pretrained: str | None = None,
        embodiment_id: int | list[int] = 31,
        tune_llm: bool = False,
        tune_visual: bool = True,
        tune_projector: bool = True,
        tune_diffusion_model: bool = True,
        activation_checkpointing: Sequence[Part] = (),
        noise_samples_per_observation: int = 1,
        denoising_steps: int = 4,
        learning_rate: float = 1e-4,
        state_normalization: Normalization = "min_max",
        action_normalization: Normalization = "min_max",
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(
            pretrained=pretrained,
            learning_rate=learning_rate,
            state_normalization=state_normalization,
            action_normalization=action_normalization,
            **kwargs,
        )
        self.network_sizes = GrootSizes.of(preset, sizes)
        self.embodiment_id = embodiment_id
        self.tune_llm, self.tune_visual = tune_llm, tune_visual
        self.tune_projector, self.tune_diffusion_model = tune_projector, tune_diffusion_model
        self.activation_checkpointing = tuple(activation_checkpointing)
        self.noise_samples_per_observation = noise_samples_per_observation
        self.denoising_steps = denoising_steps
        check_options(self)

    @classmethod
    def open_directory(cls, path: str | PathLike[str], revision: str | None = None) -> GrootDirectory:
        """The reader of a GR00T N1.5 checkpoint directory."""
        return GrootDirectory(path, revision)

    def check_spec(self, spec: PolicySpec) -> None:
        """Raises `ConfigError` if samples are encoded otherwise than the network reads them."""
        check_encoder(self, spec)

    def make_network(self) -> GrootNetwork:
        """The network with random weights."""
        return GrootNetwork(self.network_sizes)

    def prepare_network(self) -> None:
        """Freezes what is not tuned."""
        eagle, head = self.model.backbone.eagle_model, self.model.action_head
        eagle.vision_model.recompute_activations("vision" in self.activation_checkpointing)
        eagle.language_model.recompute_activations("language" in self.activation_checkpointing)
        head.model.recompute = "head" in self.activation_checkpointing
        parts = (
            (self.tune_llm, (eagle.language_model,)),
            (self.tune_visual, (eagle.vision_model, eagle.mlp1)),
            (self.tune_projector,
             (head.state_encoder, head.action_encoder, head.action_decoder, head.position_embedding)),
            (self.tune_diffusion_model, (head.model,)),
        )  # fmt: skip
        for tune, modules in parts:
            for module in () if tune else modules:
                module.requires_grad_(False)
        self.train(self.training)

    def freeze_unread(self) -> None:
        """Lets nothing train that nothing reads: the vision tower's pooling head and adapters of the language head."""
        eagle = self.model.backbone.eagle_model
        for name, parameter in eagle.named_parameters():
            if "vision_model.vision_model.head." in name or "lm_head.lora_" in name:
                parameter.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        """Training mode; a DiT that does not train drops nothing either."""
        super().train(mode)
        if not self.tune_diffusion_model and hasattr(self, "model"):
            self.model.action_head.model.eval()
        return self

    def observe(self, batch: PackedBatch) -> Observed:
        """All that the DiT reads of a batch's pictures, prompts and states; computed once for all draws and steps."""
        sizes, rows = self.network_sizes, Rows(batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
        features = self.model.backbone(
            batch.input_ids.clamp(max=sizes.language.vocab_size - 1),  # placeholders of pictures lie above
            batch.pixel_values.float() * (2 / 255) - 1,
            picture_positions(batch, self.encoder),
            rows,
        )
        state = self.normalized_state(batch)
        state = F.pad(state, (0, sizes.head.max_state_dim - state.shape[-1]))
        return self.model.action_head.observe(features, rows, state, self.embodiments(batch))

    def embodiments(self, batch: PackedBatch) -> Embodiment:
        """Which of the head's robots the samples are of."""
        if isinstance(self.embodiment_id, Sequence):
            numbers = torch.tensor(self.embodiment_id, device=batch.dataset.device)
            return numbers[batch.dataset]
        return self.embodiment_id

    def forward(self, batch: PackedBatch, noise: Tensor | None = None, time: Tensor | None = None) -> LossTerms:
        """Squared error of the velocity over the action dimensions that the data has.

        Args:
            batch: `B` samples.
            noise: `[B, R, H, max_action_dim]`, `R` draws per sample; default: drawn.
            time: `[B, R]`, flow times from 0 (noise) to 1; default: drawn.
        """
        head = self.model.action_head
        actions = self.normalized_actions(batch)[:, None]
        dim = actions.shape[-1]
        actions = F.pad(actions, (0, self.network_sizes.head.max_action_dim - dim))
        draws = (batch.batch_size, self.noise_samples_per_observation)
        if noise is None:
            noise = torch.randn(*draws, *actions.shape[2:], device=actions.device, dtype=actions.dtype)
        if time is None:
            time = head.sample_time(draws, actions.device)
        velocity = head(self.observe(batch), interpolate(actions, noise, time), head.discretize(time))
        losses = (velocity - (actions - noise)).square()[..., :dim]
        return LossTerms.of_actions(losses, batch.action_is_pad, batch.loss_weight)

    def sample_actions(
        self, batch: PackedBatch, *, generator: Generators | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """Denoises action chunks; backbone, keys and values are computed once for all steps.

        Args:
            batch: `B` observations.
            generator: Source of the noise, one generator or one a row; default: see `sampling_seed`.
            noise: `[B, H, max_action_dim]` to start from, in place of a draw.

        Returns:
            Normalised actions float32 `[B, H, A]`.
        """
        if noise is None:
            noise = self.initial_noise(batch.batch_size, generator, self.network_sizes.head.max_action_dim)
        actions = self.model.action_head.denoise(self.observe(batch), noise, self.denoising_steps)
        return actions[..., : self.action_normalizer.dim]

    def save_pretrained(self, path: str | PathLike[str]) -> None:
        """Writes the weights as a checkpoint directory under NVIDIA's names, adapters merged.

        Args:
            path: The directory; made if it does not exist. Files of an earlier checkpoint in it are replaced.
        """
        tensors = merged_state_dict(self.model)
        del tensors["backbone.eagle_model.language_model.lm_head.weight"]  # is the token embedding
        horizon = None if self._spec is None else self._spec.action_horizon
        write_directory(path, tensors, config_of(self.network_sizes, self.denoising_steps, horizon))
