"""Pictures to tokens with a small convolutional stem.

Convolutions of stride 2 in place of one large patch projection train faster at small scale ("Early Convolutions Help
Transformers See Better", arXiv:2106.14881). They also see where they are, as two more channels with each pixel's column
and row (CoordConv, arXiv:1807.03247): a reaching policy needs positions, which convolutions alone do not know.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_embodied.errors import ConfigError


class ConvStem(nn.Module):
    """Patch embedding by convolutions: one token per `patch_size` x `patch_size` pixels.

    The first convolution (8 x 8) reduces the picture by 4, the next ones (3 x 3) halve it until a patch is one cell.
    No pictures at all (`N = 0`) give no tokens and zero gradients.

    Args:
        patch_size: Side of a patch in pixels; a power of two, at least 4.
        width: Width of the tokens.
        channels: Channels of the first convolution; doubled at each halving.

    Raises:
        ConfigError: The patch size is not a power of two from 4 on.
    """

    def __init__(self, patch_size: int, width: int, channels: int = 32) -> None:
        super().__init__()
        if patch_size < 4 or patch_size & (patch_size - 1):
            raise ConfigError(
                "the convolutional stem cannot make such patches",
                where="encoder.patch_size",
                found=patch_size,
                expected="4, 8, 16, 32 …",
            )
        layers: list[nn.Module] = [nn.Conv2d(5, channels, 8, stride=4, padding=2), nn.SiLU()]
        for _ in range(patch_size.bit_length() - 3):
            layers += [nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1), nn.SiLU()]
            channels *= 2
        self.layers = nn.Sequential(*layers, nn.Conv2d(channels, width, 1))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Levels 0 to 255 `[N, 3, H, W]` to `[N, tokens, width]`, tokens row by row."""
        pixels = pixel_values.to(next(self.parameters()).dtype) * (2 / 255) - 1
        features: Tensor = self.layers(torch.cat((pixels, _coordinates(pixels)), dim=1))
        return features.flatten(2).transpose(1, 2)


def _coordinates(pixels: Tensor) -> Tensor:
    """Column and row of each pixel, from -1 to 1: `[N, 2, H, W]`."""
    rows, columns = (torch.linspace(-1, 1, size, dtype=pixels.dtype, device=pixels.device) for size in pixels.shape[2:])
    grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"))
    return grid.expand(pixels.shape[0], -1, -1, -1)
