"""SigLIP's vision tower (arXiv:2303.15343), which pi0, pi0.5 and GR00T N1.5 see through.

Modules are named as in transformers' `SiglipVisionModel`, so pretrained weights load as they are. All pictures have one
size and see themselves alone: a batch of them is rectangular, and plain scaled dot-product attention is exact and fast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_embodied.errors import ConfigError
from lightning_embodied.models.recompute import run_layer
from lightning_embodied.models.sizes import check_divisible


@dataclass(frozen=True)
class SiglipConfig:
    """Sizes of the tower, under transformers' names; the defaults are those of SigLIP-So400m at 224 pixels.

    Attributes:
        hidden_size: Width of the tokens.
        intermediate_size: Hidden width of the MLPs.
        num_hidden_layers: Number of layers.
        num_attention_heads: Attention heads of a layer.
        image_size: Height and width of a picture in pixels.
        patch_size: Side of a patch in pixels; one patch is one token.
        layer_norm_eps: Added to the variance in the norms.
        vision_use_head: Whether there is the attention pooling head, which policies do not read; it stays frozen.
    """

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    image_size: int = 224
    patch_size: int = 14
    layer_norm_eps: float = 1e-6
    vision_use_head: bool = True

    def __post_init__(self) -> None:
        """Refuses sizes that cannot work together."""
        check_divisible(
            (
                ("vision.image_size", self.image_size, "vision.patch_size", self.patch_size),
                ("vision.hidden_size", self.hidden_size, "vision.num_attention_heads", self.num_attention_heads),
            )
        )

    @property
    def tokens_per_image(self) -> int:
        """Tokens of one picture."""
        return (self.image_size // self.patch_size) ** 2


TINY_VISION = SiglipConfig(
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=64,
    patch_size=16,
    vision_use_head=False,
)
"""The tower of the tiny presets."""


class SiglipVisionModel(nn.Module):
    """The tower: pictures to one token per patch.

    Args:
        config: Its sizes.
    """

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_model = _VisionTransformer(config)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Tokens after the final norm (transformers' `last_hidden_state`).

        Args:
            pixel_values: Floating `[N, 3, image_size, image_size]` in [-1, 1]; `N` may be 0.

        Returns:
            `[N, tokens_per_image, hidden_size]`, patches row by row.

        Raises:
            ConfigError: The pictures have another size.
        """
        side = self.config.image_size
        if pixel_values.shape[1:] != (3, side, side):
            raise ConfigError(
                "pictures are not of the vision tower's size",
                where="SiglipVisionModel",
                found=list(pixel_values.shape),
                expected=f"[N, 3, {side}, {side}]",
                mend=f"set the encoder's image_size to [{side}, {side}]",
            )
        tokens: Tensor = self.vision_model(pixel_values)
        return tokens

    def recompute_activations(self, recompute: bool) -> None:
        """Keeps no activations of the layers but computes them again in the backward pass (or not)."""
        self.vision_model.encoder.recompute = recompute

    def pool(self, tokens: Tensor) -> Tensor:
        """One vector a picture by the attention pooling head: `[N, tokens, hidden]` to `[N, hidden]`."""
        pooled: Tensor = self.vision_model.head(tokens)
        return pooled


class _VisionTransformer(nn.Module):
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        if config.vision_use_head:
            self.head = _PoolingHead(config).requires_grad_(False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        tokens: Tensor = self.post_layernorm(self.encoder(self.embeddings(pixel_values)))
        return tokens


class _Embeddings(nn.Module):
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.patch_embedding = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.position_embedding = nn.Embedding(config.tokens_per_image, width)
        nn.init.normal_(self.position_embedding.weight, std=width**-0.5)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = self.patch_embedding(pixel_values.to(self.patch_embedding.weight.dtype))
        tokens: Tensor = patches.flatten(2).transpose(1, 2) + self.position_embedding.weight
        return tokens


class _Encoder(nn.Module):
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.recompute = False
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            tokens = run_layer(layer, tokens, recompute=self.recompute)
        return tokens


class _Layer(nn.Module):
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = _Attention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = _MLP(config)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.self_attn(self.layer_norm1(tokens))
        result: Tensor = tokens + self.mlp(self.layer_norm2(tokens))
        return result


class _Attention(nn.Module):
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = (
            projection(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return out


class _MLP(nn.Module):
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(tokens), approximate="tanh"))
        return out


class _PoolingHead(nn.Module):
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.probe = nn.Parameter(torch.randn(1, 1, width))
        self.attention = nn.MultiheadAttention(width, config.num_attention_heads, batch_first=True)
        self.layernorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = _MLP(config)

    def forward(self, tokens: Tensor) -> Tensor:
        probe = self.probe.expand(tokens.shape[0], -1, -1)
        attended, _ = self.attention(probe, tokens, tokens, need_weights=False)
        pooled: Tensor = (attended + self.mlp(self.layernorm(attended)))[:, 0]
        return pooled
