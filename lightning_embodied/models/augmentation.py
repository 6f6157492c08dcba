"""Random shift of a batch's training pictures, on whatever device the batch is.

The shift is DrQ's pad-and-crop (arXiv:2004.13649), drawn as a pure function of the sample's identity and the step, so
it is the same for any number of ranks and workers and after a resumed run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_embodied.packing import PackedBatch, SampleEncoder


def picture_positions(batch: PackedBatch, encoder: SampleEncoder) -> Tensor:
    """Positions of the image tokens along the token axis, picture after picture: int64 `[N * tokens_per_image]`."""
    count = batch.pixel_values.shape[0] * encoder.tokens_per_image
    is_image = (batch.input_ids == encoder.image_token_id).to(torch.int8)
    return is_image.argsort(descending=True, stable=True)[:count]  # a sort, as `nonzero` would stall a GPU


def shift_pictures(batch: PackedBatch, encoder: SampleEncoder, pixels: int, step: int) -> PackedBatch:
    """Shifts each picture by up to `pixels` in both directions; all cameras of a sample shift on their own.

    Args:
        batch: The batch.
        encoder: The one that made the batch.
        pixels: Largest shift.
        step: Optimizer step.
    """
    if not batch.pixel_values.shape[0]:
        return batch
    first_tokens = picture_positions(batch, encoder)[:: encoder.tokens_per_image]
    sample = torch.searchsorted(batch.cu_seqlens, first_tokens.int(), right=True) - 1
    within = batch.position_ids[first_tokens]
    keys = mix_keys(batch.dataset[sample], batch.episode_index[sample], batch.frame_index[sample], within, step)
    return batch.replace(pixel_values=random_shift(batch.pixel_values, keys, pixels))


def random_shift(pixel_values: Tensor, keys: Tensor, pixels: int) -> Tensor:
    """Shifts each picture by up to `pixels` in both directions, edges repeated.

    The shift is a pure function of the picture's key, so it does not depend on workers, ranks or the random state.

    Args:
        pixel_values: uint8 `[N, C, H, W]`.
        keys: int64 `[N]`, from `mix_keys`.
        pixels: Largest shift.

    Returns:
        uint8 `[N, C, H, W]` on the same device.
    """
    height, width = pixel_values.shape[-2:]
    span = 2 * pixels + 1
    down, right = keys % span - pixels, keys // span % span - pixels
    rows = (torch.arange(height, device=keys.device) + down[:, None]).clamp_(0, height - 1)
    columns = (torch.arange(width, device=keys.device) + right[:, None]).clamp_(0, width - 1)
    cells = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)
    index = cells[:, None].expand(-1, pixel_values.shape[1], -1)
    return pixel_values.flatten(2).gather(2, index).view_as(pixel_values)


def mix_keys(*parts: Tensor | int) -> Tensor:
    """Hashes integers elementwise to non-negative int64 keys, with the multiply-and-shift rounds of SplitMix64.

    Args:
        parts: int64 tensors and integers that broadcast; the first is a tensor.
    """
    key = torch.zeros_like(torch.as_tensor(parts[0]))
    for part in parts:
        key = (key + part) * -0x61C8864680B583EB  # int64 products wrap around
        key = (key ^ (key >> 30)) * -0x40A7B892E31B1A47
        key = key ^ (key >> 27)
    return key & 0x7FFF_FFFF_FFFF_FFFF
