"""Concatenates encoded samples into a `PackedBatch`: the one place that lays tokens out.

Training (`VarlenPackingCollator`) and inference (`SampleEncoder.encode_observations`) both end here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lightning_embodied.errors import DatasetError
from lightning_embodied.packing.batch import PackedBatch


@dataclass(frozen=True)
class EncodedSample:
    """One sample as tokens.

    Attributes:
        input_ids: int64 `[T]`: image placeholders, instruction tokens, state placeholder.
        pixel_values: uint8 (float32 if not rounded) `[N, C, H, W]`: one picture per camera, in token order.
        state: float32 `[D]`: the state keys concatenated, in the dataset's units.
        actions: float32 `[H, A]`; `[0, 0]` for an observation without actions.
        action_is_pad: bool `[H]`.
        dataset: Which dataset of a mixture.
        episode_index: Index of the episode.
        frame_index: Index of the frame within its episode.
        image_keys: `N` feature keys: which camera each picture is from.
    """

    input_ids: Tensor
    pixel_values: Tensor
    state: Tensor
    actions: Tensor
    action_is_pad: Tensor
    dataset: int = 0
    episode_index: int = 0
    frame_index: int = 0
    image_keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"dataset {self.dataset}, episode {self.episode_index}, frame {self.frame_index}"


def pack_samples(encoded: Sequence[EncodedSample]) -> PackedBatch:
    """Concatenates encoded samples.

    Args:
        encoded: At least one sample; states, actions and pictures of equal shapes.

    Raises:
        DatasetError: There is no sample, or one has other shapes than the first; names it.
    """
    if not encoded:
        raise DatasetError("a batch has no samples", expected="at least one")
    for field in ("state", "actions"):
        shape = getattr(encoded[0], field).shape
        for sample in encoded:
            if getattr(sample, field).shape != shape:
                raise DatasetError(
                    f"the samples of a batch differ in the shape of their {field}",
                    where=sample,
                    found=list(getattr(sample, field).shape),
                    expected=f"{list(shape)} as in {encoded[0]}",
                    mend="give the datasets of a mixture the same state and action layout",
                )
    lengths = [sample.input_ids.shape[0] for sample in encoded]
    return PackedBatch(
        input_ids=torch.cat([sample.input_ids for sample in encoded]),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
        pixel_values=torch.cat([sample.pixel_values for sample in encoded]),
        state=torch.stack([sample.state for sample in encoded]),
        actions=torch.stack([sample.actions for sample in encoded]),
        action_is_pad=torch.stack([sample.action_is_pad for sample in encoded]),
        loss_weight=torch.ones(len(encoded)),
        dataset=_integers([sample.dataset for sample in encoded]),
        episode_index=_integers([sample.episode_index for sample in encoded]),
        frame_index=_integers([sample.frame_index for sample in encoded]),
        image_keys=tuple(key for sample in encoded for key in sample.image_keys),
    )


def _integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
