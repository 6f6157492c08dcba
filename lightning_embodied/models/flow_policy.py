"""A small policy of pi0.5's shape, trained from scratch on a laptop in minutes.

Pictures, instruction and state are prefix tokens; an action expert of its own width denoises the action chunk by flow
matching, conditioned on flow time through adaptive RMS norms (arXiv:2504.16054, openpi's `pi0.py`). Unlike pi0.5 the
vision tower is a convolutional stem and the state is one continuous token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_embodied.counts import check_count
from lightning_embodied.models.augmentation import picture_positions
from lightning_embodied.models.flow_module import FlowMatchingModule, Velocity
from lightning_embodied.models.images import ConvStem
from lightning_embodied.models.prefix import Prefix, PrefixOrder
from lightning_embodied.models.sizes import check_divisible
from lightning_embodied.models.spec import PolicySpec
from lightning_embodied.models.transformer import ActionExpert, PrefixTransformer
from lightning_embodied.packing import PackedBatch


class FlowMatchingPolicy(FlowMatchingModule):
    """Small pi0.5-shaped flow-matching policy.

    Args:
        width: Width of the prefix tokens (pictures, instruction, state).
        expert_width: Width of the action tokens.
        depth: Number of layers of both towers.
        heads: Number of attention heads.
        head_dim: Width of a head.
        mlp_ratio: Hidden width of the MLPs over the tower's width.
        stem_channels: Channels of the first convolution of the picture stem.
        kwargs: Options of `FlowMatchingModule` and `PolicyModule`.
    """

    def __init__(
        self,
        *,
        width: int = 128,
        expert_width: int = 96,
        depth: int = 4,
        heads: int = 4,
        head_dim: int = 32,
        mlp_ratio: float = 2.0,
        stem_channels: int = 32,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**kwargs)
        counts = {"width": width, "expert_width": expert_width, "depth": depth, "heads": heads, "head_dim": head_dim,
                  "stem_channels": stem_channels}  # fmt: skip
        for name, value in counts.items():
            check_count(value, f"FlowMatchingPolicy({name}=…)")
        check_divisible((("expert_width", expert_width, "2", 2), ("head_dim", head_dim, "2", 2)), "FlowMatchingPolicy")
        self.width = width
        self.expert_width = expert_width
        self.depth = depth
        self.heads = heads
        self.head_dim = head_dim
        self.mlp_ratio = mlp_ratio
        self.stem_channels = stem_channels

    def build(self, spec: PolicySpec) -> None:
        """Creates both towers and the embeddings of the spec's features."""
        width, encoder = self.width, self.encoder
        self.token_embedding = nn.Embedding(encoder.vocab_size, width)
        if spec.cameras:
            self.image_stem = ConvStem(encoder.patch_size, width, self.stem_channels)
            self.image_positions = nn.Parameter(torch.randn(encoder.tokens_per_image, width) * 0.1)
            self.camera_embedding = nn.Parameter(torch.randn(len(spec.cameras), width) * 0.1)
        if spec.state_keys:
            self.state_in = nn.Sequential(
                nn.Linear(self.state_normalizer.dim, width), nn.SiLU(), nn.Linear(width, width)
            )
        heads = {"depth": self.depth, "heads": self.heads, "head_dim": self.head_dim}
        self.prefix = PrefixTransformer(width=width, mlp_width=int(width * self.mlp_ratio), **heads)
        self.expert = ActionExpert(
            action_dim=self.action_normalizer.dim,
            width=self.expert_width,
            mlp_width=int(self.expert_width * self.mlp_ratio),
            **heads,
        )

    def embed_prefix(self, batch: PackedBatch) -> Tensor:
        """Embeddings `[T, width]` of a batch's pictures, instructions and states."""
        tokens: Tensor = self.token_embedding(batch.input_ids)
        if self.spec.cameras:  # also for a batch without pictures: every rank must use every parameter
            index = self.camera_indices(batch)
            pictures = self.image_stem(batch.pixel_values) + self.image_positions + self.camera_embedding[index, None]
            tokens = tokens.index_copy(0, picture_positions(batch, self.encoder), pictures.flatten(0, 1))
        if self.state_normalizer.dim:
            last = batch.cu_seqlens[1:].long() - 1
            state = self.normalized_state(batch).to(self.token_embedding.weight.dtype)
            tokens = tokens.index_copy(0, last, self.state_in(state).to(tokens.dtype))
        return tokens

    def camera_indices(self, batch: PackedBatch) -> Tensor:
        """Which of the spec's cameras each picture is from: int64 `[N]`."""
        names = {name: index for index, name in enumerate(self.spec.cameras)}
        return torch.tensor([names[key] for key in batch.image_keys], dtype=torch.int64, device=batch.input_ids.device)

    def encode_prefix(self, batch: PackedBatch) -> Prefix:
        """Keys and values of every layer: all that the action expert reads of the observations."""
        order = PrefixOrder.of(batch)
        tokens = self.embed_prefix(batch).index_select(0, order.rows)
        cache = self.prefix(tokens, order.position_ids, order.cu_seqlens, order.max_seqlen)
        return Prefix(cache, order.lengths, order.order)

    def observe(self, batch: PackedBatch) -> Velocity:
        """Computes the prefix; see `FlowMatchingModule`."""
        return partial(self.velocity, self.encode_prefix(batch))

    def velocity(self, prefix: Prefix, noisy: Tensor, time: Tensor) -> Tensor:
        """Velocities of `R` noisy chunks per sample: `[B, R, H, A]` at times `[B, R]` to the same shape."""
        layout = prefix.layout([noisy.shape[2]], noisy.shape[1])
        chunks, times = noisy[prefix.order].flatten(0, 1), time[prefix.order].flatten()
        velocity: Tensor = self.expert(chunks, times, prefix.cache, layout)
        return velocity.view_as(noisy)[prefix.back]
