"""The Qwen3 language model (arXiv:2505.09388) on packed tokens, as GR00T N1.5's backbone reads pictures and text.

Modules are named as in transformers' `Qwen3ForCausalLM`, so pretrained weights load as they are. N1.5 keeps the first
12 of 28 layers and reads their output after the final norm.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_embodied.attention import varlen_attention
from lightning_embodied.models.recompute import run_layer
from lightning_embodied.models.rotary import Rotation, rotate_halves, rotation_of


@dataclass(frozen=True)
class Qwen3Sizes:
    """Sizes of the language model, under transformers' names; the defaults are Qwen3-1.7B's, cut as N1.5 cuts it.

    Attributes:
        vocab_size: Rows of the token embedding.
        hidden_size: Width of the tokens.
        intermediate_size: Hidden width of the MLPs.
        num_hidden_layers: Number of layers.
        num_attention_heads: Query heads of a layer.
        num_key_value_heads: Key and value heads of a layer.
        head_dim: Width of a head.
        rope_theta: Base of the rotary wave lengths.
        rms_norm_eps: Added to the mean square in the norms.
    """

    vocab_size: int = 151_680
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True)
class Rows:
    """Where the samples of packed tokens lie.

    Attributes:
        position_ids: int64 `[T]`, restarting at 0 for every sample.
        cu_seqlens: int32 `[B + 1]`, from 0 to `T`.
        max_seqlen: Longest sample in tokens.
    """

    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int


class RMSNorm(nn.RMSNorm):
    """RMS norm computed in float32, whatever the precision of tokens and weight, and returned in the tokens'."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class Qwen3(nn.Module):
    """Token embeddings to features; the language head is the token embedding and is read by nobody here.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: Qwen3Sizes) -> None:
        super().__init__()
        self.model = _Model(sizes)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def recompute_activations(self, recompute: bool) -> None:
        """Keeps no activations of the layers but computes them again in the backward pass (or not)."""
        self.model.recompute = recompute

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings `[T, hidden_size]` of tokens `[T]`."""
        embeddings: Tensor = self.model.embed_tokens(input_ids)
        return embeddings

    def forward(self, embeddings: Tensor, rows: Rows) -> Tensor:
        """Features after the final norm: `[T, hidden_size]` to the same, causal within each sample."""
        features: Tensor = self.model(embeddings, rows)
        return features


class _Model(nn.Module):
    def __init__(self, sizes: Qwen3Sizes) -> None:
        super().__init__()
        self.sizes, self.recompute = sizes, False
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(sizes.num_hidden_layers))
        self.norm = RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)

    def forward(self, tokens: Tensor, rows: Rows) -> Tensor:
        rotation = rotation_of(rows.position_ids, self.sizes.head_dim, self.sizes.rope_theta)
        for layer in self.layers:
            tokens = run_layer(layer, tokens, rotation, rows, recompute=self.recompute)
        features: Tensor = self.norm(tokens)
        return features


class _Layer(nn.Module):
    def __init__(self, sizes: Qwen3Sizes) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.self_attn = _Attention(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.mlp = _MLP(sizes)

    def forward(self, tokens: Tensor, rotation: Rotation, rows: Rows) -> Tensor:
        tokens = tokens + self.self_attn(self.input_layernorm(tokens), rotation, rows)
        result: Tensor = tokens + self.mlp(self.post_attention_layernorm(tokens))
        return result


class _Attention(nn.Module):
    def __init__(self, sizes: Qwen3Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        queries, keys = (n * sizes.head_dim for n in (sizes.num_attention_heads, sizes.num_key_value_heads))
        self.q_proj = nn.Linear(sizes.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(sizes.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(sizes.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, sizes.hidden_size, bias=False)
        self.q_norm = RMSNorm(sizes.head_dim, eps=sizes.rms_norm_eps)
        self.k_norm = RMSNorm(sizes.head_dim, eps=sizes.rms_norm_eps)

    def forward(self, tokens: Tensor, rotation: Rotation, rows: Rows) -> Tensor:
        query, key, value = (
            projection(tokens).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate_halves(self.q_norm(query), rotation), rotate_halves(self.k_norm(key), rotation)
        cu, longest = rows.cu_seqlens, rows.max_seqlen
        attended = varlen_attention(query, key, value, cu, cu, longest, longest, causal=True)
        out: Tensor = self.o_proj(attended.flatten(1))
        return out


class _MLP(nn.Module):
    def __init__(self, sizes: Qwen3Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(tokens)) * self.up_proj(tokens))
        return out
