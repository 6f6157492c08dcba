"""What an action expert reads of a batch's observations, laid out shortest first.

Samples of equal lengths then lie side by side and share their kernel calls, whatever order the loader made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_embodied.attention import PrefixSuffixLayout
from lightning_embodied.packing import PackedBatch

KeyValue = tuple[Tensor, Tensor]
"""Keys and values `[T, heads, head_dim]` of one layer."""


@dataclass(frozen=True)
class Prefix:
    """Encoded observations, the shortest first.

    Attributes:
        cache: Keys and values of every layer.
        lengths: Tokens of each observation, ascending.
        order: int64 `[B]`: which sample of the batch each one is.
        back: int64 `[B]`: which of these observations each sample of the batch is.
    """

    cache: list[KeyValue]
    lengths: list[int]
    order: Tensor
    back: Tensor = field(init=False)
    _layouts: dict[tuple[int, ...], PrefixSuffixLayout] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Finds the way back to the order of the batch."""
        object.__setattr__(self, "back", self.order.argsort())

    def layout(self, suffix_blocks: Sequence[int], draws: int = 1) -> PrefixSuffixLayout:
        """How `draws` suffixes per observation read it; made once for all denoising steps."""
        key = (draws, *suffix_blocks)
        if key not in self._layouts:
            self._layouts[key] = PrefixSuffixLayout(self.lengths, suffix_blocks, draws, self.order.device)
        return self._layouts[key]


@dataclass(frozen=True)
class PrefixOrder:
    """The tokens of a batch with the shortest sample first.

    Attributes:
        rows: int64 `[T]`: which token of the batch each one is.
        position_ids: int64 `[T]`.
        cu_seqlens: int32 `[B + 1]`.
        max_seqlen: Longest sample in tokens.
        lengths: Tokens of each sample, ascending.
        order: int64 `[B]`: which sample of the batch each one is.
    """

    rows: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    lengths: list[int]
    order: Tensor

    @classmethod
    def of(cls, batch: PackedBatch) -> PrefixOrder:
        """The order of a batch's tokens."""
        lengths, order = batch.cu_seqlens.diff().long().sort(stable=True)
        ends = lengths.cumsum(0)
        shift = batch.cu_seqlens[:-1].long()[order] - (ends - lengths)
        rows = torch.arange(batch.num_tokens, device=ends.device)
        rows += shift.repeat_interleave(lengths, output_size=batch.num_tokens)
        cu_seqlens = torch.cat((ends.new_zeros(1), ends)).int()
        return cls(rows, batch.position_ids[rows], cu_seqlens, batch.max_seqlen, lengths.tolist(), order)
