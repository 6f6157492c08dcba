"""Sizes of GR00T N1.5: the published ones, tiny ones for a laptop, and any change of them by name."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_embodied.errors import ConfigError
from lightning_embodied.models.groot.action_head import ActionHeadSizes
from lightning_embodied.models.groot.qwen3 import Qwen3Sizes
from lightning_embodied.models.groot.transformer import TransformerSizes
from lightning_embodied.models.siglip import TINY_VISION, SiglipConfig
from lightning_embodied.models.sizes import check_divisible

_VISION, _LANGUAGE, _HEAD = SiglipConfig(), Qwen3Sizes(), ActionHeadSizes()


@dataclass(frozen=True)
class GrootSizes:
    """All sizes of a GR00T N1.5.

    Attributes:
        vision: The picture tower.
        language: The language model.
        head: The action head.
    """

    vision: SiglipConfig = _VISION
    language: Qwen3Sizes = _LANGUAGE
    head: ActionHeadSizes = _HEAD

    def __post_init__(self) -> None:
        """Refuses sizes that cannot work together."""
        width = self.head.vl_self_attention.width
        if width != self.language.hidden_size:
            raise ConfigError(
                "the action head reads features of another width than the language model makes",
                where="sizes: head.vl_self_attention (heads times head width), language.hidden_size",
                found=f"{width} and {self.language.hidden_size}",
                expected="equal values",
            )
        language = self.language
        check_divisible(
            (
                ("language.num_attention_heads", language.num_attention_heads, "language.num_key_value_heads",
                 language.num_key_value_heads),
                ("language.head_dim", language.head_dim, "2", 2),
                ("head.diffusion_model (heads times head width)", self.head.diffusion_model.width, "2", 2),
            )
        )  # fmt: skip


PRESETS: dict[str, GrootSizes] = {
    "base": GrootSizes(),
    "tiny": GrootSizes(
        vision=TINY_VISION,
        language=Qwen3Sizes(
            vocab_size=1024,
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
        ),
        head=ActionHeadSizes(
            hidden_size=64,
            num_target_vision_tokens=4,
            max_seq_len=64,
            diffusion_model=TransformerSizes(num_layers=4, num_attention_heads=4, attention_head_dim=16, dropout=0.1),
            vl_self_attention=TransformerSizes(num_layers=1, num_attention_heads=4, attention_head_dim=24, dropout=0.1),
        ),
    ),
}
