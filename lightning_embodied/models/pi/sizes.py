"""Sizes of pi0 and pi0.5: the published ones, a tiny one for a laptop, and any change of them by name.

The published towers are SigLIP So400m/14, Gemma 2B and a Gemma of 300M parameters (arXiv:2410.24164, openpi's
`gemma.py`). Both Gemmas share one attention, so their depth, heads and head width are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lightning_embodied.errors import ConfigError
from lightning_embodied.models.siglip import SiglipConfig
from lightning_embodied.models.sizes import changed_sizes

Preset = Literal["base", "tiny"]


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
        rules = (
            ("vision.image_size", self.vision.image_size, self.vision.patch_size, "vision.patch_size"),
            (
                "vision.hidden_size",
                self.vision.hidden_size,
                self.vision.num_attention_heads,
                "vision.num_attention_heads",
            ),
            ("language.heads", self.language.heads, self.language.kv_heads, "language.kv_heads"),
            ("language.head_dim", self.language.head_dim, 2, "2"),
            ("expert.width", self.expert.width, 2, "2"),
        )
        for name, value, divisor, of in rules:
            if divisor < 1 or value % divisor:
                expected = f"a multiple of {of}" + ("" if of == "2" else f" ({divisor})")
                raise ConfigError("a size does not divide", where=f"sizes: {name}", found=value, expected=expected)

    @classmethod
    def of(cls, preset: Preset, changes: Mapping[str, Any] | None = None) -> PiSizes:
        """A preset with some values changed.

        Args:
            preset: `base` are the published sizes, `tiny` trains on a CPU.
            changes: Names of this class to values; those of a tower are a mapping again.

        Raises:
            ConfigError: A name is unknown, a value is no size, or the sizes do not fit each other.
        """
        if preset not in PRESETS:
            raise ConfigError("no such preset", where="preset", found=preset, expected=", ".join(PRESETS))
        return changed_sizes(PRESETS[preset], changes or {})

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `PiSizes.of` takes them as changes."""
        return asdict(self)


PRESETS: dict[str, PiSizes] = {
    "base": PiSizes(),
    "tiny": PiSizes(
        vision=SiglipConfig(
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=64,
            patch_size=16,
            vision_use_head=False,
        ),
        language=GemmaSizes(width=96, depth=3, heads=4, kv_heads=1, head_dim=32, mlp_width=192),
        expert=GemmaSizes(width=64, depth=3, heads=4, kv_heads=1, head_dim=32, mlp_width=128),
        vocab_size=1024,
    ),
}
