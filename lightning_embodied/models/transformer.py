"""A prefix transformer and an action expert that reads its keys and values: the two towers of pi0.5, small.

The prefix (pictures, instruction, state) attends to itself in both directions and never to the actions, so it can be
computed first and once: its keys and values serve every noise draw in training and every denoising step at inference.
What the last layer would make of the prefix itself is never read, so it is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_embodied.attention import PrefixSuffixLayout, varlen_attention
from lightning_embodied.models.layers import (
    GatedMLP,
    RotaryEmbedding,
    TimeConditioning,
    modulate,
    rms_norm,
    rotate,
)
from lightning_embodied.models.prefix import KeyValue


class PrefixLayer(nn.Module):
    """One pre-norm transformer layer over packed prefixes, full attention within each sample.

    Args:
        width: Width of the tokens.
        heads: Number of heads.
        head_dim: Width of a head.
        mlp_width: Hidden width of the MLP.
    """

    def __init__(self, *, width: int, heads: int, head_dim: int, mlp_width: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.attention_out = nn.Linear(heads * head_dim, width, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(width))
        self.mlp = GatedMLP(width, mlp_width)

    def forward(self, x: Tensor, rotation: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> tuple[Tensor, KeyValue]:
        """`[T, width]` to the same, and the layer's keys and values `[T, heads, head_dim]`."""
        qkv = self.qkv(rms_norm(x, self.attention_norm)).view(x.shape[0], 3 * self.heads, self.head_dim)
        query_key, value = qkv.split_with_sizes((2 * self.heads, self.heads), dim=1)
        query, key = rotate(query_key, rotation).chunk(2, dim=1)
        attended = varlen_attention(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        x = x + self.attention_out(attended.flatten(1))
        return x + self.mlp(rms_norm(x, self.mlp_norm)), (key, value)


class LastPrefixLayer(nn.Module):
    """The part of the last prefix layer that somebody reads: its keys and values.

    Args:
        width: Width of the tokens.
        heads: Number of heads.
        head_dim: Width of a head.
    """

    def __init__(self, *, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.norm = nn.Parameter(torch.ones(width))
        self.kv = nn.Linear(width, 2 * heads * head_dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> KeyValue:
        """`[T, width]` to keys and values `[T, heads, head_dim]`."""
        kv = self.kv(rms_norm(x, self.norm)).view(x.shape[0], 2 * self.heads, self.head_dim)
        key, value = kv.chunk(2, dim=1)
        return rotate(key, rotation), value


class PrefixTransformer(nn.Module):
    """Packed prefix tokens to the keys and values of every layer.

    Args:
        width: Width of the tokens.
        depth: Number of layers.
        heads: Number of heads.
        head_dim: Width of a head.
        mlp_width: Hidden width of the MLPs.
    """

    def __init__(self, *, width: int, depth: int, heads: int, head_dim: int, mlp_width: int) -> None:
        super().__init__()
        self.rotary = RotaryEmbedding(head_dim)
        self.layers = nn.ModuleList(
            PrefixLayer(width=width, heads=heads, head_dim=head_dim, mlp_width=mlp_width) for _ in range(depth - 1)
        )
        self.last = LastPrefixLayer(width=width, heads=heads, head_dim=head_dim)

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> list[KeyValue]:
        """`[T, width]` at positions `[T]` to one pair of `[T, heads, head_dim]` per layer."""
        rotation = self.rotary(position_ids)
        cache: list[KeyValue] = []
        for layer in self.layers:
            x, key_value = layer(x, rotation, cu_seqlens, max_seqlen)
            cache.append(key_value)
        return [*cache, self.last(x, rotation)]


class ExpertLayer(nn.Module):
    """One action-expert layer: adaptive RMS norms with gates, attention to prefix and own chunk.

    Args:
        width: Width of the action tokens.
        heads: Number of heads (the prefix's).
        head_dim: Width of a head (the prefix's).
        mlp_width: Hidden width of the MLP.
    """

    def __init__(self, *, width: int, heads: int, head_dim: int, mlp_width: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.modulation = modulation(width, gates=2)
        self.qkv = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.attention_out = nn.Linear(heads * head_dim, width, bias=False)
        self.mlp = GatedMLP(width, mlp_width)

    def forward(
        self, x: Tensor, condition: Tensor, prefix: KeyValue, rotation: Tensor, layout: PrefixSuffixLayout
    ) -> Tensor:
        """Chunks `[N, H, width]` and their condition `[N, width]` to `[N, H, width]`."""
        parts = self.modulation(condition)[:, None].chunk(6, dim=-1)
        scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = parts
        qkv = self.qkv(modulate(x, scale, shift)).view(-1, 3 * self.heads, self.head_dim)
        query_key, value = qkv.split_with_sizes((2 * self.heads, self.heads), dim=1)
        query, key = rotate(query_key, rotation).chunk(2, dim=1)
        attended = layout.attend(query, prefix, (key, value))
        x = torch.addcmul(x, self.attention_out(attended.reshape(*x.shape[:2], -1)), gate)
        return torch.addcmul(x, self.mlp(modulate(x, mlp_scale, mlp_shift)), mlp_gate)


class ActionExpert(nn.Module):
    """Noisy action chunks and their flow time to velocities, given the prefix's keys and values.

    Args:
        action_dim: Number of action dimensions.
        width: Width of the action tokens.
        depth: Number of layers (the prefix's).
        heads: Number of heads (the prefix's).
        head_dim: Width of a head (the prefix's).
        mlp_width: Hidden width of the MLPs.
    """

    def __init__(self, *, action_dim: int, width: int, depth: int, heads: int, head_dim: int, mlp_width: int) -> None:
        super().__init__()
        self.rotary = RotaryEmbedding(head_dim)
        self.action_in = nn.Linear(action_dim, width)
        self.time = TimeConditioning(width)
        self.layers = nn.ModuleList(
            ExpertLayer(width=width, heads=heads, head_dim=head_dim, mlp_width=mlp_width) for _ in range(depth)
        )
        self.final_modulation = modulation(width, gates=0)
        self.action_out = nn.Linear(width, action_dim)

    def forward(self, noisy: Tensor, time: Tensor, cache: Sequence[KeyValue], layout: PrefixSuffixLayout) -> Tensor:
        """Velocities of `noisy` chunks `[N, H, A]` at flow times `[N]`."""
        rotation = self.rotary(layout.position_ids)
        condition = self.time(time)
        x = self.action_in(noisy.to(self.action_in.weight.dtype))
        for layer, prefix in zip(self.layers, cache, strict=True):
            x = layer(x, condition, prefix, rotation, layout)
        scale, shift = self.final_modulation(condition)[:, None].chunk(2, dim=-1)
        velocity: Tensor = self.action_out(modulate(x, scale, shift))
        return velocity.float()


def modulation(width: int, gates: int) -> nn.Linear:
    """Projection of the condition to (scale, shift, gate) per norm, or one (scale, shift) without gates.

    It starts at zero weights, as in openpi, but with gates of one, so that the expert starts as an ordinary
    transformer: a policy trained from scratch for minutes cannot wait for its gates to open.
    """
    linear = nn.Linear(width, (3 * gates or 2) * width)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    with torch.no_grad():
        for gate in range(gates):
            linear.bias[(3 * gate + 2) * width : (3 * gate + 3) * width] = 1.0
    return linear
