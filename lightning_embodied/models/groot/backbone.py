"""GR00T N1.5's vision-language backbone, Eagle 2.5 (arXiv:2504.15271): SigLIP, one linear layer, Qwen3.

Modules bear the names of NVIDIA's checkpoints (`backbone.eagle_model…`). NVIDIA pads prompts on the left and hides the
padding; here there is none, and a camera that is absent has no tokens.
"""

from __future__ import annotations

from torch import Tensor, nn

from lightning_embodied.models.groot.qwen3 import Qwen3, Qwen3Sizes, Rows
from lightning_embodied.models.siglip import SiglipConfig, SiglipVisionModel


class EagleBackbone(nn.Module):
    """Pictures and tokens to features for the action head.

    Args:
        vision: Sizes of the vision tower.
        language: Sizes of the language model.
    """

    def __init__(self, vision: SiglipConfig, language: Qwen3Sizes) -> None:
        super().__init__()
        self.eagle_model = _EagleModel(vision, language)

    def forward(self, input_ids: Tensor, pixel_values: Tensor, picture_rows: Tensor, rows: Rows) -> Tensor:
        """Features of packed prompts.

        Args:
            input_ids: int64 `[T]`; those of picture tokens count for nothing.
            pixel_values: Floating `[N, 3, S, S]` in [-1, 1]; `N` may be 0.
            picture_rows: int64 `[N * tokens_per_image]`: the tokens that are pictures, picture after picture.
            rows: Where the samples lie.

        Returns:
            `[T, hidden_size]`.
        """
        eagle = self.eagle_model
        tokens = eagle.language_model.embed(input_ids)
        pictures = eagle.mlp1(eagle.vision_model(pixel_values)).flatten(0, 1)
        tokens = tokens.index_copy(0, picture_rows, pictures.to(tokens.dtype))
        features: Tensor = eagle.language_model(tokens, rows)
        return features


class _EagleModel(nn.Module):
    def __init__(self, vision: SiglipConfig, language: Qwen3Sizes) -> None:
        super().__init__()
        self.vision_model = SiglipVisionModel(vision)
        self.mlp1 = nn.Sequential(nn.Linear(vision.hidden_size, language.hidden_size))
        self.language_model = Qwen3(language)
