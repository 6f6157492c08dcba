"""Brings pictures to the size a policy reads: aspect kept, centred, the rest black (as openpi's `resize_with_pad`).

Training and inference both go through this one function, on uint8 and on the CPU, so a camera of another resolution
gives the same pixels on a robot as in training.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Resize = Literal["antialiased", "bilinear"]


def resize_with_pad(images: Tensor, size: tuple[int, int], resize: Resize = "antialiased") -> Tensor:
    """Resizes pictures without distorting them.

    Args:
        images: uint8 `[..., C, H, W]`.
        size: Height and width wanted, in pixels.
        resize: `antialiased` is bilinear with antialiasing, rounded to the nearest level, as openpi resizes with PIL;
            `bilinear` is neither antialiased nor rounded, as LeRobot does for pi0 and pi0.5.

    Returns:
        uint8 (or float32 levels that are not rounded) `[..., C, *size]` on the CPU, the very same tensor if it already
        has that size.
    """
    height, width = images.shape[-2:]
    if (height, width) == size:
        return images.cpu()
    ratio = max(height / size[0], width / size[1])
    inner = (max(1, int(height / ratio)), max(1, int(width / ratio)))
    # one channel at a time: torch's uint8 kernel asserts on three channels resized to 1 x 1
    flat = images.cpu().reshape(-1, 1, height, width)
    smooth = resize == "antialiased"
    resized = functional.interpolate(flat if smooth else flat.float(), size=inner, mode="bilinear", antialias=smooth)
    top, left = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    padded = torch.zeros(flat.shape[0], 1, *size, dtype=resized.dtype)
    padded[:, :, top : top + inner[0], left : left + inner[1]] = resized
    return padded.reshape(*images.shape[:-2], *size)
