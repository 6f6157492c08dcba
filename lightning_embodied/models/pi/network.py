"""The network of pi0 and pi0.5: SigLIP, Gemma over pictures and prompt, and a Gemma action expert reading its keys.

Names and shapes of the parameters are openpi's and LeRobot's, formulas too (arXiv:2410.24164, arXiv:2504.16054). The
prefix is packed, never sees the actions and is computed once; of its last layer only keys and values are ever read,
so only they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_embodied.attention import PrefixSuffixLayout, varlen_attention
from lightning_embodied.models.layers import time_embedding
from lightning_embodied.models.pi.gemma import Gemma
from lightning_embodied.models.pi.precision import at_least_float32, full_precision, to_compute_dtype
from lightning_embodied.models.pi.sizes import PiSizes
from lightning_embodied.models.prefix import KeyValue, PrefixOrder
from lightning_embodied.models.recompute import run_layer
from lightning_embodied.models.rotary import rotation_of
from lightning_embodied.models.siglip import SiglipVisionModel


class PiNetwork(nn.Module):
    """pi0.5 if `adaptive` (flow time through adaptive norms, state in the prompt), else pi0 (both as suffix tokens).

    The parameters nobody reads (`unread_parameters`) exist so that checkpoints load by name; they do not train.

    Args:
        sizes: Of all parts.
        adaptive: Which of the two.
    """

    def __init__(self, sizes: PiSizes, *, adaptive: bool) -> None:
        super().__init__()
        self.adaptive = adaptive
        width = sizes.expert.width
        projector = nn.Linear(sizes.vision.hidden_size, sizes.language.width)
        paligemma = nn.ModuleDict(
            {
                "vision_tower": SiglipVisionModel(sizes.vision),
                "multi_modal_projector": nn.ModuleDict({"linear": projector}),
                "language_model": Gemma(sizes.language, vocab_size=sizes.vocab_size),
            }
        )
        self.paligemma_with_expert = nn.ModuleDict(
            {
                "paligemma": nn.ModuleDict({"model": paligemma}),
                "gemma_expert": nn.ModuleDict({"model": Gemma(sizes.expert, adaptive=adaptive)}),
            }
        )
        self.action_in_proj = nn.Linear(sizes.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, sizes.max_action_dim)
        if adaptive:
            self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(sizes.max_state_dim, width)
            self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)
        self.freeze_unread()

    def freeze_unread(self) -> None:
        """Lets nothing train that nothing reads, adapters in the last prefix layer included."""
        for name in self.unread_parameters:
            self.get_parameter(name).requires_grad_(False)

    @property
    def paligemma(self) -> nn.ModuleDict:
        """Everything that makes the prefix."""
        return cast(nn.ModuleDict, self.get_submodule("paligemma_with_expert.paligemma.model"))

    @property
    def vision(self) -> SiglipVisionModel:
        """The picture tower."""
        return cast(SiglipVisionModel, self.paligemma["vision_tower"])

    @property
    def language(self) -> Gemma:
        """The transformer over pictures and prompt."""
        return cast(Gemma, self.paligemma["language_model"])

    @property
    def expert(self) -> Gemma:
        """The transformer over actions."""
        return cast(Gemma, self.get_submodule("paligemma_with_expert.gemma_expert.model"))

    @property
    def unread_parameters(self) -> list[str]:
        """Names of the parameters whose value changes no output: the last prefix layer behind keys and values."""
        last = self.language.layers[-1]
        read = ("input_layernorm.", "self_attn.k_proj.", "self_attn.v_proj.")
        unread = [f"layers.{len(self.language.layers) - 1}.{name}" for name, _ in last.named_parameters()
                  if not name.startswith(read)]  # fmt: skip
        return [f"paligemma_with_expert.paligemma.model.language_model.{name}" for name in (*unread, "norm.weight")]

    def embed_pictures(self, pixel_values: Tensor) -> Tensor:
        """Pictures `[N, 3, H, W]`, levels 0 to 255, to `[N, P, width]`."""
        features = self.vision(pixel_values.float() * (2 / 255) - 1)
        embedded: Tensor = self.paligemma.get_submodule("multi_modal_projector.linear")(features)
        return embedded

    def encode_prefix(self, tokens: Tensor, order: PrefixOrder) -> list[KeyValue]:
        """Embedded tokens `[T, width]` of a batch, in an order, to keys and values of every layer in that order."""
        cu_seqlens, longest = order.cu_seqlens, order.max_seqlen
        x = to_compute_dtype(tokens.index_select(0, order.rows))
        rotation = rotation_of(order.position_ids, self.language.head_dim)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return varlen_attention(query, key, value, cu_seqlens, cu_seqlens, longest, longest)

        cache: list[KeyValue] = []
        for layer in self.language.layers[:-1]:
            x, key_value = run_layer(layer, x, rotation, attend, recompute=self.language.recompute)
            cache.append(key_value)
        return [*cache, self.language.layers[-1](x, rotation, None)[1]]

    def velocity(
        self,
        noisy: Tensor,
        time: Tensor,
        cache: Sequence[KeyValue],
        layout: PrefixSuffixLayout,
        state: Tensor,
    ) -> Tensor:
        """Velocities of noisy action chunks.

        Args:
            noisy: `[N, H, max_action_dim]`.
            time: Flow times `[N]`.
            cache: Keys and values of the prefixes.
            layout: Which prefix each chunk reads; blocks `suffix_blocks(H)`.
            state: `[N, max_state_dim]`; pi0.5 has read it in the prompt.

        Returns:
            float32 `[N, H, max_action_dim]`.
        """
        x, condition = self._embed_suffix(noisy, time, state)
        rotation = rotation_of(layout.position_ids, self.expert.head_dim)
        x = to_compute_dtype(x)
        for layer, prefix in zip(self.expert.layers, cache, strict=True):
            attend = partial(_attend, layout, prefix)
            x, _ = run_layer(layer, x, rotation, attend, condition, recompute=self.expert.recompute)
        x, _ = self.expert.norm(x, condition)
        with full_precision(x):
            out: Tensor = self.action_out_proj(x[:, -noisy.shape[1] :].to(self.action_out_proj.weight.dtype))
        return at_least_float32(out)

    def suffix_blocks(self, horizon: int) -> list[int]:
        """Blocks of a suffix with `horizon` actions: pi0's state token comes first and does not see the actions."""
        return [horizon] if self.adaptive else [1, horizon]

    def _embed_suffix(self, noisy: Tensor, time: Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """Suffix tokens `[N, S, width]` and, for adaptive norms, their condition `[N, width]`."""
        dtype, width = self.action_in_proj.weight.dtype, self.action_in_proj.out_features
        with full_precision(noisy):
            actions = self.action_in_proj(noisy.to(dtype))
            times = time_embedding(time, width).to(dtype)
            if self.adaptive:
                return actions, F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(times))))
            joined = torch.cat((actions, times[:, None].expand_as(actions)), dim=-1)
            actions = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(joined)))
            return torch.cat((self.state_proj(state.to(dtype))[:, None], actions), dim=1), None


def _attend(layout: PrefixSuffixLayout, prefix: KeyValue, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return layout.attend(query, prefix, (key, value))
