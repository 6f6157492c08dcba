"""Brings pictures to the size a policy reads: aspect kept, centred, the rest black (as openpi's `resize_with_pad`).

Training and inference both go through this one function, on uint8 and on the CPU, so a camera of another resolution
gives the same pixels on a robot as in training.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def resize_with_pad(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resizes pictures without distorting them.

    Args:
        images: uint8 `[..., C, H, W]`.
        size: Height and width wanted, in pixels.

    Returns:
        uint8 `[..., C, *size]` on the CPU, the very same tensor if it already has that size. Bilinear with
        antialiasing, rounded to the nearest level.
    """
    height, width = images.shape[-2:]
    if (height, width) == size:
        return images.cpu()
    ratio = max(height / size[0], width / size[1])
    inner = (max(1, int(height / ratio)), max(1, int(width / ratio)))
    # one channel at a time: torch's uint8 kernel asserts on three channels resized to 1 x 1
    flat = images.cpu().reshape(-1, 1, height, width)
    resized = functional.interpolate(flat, size=inner, mode="bilinear", antialias=True)
    top, left = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    padded = torch.zeros(flat.shape[0], 1, *size, dtype=torch.uint8)
    padded[:, :, top : top + inner[0], left : left + inner[1]] = resized
    return padded.reshape(*images.shape[:-2], *size)
