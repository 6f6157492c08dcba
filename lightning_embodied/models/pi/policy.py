"""pi0 and pi0.5 as policies to train with Lightning: openpi's weights and numbers on packed batches.

openpi and LeRobot pad every sample to all cameras and the longest prompt, and mask what is not there. Here absent
cameras and padding have no tokens, and several noise draws of an observation read one prefix, in training as in
denoising; the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from lightning_embodied.models.checks import check_limit, check_names, check_patches, check_prompt, check_words
from lightning_embodied.models.flow_module import Velocity
from lightning_embodied.models.normalizer import Normalization
from lightning_embodied.models.pi.directory import PretrainedDirectory
from lightning_embodied.models.pi.export import save_directory
from lightning_embodied.models.pi.network import PiNetwork
from lightning_embodied.models.pi.sizes import PRESETS
from lightning_embodied.models.prefix import Prefix, PrefixOrder
from lightning_embodied.models.pretrained import PretrainedPolicy
from lightning_embodied.models.sizes import Preset, preset_sizes
from lightning_embodied.models.spec import PolicySpec
from lightning_embodied.packing import PackedBatch

Frozen = Literal["nothing", "vision", "prefix"]
Tower = Literal["vision", "language", "expert"]


class PiPolicy(PretrainedPolicy):
    """What pi0 and pi0.5 share; use `Pi0Policy` or `Pi05Policy`.

    Args:
        preset: Sizes of the network: `base` are the published ones (3.4 billion parameters), `tiny` trains on a CPU.
        sizes: Values to change in the preset: `vocab_size`, `max_action_dim`, `max_state_dim`, and mappings for
            `language` and `expert` (`width`, `depth`, `heads`, …: `GemmaSizes`) and `vision` (`SiglipConfig`).
        pretrained: Directory or hub id of a LeRobot or openpi checkpoint to start from. Checkpoints that training
            writes hold all weights: `load_policy` needs the directory no more, only resuming looks for it again.
        freeze: `vision` trains all but the picture tower, `prefix` only the action expert and its projections.
        activation_checkpointing: Towers whose activations are computed again in the backward pass instead of kept.
        learning_rate: Peak learning rate.
        final_learning_rate: Learning rate at the end, as a share of the peak.
        kwargs: Options of `FlowMatchingModule` and `PolicyModule`.

    Attributes:
        network_sizes: The sizes that `preset` and `sizes` come to.
        model: The network; its parameters have the names of openpi and LeRobot.
    """

    lerobot_type: ClassVar[str]
    adaptive: ClassVar[bool]
    model: PiNetwork

    def __init__(
        self,
        *,
        preset: Preset = "base",
        sizes: dict[str, Any] | None = None,
        pretrained: str | None = None,
        freeze: Frozen = "nothing",
        activation_checkpointing: Sequence[Tower] = (),
        learning_rate: float = 2.5e-5,
        final_learning_rate: float = 0.1,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(
            pretrained=pretrained, learning_rate=learning_rate, final_learning_rate=final_learning_rate, **kwargs
        )
        self.network_sizes = preset_sizes(PRESETS, preset, sizes)
        self.freeze_parts = freeze
        self.activation_checkpointing = tuple(activation_checkpointing)
        where = type(self).__name__
        check_names(f"{where}(freeze=…)", [freeze], get_args(Frozen))
        check_names(f"{where}(activation_checkpointing=…)", activation_checkpointing, get_args(Tower))

    @classmethod
    def open_directory(cls, path: str | PathLike[str], revision: str | None = None) -> PretrainedDirectory:
        """The reader of a LeRobot or openpi checkpoint directory."""
        return PretrainedDirectory(path, revision, lerobot_type=cls.lerobot_type)

    def check_spec(self, spec: PolicySpec) -> None:
        """Raises `ConfigError` if samples are encoded otherwise than the network reads them."""
        sizes = self.network_sizes
        check_prompt(self.encoder, ("pi05", "pi0") if self.adaptive else ("pi0",))
        check_patches(self.encoder, sizes.vision)
        mend = "pretrained policies need PaliGemma's tokenizer: `tokenizer: google/paligemma-3b-pt-224`"
        check_words(self.encoder, "vocab_size", sizes.vocab_size, mend)
        check_limit("action dimensions", self.action_normalizer.dim, "max_action_dim", sizes.max_action_dim)
        if not self.adaptive:
            check_limit("state dimensions", self.state_normalizer.dim, "max_state_dim", sizes.max_state_dim)

    def make_network(self) -> PiNetwork:
        """The network with random weights."""
        return PiNetwork(self.network_sizes, adaptive=self.adaptive)

    def prepare_network(self) -> None:
        """Freezes what shall not train."""
        model = self.model
        model.vision.recompute_activations("vision" in self.activation_checkpointing)
        model.language.recompute = "language" in self.activation_checkpointing
        model.expert.recompute = "expert" in self.activation_checkpointing
        frozen = {"nothing": None, "vision": model.vision, "prefix": model.paligemma}[self.freeze_parts]
        if frozen is not None:
            frozen.requires_grad_(False)

    def freeze_unread(self) -> None:
        """Lets nothing train that nothing reads, adapters in the last prefix layer included."""
        self.model.freeze_unread()

    def embed_prefix(self, batch: PackedBatch) -> Tensor:
        """Embeddings `[T, width]` of a batch's pictures and prompts."""
        pictures = self.model.embed_pictures(batch.pixel_values).flatten(0, 1)
        is_picture = (batch.input_ids == self.encoder.image_token_id).to(torch.int8)
        order = is_picture.argsort(stable=True)  # words first; a sort, as `nonzero` would stall a GPU
        words = self.model.language.embed(batch.input_ids[order[: batch.num_tokens - pictures.shape[0]]])
        return torch.cat((words, pictures.to(words.dtype))).index_select(0, order.argsort())

    def encode_prefix(self, batch: PackedBatch) -> Prefix:
        """Keys and values of every layer: all that the action expert reads of pictures and prompts."""
        order = PrefixOrder.of(batch)
        return Prefix(self.model.encode_prefix(self.embed_prefix(batch), order), order.lengths, order.order)

    def observe(self, batch: PackedBatch) -> Velocity:
        """Computes the prefix; see `FlowMatchingModule`."""
        return partial(self.velocity, self.encode_prefix(batch), self.padded_state(batch))

    @property
    def action_width(self) -> int:
        """Width of the action vectors inside the network."""
        return self.network_sizes.max_action_dim

    def padded_state(self, batch: PackedBatch) -> Tensor:
        """Normalised states with zeros behind: float32 `[B, max_state_dim]`; pi0.5 reads none, so `[B, 0]`."""
        if self.adaptive:
            return batch.state[:, :0]
        state = self.normalized_state(batch)
        return F.pad(state, (0, self.network_sizes.max_state_dim - state.shape[-1]))

    def velocity(self, prefix: Prefix, state: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """Velocities of `R` noisy chunks per sample.

        Args:
            prefix: Of `B` samples.
            state: `padded_state`, `[B, …]`.
            noisy: `[B, R, H, max_action_dim]`, in the order of the batch.
            time: `[B, R]`.

        Returns:
            float32, shaped like `noisy`.
        """
        draws, order = noisy.shape[1], prefix.order
        layout = prefix.layout(self.model.suffix_blocks(noisy.shape[2]), draws)
        rows = [part[order].flatten(0, 1) for part in (noisy, time, state[:, None].expand(-1, draws, -1))]
        velocity = self.model.velocity(rows[0], rows[1], prefix.cache, layout, rows[2])
        return velocity.view_as(noisy)[prefix.back]

    def save_pretrained(self, path: str | PathLike[str]) -> None:
        """Writes the weights as a directory that LeRobot's `from_pretrained` reads, and ours.

        Args:
            path: The directory; made if it does not exist. Files of an earlier checkpoint in it are replaced.
        """
        save_directory(self, path, self._spec)


class Pi05Policy(PiPolicy):
    """pi0.5 (arXiv:2504.16054): the state is discretised into the prompt, flow time acts through adaptive norms.

    Give the encoder `prompt: pi05`, or `pi0` for a policy without state. See `PiPolicy` for the arguments.
    """

    lerobot_type = "pi05"
    adaptive = True


class Pi0Policy(PiPolicy):
    """pi0 (arXiv:2410.24164): the state is one token before the actions, flow time is mixed into the action tokens.

    Give the encoder `prompt: pi0`. See `PiPolicy` for the arguments.

    Args:
        state_normalization: How states are scaled.
        action_normalization: How actions are scaled.
        kwargs: Arguments of `PiPolicy` and `PolicyModule`.
    """

    lerobot_type = "pi0"
    adaptive = False

    def __init__(
        self,
        *,
        state_normalization: Normalization = "mean_std",
        action_normalization: Normalization = "mean_std",
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(state_normalization=state_normalization, action_normalization=action_normalization, **kwargs)
