"""The transformers of GR00T's action head: a DiT over action tokens, and self-attention over what the backbone saw.

Both are diffusers' `BasicTransformerBlock` with GR00T's options (arXiv:2503.14734; module names as in NVIDIA's
checkpoints). In the DiT every other layer attends to the backbone's features instead of its own tokens; their keys and
values do not depend on flow time, so they are computed once for all denoising steps and noise draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_embodied.attention import varlen_attention
from lightning_embodied.models.groot.embodiment import sinusoids
from lightning_embodied.models.prefix import KeyValue
from lightning_embodied.models.recompute import run_layer

TIME_FEATURES = 256


@dataclass(frozen=True)
class TransformerSizes:
    """Sizes of one of the transformers.

    Attributes:
        num_layers: Number of layers.
        num_attention_heads: Attention heads of a layer.
        attention_head_dim: Width of a head; heads times this is the width of the tokens.
        dropout: Share of activations dropped in training.
    """

    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    dropout: float = 0.2

    @property
    def width(self) -> int:
        """Width of the tokens."""
        return self.num_attention_heads * self.attention_head_dim


@dataclass(frozen=True)
class Segments:
    """Which rows of queries see which rows of keys, as `varlen_attention` takes it."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def equal(cls, count: int, length: int, device: torch.device) -> Segments:
        """`count` sequences of one length that see themselves."""
        cu_seqlens = torch.arange(count + 1, dtype=torch.int32, device=device) * length
        return cls(cu_seqlens, cu_seqlens, length, length)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[Tq, heads, D]`, `[Tk, heads, D]` twice, to `[Tq, heads, D]`."""
        return varlen_attention(
            query, key, value, self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k
        )


class Attention(nn.Module):
    """Attention with biases, over its own tokens or over others of another width.

    Args:
        sizes: Of the transformer.
        context_width: Width of the tokens that keys and values are of; None for its own tokens.
    """

    def __init__(self, sizes: TransformerSizes, context_width: int | None) -> None:
        super().__init__()
        self.heads = sizes.num_attention_heads
        self.to_q = nn.Linear(sizes.width, sizes.width)
        self.to_k = nn.Linear(context_width or sizes.width, sizes.width)
        self.to_v = nn.Linear(context_width or sizes.width, sizes.width)
        self.to_out = nn.ModuleList((nn.Linear(sizes.width, sizes.width), nn.Dropout(sizes.dropout)))

    def context(self, tokens: Tensor) -> KeyValue:
        """Keys and values `[T, heads, D]` of `[T, width]`."""
        key, value = (layer(tokens).unflatten(-1, (self.heads, -1)) for layer in (self.to_k, self.to_v))
        return key, value

    def forward(self, tokens: Tensor, segments: Segments, context: KeyValue | None) -> Tensor:
        """`[..., width]` to the same; `context` are the keys and values of other tokens."""
        rows = tokens.flatten(0, -2)
        query = self.to_q(rows).unflatten(-1, (self.heads, -1))
        attended = segments.attend(query, *(context or self.context(rows)))
        out: Tensor = self.to_out[1](self.to_out[0](attended.flatten(1)))
        return out.view_as(tokens)


class _GELU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.gelu(self.proj(tokens), approximate="tanh")


class _FeedForward(nn.Module):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        width, drop = sizes.width, sizes.dropout
        self.net = nn.Sequential(
            _GELU(width, 4 * width), nn.Dropout(drop), nn.Linear(4 * width, width), nn.Dropout(drop)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.net(tokens)
        return out


class AdaptiveNorm(nn.Module):
    """Layer norm whose scale and shift follow from the flow time.

    Args:
        width: Width of tokens and condition.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """`[N, S, width]` under `[N, width]`."""
        scale, shift = self.linear(F.silu(condition))[:, None].chunk(2, dim=-1)
        return modulate(tokens, scale, shift, epsilon=1e-5)


class Block(nn.Module):
    """Attention and MLP, each behind a norm.

    Args:
        sizes: Of the transformer.
        context_width: As in `Attention`.
        adaptive: Whether the first norm follows the flow time and the second has no weights (DiT), or both are
            ordinary layer norms.
    """

    def __init__(self, sizes: TransformerSizes, context_width: int | None, adaptive: bool) -> None:
        super().__init__()
        self.norm1 = AdaptiveNorm(sizes.width) if adaptive else nn.LayerNorm(sizes.width)
        self.attn1 = Attention(sizes, context_width)
        self.norm3 = nn.LayerNorm(sizes.width, elementwise_affine=not adaptive)
        self.ff = _FeedForward(sizes)
        self.final_dropout = nn.Dropout(sizes.dropout)

    def forward(self, tokens: Tensor, segments: Segments, context: KeyValue | None, *condition: Tensor) -> Tensor:
        """`[..., width]` to the same; `context` as in `Attention`, `condition` belongs to the adaptive norm."""
        attended = self.attn1(self.norm1(tokens, *condition), segments, context)
        tokens = tokens + self.final_dropout(attended)
        result: Tensor = tokens + self.ff(self.norm3(tokens))
        return result


class SelfAttention(nn.Module):
    """A plain transformer over the backbone's packed features.

    Args:
        sizes: Of the transformer.
    """

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(Block(sizes, None, adaptive=False) for _ in range(sizes.num_layers))

    def forward(self, tokens: Tensor, segments: Segments) -> Tensor:
        """`[T, width]` to the same."""
        for block in self.transformer_blocks:
            tokens = block(tokens, segments, None)
        return tokens


class DiT(nn.Module):
    """Action tokens under a flow time, with layers that read the backbone's features in between.

    Args:
        sizes: Of the transformer.
        context_width: Width of the backbone's features.
        output_dim: Width of the result.

    Attributes:
        recompute: Keep no activations of the layers, compute them again in the backward pass.
    """

    def __init__(self, sizes: TransformerSizes, context_width: int, output_dim: int) -> None:
        super().__init__()
        width = sizes.width
        self.recompute = False
        self.timestep_encoder = _TimestepEncoder(width)
        self.transformer_blocks = nn.ModuleList(
            Block(sizes, None if index % 2 else context_width, adaptive=True) for index in range(sizes.num_layers)
        )
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, output_dim)

    def contexts(self, features: Tensor) -> list[KeyValue]:
        """Keys and values of the layers that read `[T, context_width]`, every other one from the first."""
        return [cast(Block, block).attn1.context(features) for block in self.transformer_blocks[::2]]

    def forward(self, tokens: Tensor, timestep: Tensor, contexts: list[KeyValue], reading: Segments) -> Tensor:
        """The transformer.

        Args:
            tokens: `[N, S, width]`.
            timestep: `[N]`, integer flow times.
            contexts: From `contexts`.
            reading: Which rows of tokens read which rows of the context.

        Returns:
            `[N, S, output_dim]`.
        """
        condition = self.timestep_encoder(timestep)
        own = Segments.equal(tokens.shape[0], tokens.shape[1], tokens.device)
        for index, block in enumerate(self.transformer_blocks):
            segments, context = (own, None) if index % 2 else (reading, contexts[index // 2])
            tokens = run_layer(block, tokens, segments, context, condition, recompute=self.recompute)
        shift, scale = self.proj_out_1(F.silu(condition))[:, None].chunk(2, dim=-1)
        result: Tensor = self.proj_out_2(modulate(tokens, scale, shift, epsilon=1e-6))
        return result


class _TimestepEmbedder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(TIME_FEATURES, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.linear_2(F.silu(self.linear_1(features)))
        return out


class _TimestepEncoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.timestep_embedder = _TimestepEmbedder(width)

    def forward(self, timestep: Tensor) -> Tensor:
        sines, cosines = sinusoids(timestep, TIME_FEATURES, TIME_FEATURES // 2 - 1).chunk(2, dim=-1)
        features = torch.cat((cosines, sines), dim=-1)
        out: Tensor = self.timestep_embedder(features.to(self.timestep_embedder.linear_1.weight.dtype))
        return out


def modulate(tokens: Tensor, scale: Tensor, shift: Tensor, epsilon: float) -> Tensor:
    """Layer norm without weights, times `1 + scale`, plus `shift`."""
    return F.layer_norm(tokens, tokens.shape[-1:], eps=epsilon) * (1 + scale) + shift
