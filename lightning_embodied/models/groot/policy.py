"""GR00T N1.5 (arXiv:2503.14734) as a policy to train with Lightning, on packed batches.

NVIDIA pads every prompt to the longest of the batch, and its action head reads the padding as well. Here absent
cameras and padding have no tokens, so a sample's actions do not depend on its neighbours; a batch without padding
gives NVIDIA's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_embodied.errors import ConfigError
from lightning_embodied.models.augmentation import picture_positions
from lightning_embodied.models.checks import check_limit, check_names, check_patches, check_prompt, check_words
from lightning_embodied.models.directory import write_directory
from lightning_embodied.models.flow_module import Velocity
from lightning_embodied.models.groot.action_head import ActionHead, Observed
from lightning_embodied.models.groot.backbone import EagleBackbone
from lightning_embodied.models.groot.directory import GrootDirectory, config_of
from lightning_embodied.models.groot.embodiment import Embodiment
from lightning_embodied.models.groot.qwen3 import Rows
from lightning_embodied.models.groot.sizes import PRESETS, GrootSizes
from lightning_embodied.models.lora import merged_state_dict
from lightning_embodied.models.normalizer import Normalization
from lightning_embodied.models.pretrained import PretrainedPolicy
from lightning_embodied.models.sizes import Preset, preset_sizes
from lightning_embodied.models.spec import PolicySpec
from lightning_embodied.packing import PackedBatch

Part = Literal["vision", "language", "head"]
_PROMPTS = ("eagle", "pi0")
"""Those without a state token: the head reads the state. `pi0` is the bare instruction, for training from scratch."""


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
        denoising_steps: Euler steps from noise to actions at inference.
        learning_rate: Peak learning rate.
        state_normalization: How states are scaled; NVIDIA scales to the range of the data.
        action_normalization: How actions are scaled; likewise.
        kwargs: Options of `FlowMatchingModule` and `PolicyModule`.

    Attributes:
        network_sizes: The sizes that `preset` and `sizes` come to.
        model: The network; its parameters have NVIDIA's names.
    """

    noise_time = 0
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
        denoising_steps: int = 4,
        learning_rate: float = 1e-4,
        state_normalization: Normalization = "min_max",
        action_normalization: Normalization = "min_max",
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(
            pretrained=pretrained,
            denoising_steps=denoising_steps,
            learning_rate=learning_rate,
            state_normalization=state_normalization,
            action_normalization=action_normalization,
            **kwargs,
        )
        self.network_sizes = preset_sizes(PRESETS, preset, sizes)
        self.embodiment_id = embodiment_id
        self.tune_llm, self.tune_visual = tune_llm, tune_visual
        self.tune_projector, self.tune_diffusion_model = tune_projector, tune_diffusion_model
        self.activation_checkpointing = tuple(activation_checkpointing)
        check_names(f"{type(self).__name__}(activation_checkpointing=…)", activation_checkpointing, get_args(Part))
        self._check_embodiments()

    @classmethod
    def open_directory(cls, path: str | PathLike[str], revision: str | None = None) -> GrootDirectory:
        """The reader of a GR00T N1.5 checkpoint directory."""
        return GrootDirectory(path, revision)

    def check_spec(self, spec: PolicySpec) -> None:
        """Raises `ConfigError` if samples are encoded otherwise than the network reads them."""
        sizes, head = self.network_sizes, self.network_sizes.head
        check_prompt(self.encoder, _PROMPTS)
        check_patches(self.encoder, sizes.vision)
        mend = "pretrained weights need Eagle's tokenizer, which is Qwen's with a few tokens more"
        check_words(self.encoder, "language.vocab_size", sizes.language.vocab_size, mend)
        check_limit("actions a chunk", spec.action_horizon, "head.max_seq_len", head.max_seq_len)
        check_limit("action dimensions", self.action_normalizer.dim, "head.max_action_dim", head.max_action_dim)
        check_limit("state dimensions", self.state_normalizer.dim, "head.max_state_dim", head.max_state_dim)

    def _check_embodiments(self) -> None:
        given, limit = self.embodiment_id, self.network_sizes.head.max_num_embodiments
        numbers = given if isinstance(given, Sequence) else [given]
        if not numbers or any(type(number) is not int or not 0 <= number < limit for number in numbers):
            raise ConfigError(
                "the action head knows no such robot",
                where=f"{type(self).__name__}(embodiment_id=…)",
                found=given,
                expected=f"numbers from 0 to {limit - 1} (sizes: head.max_num_embodiments)",
            )

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

    def observe(self, batch: PackedBatch) -> Velocity:
        """Runs backbone, keys and values; see `FlowMatchingModule`."""
        return partial(self.velocity, self.encode(batch))

    def encode(self, batch: PackedBatch) -> Observed:
        """All that the DiT reads of a batch's pictures, prompts and states."""
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

    def velocity(self, observed: Observed, noisy: Tensor, time: Tensor) -> Tensor:
        """Velocities of noisy chunks `[B, R, H, max_action_dim]` at flow times `[B, R]`, shaped like the chunks."""
        head = self.model.action_head
        velocity: Tensor = head(observed, noisy, head.discretize(time))
        return velocity

    @property
    def action_width(self) -> int:
        """Width of the action vectors inside the network."""
        return self.network_sizes.head.max_action_dim

    def sample_time(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Draws flow times as the checkpoint's configuration says."""
        return self.model.action_head.sample_time(shape, device)

    def save_pretrained(self, path: str | PathLike[str]) -> None:
        """Writes the weights as a checkpoint directory under NVIDIA's names, adapters merged.

        Args:
            path: The directory; made if it does not exist. Files of an earlier checkpoint in it are replaced.
        """
        tensors = merged_state_dict(self.model)
        del tensors["backbone.eagle_model.language_model.lm_head.weight"]  # is the token embedding
        horizon = None if self._spec is None else self._spec.action_horizon
        write_directory(path, tensors, config_of(self.network_sizes, self.denoising_steps, horizon))
