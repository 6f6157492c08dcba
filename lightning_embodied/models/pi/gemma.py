"""Gemma as pi0 and pi0.5 use it: one layer for the prefix and, with adaptive norms, for the action expert.

Parameter names are those of openpi and LeRobot. The layer is handed its attention as a function, so that packed
prefixes, suffixes with a cache, or anything else can run through the same weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_embodied.models.layers import modulate, rms_norm
from lightning_embodied.models.pi.precision import at_least_float32, full_precision
from lightning_embodied.models.pi.sizes import GemmaSizes
from lightning_embodied.models.prefix import KeyValue
from lightning_embodied.models.rotary import Rotation, rotate_halves
from lightning_embodied.models.transformer import modulation

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries `[T, heads, head_dim]`, keys and values `[T, kv_heads, head_dim]` to `[T, heads, head_dim]`."""


class RMSNorm(nn.Module):
    """Gemma's norm, `rms_norm(x) * (1 + weight)`, computed in float32.

    Args:
        width: Width of the tokens.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, condition: Tensor | None = None) -> tuple[Tensor, None]:
        """`[..., width]` to the same, and no gate; there is nothing to condition on."""
        return rms_norm(at_least_float32(x), 1 + at_least_float32(self.weight)).to(x.dtype), None


class AdaptiveRMSNorm(nn.Module):
    """pi0.5's norm: scale, shift and gate are a projection of the flow time, computed in float32.

    Args:
        width: Width of the tokens and of the condition.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = modulation(width, gates=1)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Chunks `[N, H, width]` and their condition `[N, width]` to normed chunks and gate `[N, 1, width]`."""
        with full_precision(x):
            parts = at_least_float32(self.dense(condition.to(self.dense.weight.dtype))[:, None])
            scale, shift, gate = parts.chunk(3, dim=-1)
            return modulate(at_least_float32(x), scale, shift).to(x.dtype), gate.to(x.dtype)


class Attention(nn.Module):
    """Gemma's projections; the attention itself comes from outside.

    Args:
        sizes: Of the transformer.
    """

    def __init__(self, sizes: GemmaSizes) -> None:
        super().__init__()
        width, self.head_dim = sizes.width, sizes.head_dim
        self.q_proj = nn.Linear(width, sizes.heads * sizes.head_dim, bias=False)
        self.k_proj = nn.Linear(width, sizes.kv_heads * sizes.head_dim, bias=False)
        self.v_proj = nn.Linear(width, sizes.kv_heads * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, width, bias=False)

    def keys_values(self, x: Tensor, rotation: Rotation) -> KeyValue:
        """`[..., width]` of `T` tokens to keys and values `[T, kv_heads, head_dim]`."""
        key = self.k_proj(x).view(rotation[0].shape[0], -1, self.head_dim)
        return rotate_halves(key, rotation), self.v_proj(x).view_as(key)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> tuple[Tensor, KeyValue]:
        """`[..., width]` to the same, and the keys and values."""
        key, value = self.keys_values(x, rotation)
        query = rotate_halves(self.q_proj(x).view(key.shape[0], -1, self.head_dim), rotation)
        attended = attend(query, key, value).reshape(*x.shape[:-1], -1)
        return self.o_proj(attended), (key, value)


class MLP(nn.Module):
    """Gemma's gated MLP.

    Args:
        sizes: Of the transformer.
    """

    def __init__(self, sizes: GemmaSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.mlp_width, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.mlp_width, bias=False)
        self.down_proj = nn.Linear(sizes.mlp_width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        down: Tensor = self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
        return down


class GemmaLayer(nn.Module):
    """One layer.

    Args:
        sizes: Of the transformer.
        adaptive: Condition the norms on the flow time and gate the residuals.
    """

    def __init__(self, sizes: GemmaSizes, adaptive: bool) -> None:
        super().__init__()
        norm = AdaptiveRMSNorm if adaptive else RMSNorm
        self.self_attn = Attention(sizes)
        self.mlp = MLP(sizes)
        self.input_layernorm = norm(sizes.width)
        self.post_attention_layernorm = norm(sizes.width)

    def forward(
        self, x: Tensor, rotation: Rotation, attend: Attend | None, condition: Tensor | None = None
    ) -> tuple[Tensor, KeyValue]:
        """Runs the layer.

        Args:
            x: `[T, width]`, or chunks `[N, H, width]`.
            rotation: Rotary positions of all `T` (or `N * H`) tokens.
            attend: The attention. None computes keys and values only: all that is read of a last prefix layer.
            condition: `[N, width]`, if the norms are adaptive.

        Returns:
            The output, shaped like `x` (`x` itself without attention), and the keys and values.
        """
        normed, gate = self.input_layernorm(x, condition)
        if attend is None:
            return x, self.self_attn.keys_values(normed, rotation)
        attended, key_value = self.self_attn(normed, rotation, attend)
        x = _residual(x, attended, gate)
        normed, gate = self.post_attention_layernorm(x, condition)
        return _residual(x, self.mlp(normed), gate), key_value


def _residual(x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
    return x + y if gate is None else torch.addcmul(x, y, gate)


class Gemma(nn.Module):
    """A stack of layers with a final norm, and a token embedding if it has a vocabulary.

    Args:
        sizes: Of the transformer.
        adaptive: See `GemmaLayer`.
        vocab_size: Rows of the token embedding; 0 for none.

    Attributes:
        recompute: Keep no activations of the layers, compute them again in the backward pass.
    """

    def __init__(self, sizes: GemmaSizes, *, adaptive: bool = False, vocab_size: int = 0) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.recompute = False
        if vocab_size:
            self.embed_tokens = nn.Embedding(vocab_size, sizes.width)
            nn.init.normal_(self.embed_tokens.weight, std=sizes.width**-0.5)
        self.layers = nn.ModuleList(GemmaLayer(sizes, adaptive) for _ in range(sizes.depth))
        self.norm = (AdaptiveRMSNorm if adaptive else RMSNorm)(sizes.width)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids `[T]` to `[T, width]`, multiplied by `sqrt(width)`."""
        embedded: Tensor = self.embed_tokens(input_ids) * self.embed_tokens.embedding_dim**0.5
        return embedded
