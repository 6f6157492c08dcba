"""Sizes of pi0 and pi0.5: the published ones, a tiny one for a laptop, and any change of them by name.

The published towers are SigLIP So400m/14, Gemma 2B and a Gemma of 300M parameters (arXiv:2410.24164, openpi's
`gemma.py`). Both Gemmas share one attention, so their depth, heads and head width are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_embodied.errors import ConfigError
from lightning_embodied.models.siglip import TINY_VISION, SiglipConfig
from lightning_embodied.models.sizes import check_divisible


@dataclass(frozen=True)
class GemmaSizes:
    """Gemma transformer.

    Attributes:
        width: Width of the tokens.
        depth: Number of layers.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Width of a head.
        mlp_width: Hidden width of the MLPs.
    """

    width: int
    depth: int = 18
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 256
    mlp_width: int = 16_384


SO400M = SiglipConfig(vision_use_head=False)
GEMMA_2B = GemmaSizes(width=2048)
GEMMA_300M = GemmaSizes(width=1024, mlp_width=4096)


@dataclass(frozen=True)
class PiSizes:
    """All sizes of a pi0 or pi0.5.

    Attributes:
        vision: The picture tower.
        language: The transformer over pictures and prompt.
        expert: The transformer over actions.
        vocab_size: Rows of the token embedding.
        max_action_dim: Width of the action vectors; shorter ones are padded with zeros.
        max_state_dim: Width of pi0's state vectors; shorter ones are padded with zeros.
    """

    vision: SiglipConfig = SO400M
    language: GemmaSizes = GEMMA_2B
    expert: GemmaSizes = GEMMA_300M
    vocab_size: int = 257_152
    max_action_dim: int = 32
    max_state_dim: int = 32

    def __post_init__(self) -> None:
        """Refuses sizes that cannot work together."""
        for name in ("depth", "heads", "kv_heads", "head_dim"):
            found = getattr(self.language, name), getattr(self.expert, name)
            if found[0] != found[1]:
                raise ConfigError(
                    "the two transformers share one attention, so they cannot differ here",
                    where=f"sizes: language.{name}, expert.{name}",
                    found=f"{found[0]} and {found[1]}",
                    expected="equal values",
                )
        check_divisible(
            (
                ("language.heads", self.language.heads, "language.kv_heads", self.language.kv_heads),
                ("language.head_dim", self.language.head_dim, "2", 2),
                ("expert.width", self.expert.width, "2", 2),
            )
        )


PRESETS: dict[str, PiSizes] = {
    "base": PiSizes(),
    "tiny": PiSizes(
        vision=TINY_VISION,
        language=GemmaSizes(width=96, depth=3, heads=4, kv_heads=1, head_dim=32, mlp_width=192),
        expert=GemmaSizes(width=64, depth=3, heads=4, kv_heads=1, head_dim=32, mlp_width=128),
        vocab_size=1024,
    ),
}
