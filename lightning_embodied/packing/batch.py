"""A batch without padding: all samples of a step concatenated along one token axis.

The layout is that of variable-length attention kernels (`cu_seqlens`, FlashAttention): sample `b` owns the tokens
`cu_seqlens[b]:cu_seqlens[b + 1]`, and samples never see each other. Cameras that a sample lacks have no tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PackedBatch:
    """`B` samples packed into `T` tokens. Lightning moves it between devices through `to`.

    It is no dataclass: Lightning's half precisions (`bf16-true`) would convert the fields of one and so round states
    and actions before they are normalised.

    Attributes:
        input_ids: int64 `[T]`. Text tokens, and the placeholder ids of `SampleEncoder` where the model puts image
            and state embeddings.
        position_ids: int64 `[T]`, restarting at 0 for every sample.
        cu_seqlens: int32 `[B + 1]`, starting at 0 and ending at `T`.
        max_seqlen: Longest sample in tokens.
        pixel_values: uint8 `[N_images, C, H, W]`: the pictures that exist, in token order. float32 levels 0 to 255 if
            the encoder resizes without rounding.
        state: float32 `[B, D]`: robot (and, if asked for, environment) state in the dataset's units.
        actions: float32 `[B, H, A]`: action chunks in the dataset's units.
        action_is_pad: bool `[B, H]`: true past the end of the episode.
        loss_weight: float32 `[B]`: weight of each sample in the loss, usually 1.
        dataset: int64 `[B]`: which dataset of a mixture the sample is from.
        episode_index: int64 `[B]`.
        frame_index: int64 `[B]`: index of the frame within its episode.
        image_keys: `N_images` feature keys: which camera each picture is from.
    """

    def __init__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        pixel_values: Tensor,
        state: Tensor,
        actions: Tensor,
        action_is_pad: Tensor,
        loss_weight: Tensor,
        dataset: Tensor,
        episode_index: Tensor,
        frame_index: Tensor,
        image_keys: tuple[str, ...] = (),
    ) -> None:
        self.input_ids = input_ids
        self.position_ids = position_ids
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = max_seqlen
        self.pixel_values = pixel_values
        self.state = state
        self.actions = actions
        self.action_is_pad = action_is_pad
        self.loss_weight = loss_weight
        self.dataset = dataset
        self.episode_index = episode_index
        self.frame_index = frame_index
        self.image_keys = image_keys

    @property
    def batch_size(self) -> int:
        """Number of samples `B`."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens `T`."""
        return self.input_ids.shape[0]

    def replace(self, **changes: Any) -> PackedBatch:  # noqa: ANN401
        """The batch with other values of some attributes."""
        return PackedBatch(**{**vars(self), **changes})

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedBatch:
        """The batch on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """The batch in page-locked memory, as `DataLoader(pin_memory=True)` asks for."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> PackedBatch:
        return self.replace(**{name: function(value) for name, value in vars(self).items() if torch.is_tensor(value)})
