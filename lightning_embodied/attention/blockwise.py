"""The block masks of pi0, pi0.5 and SmolVLA without a mask: an exact decomposition into variable-length calls.

openpi and LeRobot write the rule as a dense mask, token i sees token j if `cumsum(att)[j] <= cumsum(att)[i]`, which
rules out fast kernels and reads T^2 values. The same rule says that a block of tokens sees everything of its sample up
to its own end: one rectangular call without mask. A run of blocks of one token is one bottom-right causal call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from lightning_embodied.attention.varlen import varlen_attention
from lightning_embodied.counts import check_count, check_counts

_Range = tuple[int, int]


@dataclass(frozen=True)
class _Segment:
    """Rows of queries and the rows of the keys they see, as half-open ranges."""

    queries: _Range
    keys: tuple[_Range, ...]
    causal: bool


@dataclass(frozen=True)
class _Call:
    """One variable-length call: rows to gather (None: all, in order) and cumulative lengths."""

    query_rows: Tensor | None
    key_rows: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, backend: str | None) -> Tensor:
        """Output rows of this call's queries."""
        return varlen_attention(
            _gather(query, self.query_rows),
            _gather(key, self.key_rows),
            _gather(value, self.key_rows),
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            self.max_seqlen_q,
            self.max_seqlen_k,
            causal=self.causal,
            scale=scale,
            backend=backend,
        )


class BlockLayout:
    """Which tokens see which, for packed samples made of blocks; built once per batch, used by every layer.

    Args:
        blocks: For each sample the lengths of its blocks in order. A token sees its own block and all blocks of its
            sample before it: `[[700, 50]]` is pi0.5 (prefix, actions), `[[700, 1, 50]]` pi0 (prefix, state, actions),
            `[[700] + [1] * 50]` SmolVLA (causal actions). A block may be empty.
        device: Where the tokens are.

    Raises:
        ConfigError: A length is not a whole number from 0 on.
    """

    def __init__(self, blocks: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> None:
        segments: list[_Segment] = []
        start = 0
        for sample, given in enumerate(blocks):
            lengths = check_counts(given, f"BlockLayout(blocks=…)[{sample}]")
            for stop, end, causal in _segments(lengths):
                segments.append(_Segment((start + stop, start + end), ((start, start + end),), causal))
            start += sum(lengths)
        self._calls, self._order = _plan(segments, start, start, device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, backend: str | None = None
    ) -> Tensor:
        """Attention of packed tokens under the layout's rule.

        Args:
            query: `[T, Hq, D]`, the samples of the layout one after the other.
            key: `[T, Hkv, D]`.
            value: `[T, Hkv, D]`.
            scale: Factor of the scores. Default: `D ** -0.5`.
            backend: Name of a backend of `attention_backends()`. Default: the best one here.

        Returns:
            `[T, Hq, D]`.
        """
        return _attend(self._calls, self._order, query, key, value, scale, backend)


class PrefixSuffixLayout:
    """How suffixes read packed prefixes whose keys and values were computed before.

    The prefix never sees a suffix, so its keys and values serve all denoising steps, and all `draws` suffixes of a
    sample: several noise draws of one observation cost one prefix.

    Args:
        prefix_lengths: Tokens of each sample's prefix.
        suffix_blocks: Lengths of the blocks of every suffix, `H` tokens in all: `[50]` for pi0.5, `[1, 50]` for pi0,
            `[1] * 50` for causal actions.
        draws: Suffixes per sample, `R`. Suffix rows are ordered by sample, then draw, then token.
        device: Where the tokens are.

    Attributes:
        position_ids: int64 `[B * R * H]`: positions of the suffix tokens, counted on from their prefix.

    Raises:
        ConfigError: A length is not a whole number from 0 on, or there is no draw or no suffix token.
    """

    def __init__(
        self,
        prefix_lengths: Sequence[int],
        suffix_blocks: Sequence[int],
        draws: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        prefix_lengths = check_counts(prefix_lengths, "PrefixSuffixLayout(prefix_lengths=…)")
        suffix_blocks = check_counts(suffix_blocks, "PrefixSuffixLayout(suffix_blocks=…)")
        draws = check_count(draws, "PrefixSuffixLayout(draws=…)")
        horizon, total = check_count(sum(suffix_blocks), "PrefixSuffixLayout(suffix_blocks=…)"), sum(prefix_lengths)
        starts = [0, *accumulate(prefix_lengths)]
        segments = [
            _Segment(
                queries=(row + begin, row + end),
                keys=((starts[sample], starts[sample + 1]), (total + row, total + row + end)),
                causal=causal,
            )
            for sample in range(len(prefix_lengths))
            for row in range(sample * draws * horizon, (sample + 1) * draws * horizon, horizon)
            for begin, end, causal in _segments(suffix_blocks)
        ]
        suffix_rows = len(prefix_lengths) * draws * horizon
        self._calls, self._order = _plan(segments, suffix_rows, total + suffix_rows, device)
        firsts = torch.tensor(prefix_lengths, device=device).repeat_interleave(draws)
        self.position_ids = (firsts.unsqueeze(1) + torch.arange(horizon, device=device)).flatten()

    def attend(
        self,
        query: Tensor,
        prefix: tuple[Tensor, Tensor],
        suffix: tuple[Tensor, Tensor],
        *,
        scale: float | None = None,
        backend: str | None = None,
    ) -> Tensor:
        """Attention of the suffix tokens to their sample's prefix and to their own suffix.

        Args:
            query: `[B * R * H, Hq, D]`.
            prefix: Keys and values of the packed prefixes, each `[Tp, Hkv, D]`; the cache of denoising.
            suffix: Keys and values of the suffixes, each `[B * R * H, Hkv, D]`.
            scale: Factor of the scores. Default: `D ** -0.5`.
            backend: Name of a backend of `attention_backends()`. Default: the best one here.

        Returns:
            `[B * R * H, Hq, D]`.
        """
        key, value = (torch.cat(rows) for rows in zip(prefix, suffix, strict=True))
        return _attend(self._calls, self._order, query, key, value, scale, backend)


def _segments(blocks: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """Start and end of each block, runs of one-token blocks merged into a causal one; empty blocks left out."""
    start = 0
    for single, run in groupby((length for length in blocks if length), key=lambda length: length == 1):
        lengths = list(run)
        for length in [len(lengths)] if single else lengths:
            yield start, start + length, single and length > 1
            start += length


def _plan(
    segments: Sequence[_Segment], query_rows: int, key_rows: int, device: torch.device | str
) -> tuple[tuple[_Call, ...], Tensor | None]:
    """One call for the segments without mask and one for the causal ones, and the order of their joined outputs."""
    parts = [[segment for segment in segments if segment.causal == causal] for causal in (False, True)]
    calls = tuple(_call(part, query_rows, key_rows, device) for part in parts if part)
    if len(calls) < 2:
        return calls, None
    rows = [_rows([segment.queries for segment in part], device) for part in parts]
    return calls, torch.argsort(torch.cat(rows))


def _call(segments: Sequence[_Segment], query_rows: int, key_rows: int, device: torch.device | str) -> _Call:
    queries = [segment.queries for segment in segments]
    keys = [part for segment in segments for part in segment.keys]
    lengths_q = [stop - start for start, stop in queries]
    lengths_k = [sum(stop - start for start, stop in segment.keys) for segment in segments]
    return _Call(
        query_rows=None if _is_everything(queries, query_rows) else _rows(queries, device),
        key_rows=None if _is_everything(keys, key_rows) else _rows(keys, device),
        cu_seqlens_q=torch.tensor([0, *accumulate(lengths_q)], dtype=torch.int32, device=device),
        cu_seqlens_k=torch.tensor([0, *accumulate(lengths_k)], dtype=torch.int32, device=device),
        max_seqlen_q=max(lengths_q),
        max_seqlen_k=max(lengths_k),
        causal=segments[0].causal,
    )


def _is_everything(ranges: Sequence[_Range], rows: int) -> bool:
    """Whether the ranges are all rows, once and in order."""
    joints = [0, *(bound for part in ranges for bound in part), rows]
    return all(joints[i] == joints[i + 1] for i in range(0, len(joints), 2))


def _rows(ranges: Sequence[_Range], device: torch.device | str) -> Tensor:
    """int64: the rows of the ranges, one after the other."""
    starts, stops = torch.tensor(ranges, device=device).unbind(1)
    lengths = stops - starts
    total = sum(stop - start for start, stop in ranges)
    shift = (starts - lengths.cumsum(0) + lengths).repeat_interleave(lengths, output_size=total)
    return torch.arange(total, device=device) + shift


def _gather(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows.index_select(0, index)


def _attend(
    calls: Sequence[_Call],
    order: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    backend: str | None,
) -> Tensor:
    parts = [call.attend(query, key, value, scale, backend) for call in calls]
    if not parts:
        return query * 0.0  # no tokens at all
    return parts[0] if order is None else torch.cat(parts).index_select(0, order)
