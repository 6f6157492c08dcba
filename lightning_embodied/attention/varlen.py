"""`varlen_attention`: samples of different lengths, concatenated, each attending to itself alone.

The interface is that of FlashAttention's variable-length kernels: cumulative lengths instead of masks and padding.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lightning_embodied.attention.backends import choose_backend
from lightning_embodied.attention.segments import Segments
from lightning_embodied.errors import ConfigError


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention of the queries of each segment to the keys of the same segment.

    Args:
        query: `[Tq, Hq, D]`.
        key: `[Tk, Hkv, D]`; `Hq` is a multiple of `Hkv` (grouped-query attention if they differ).
        value: `[Tk, Hkv, D]`.
        cu_seqlens_q: int32 `[B + 1]`, from 0 to `Tq`: segment `b` owns queries `cu[b]:cu[b + 1]`. May be empty.
        cu_seqlens_k: int32 `[B + 1]`, from 0 to `Tk`: likewise for keys; the same tensor for self-attention.
        max_seqlen_q: Longest segment of queries.
        max_seqlen_k: Longest segment of keys.
        causal: Hide keys after a query, the last query aligned with the last key (bottom-right, as FlashAttention).
        scale: Factor of the scores. Default: `D ** -0.5`.
        backend: Name of a backend of `attention_backends()`. Default: the best one here.

    Returns:
        `[Tq, Hq, D]`; rows without any key are 0.

    Raises:
        ConfigError: Shapes or dtypes do not fit, cumulative lengths do not end at the number of tokens, or the
            backend cannot be used.
    """
    _check_tensors(query, key, value)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    if isinstance(scale, Tensor):
        raise ConfigError("the scale is a tensor, to which attention gives no gradient", expected="a Python float")
    segments = Segments(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale)
    _check_segments(segments, query.shape[0], key.shape[0])
    _check_devices(query, key, value, cu_seqlens_q, cu_seqlens_k)
    query, key, value = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (query, key, value))
    return choose_backend(query, backend).kernel(query, key, value, segments)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, rows in (("query", query), ("key", key), ("value", value)):
        if not isinstance(rows, Tensor):
            raise ConfigError(f"{name} is no tensor", found=type(rows).__name__)
    fits = query.dim() == key.dim() == 3 and key.shape == value.shape and query.shape[2] == key.shape[2] > 0
    if not fits or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ConfigError(
            "query, key and value do not fit each other",
            found=f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}",
            expected="[Tq, Hq, D], [Tk, Hkv, D], [Tk, Hkv, D] with Hq a multiple of Hkv",
        )
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point() or query.dtype.itemsize < 2:
        raise ConfigError(
            "query, key and value do not share one floating dtype",
            found=f"{query.dtype}, {key.dtype}, {value.dtype}",
            expected="float16, bfloat16, float32 or float64 for all three",
        )


def _check_segments(segments: Segments, queries: int, keys: int) -> None:
    for name, cu_seqlens in (("q", segments.cu_q), ("k", segments.cu_k)):
        is_tensor = isinstance(cu_seqlens, Tensor)
        if not is_tensor or cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise ConfigError(
                f"cu_seqlens_{name} are not cumulative lengths",
                found=f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}" if is_tensor else type(cu_seqlens).__name__,
                expected="a tensor, int32 [B + 1], with at least one segment",
            )
    if segments.cu_q.shape != segments.cu_k.shape:
        raise ConfigError(
            "queries and keys differ in their number of segments",
            found=f"{segments.cu_q.shape[0] - 1} and {segments.cu_k.shape[0] - 1}",
            expected="as many of keys as of queries; a segment may be empty",
        )
    _check_lengths("q", segments.cu_q, segments.max_q, queries)
    _check_lengths("k", segments.cu_k, segments.max_k, keys)


def _check_devices(*tensors: Tensor) -> None:
    if any(tensor.device != tensors[0].device for tensor in tensors):
        raise ConfigError(
            "query, key, value and cumulative lengths lie on different devices",
            found=", ".join(str(tensor.device) for tensor in tensors),
            expected="one device for all",
            mend="move the batch whole, as `PackedBatch.to` does",
        )


def _check_lengths(name: str, cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> None:
    if not isinstance(max_seqlen, int | torch.SymInt):
        raise ConfigError(
            f"max_seqlen_{name} is not a Python int",
            found=type(max_seqlen).__name__,
            mend="call `int()` on it once a batch: reading a GPU's tensor in every layer stalls the GPU",
        )
    # reading a CUDA tensor here would wait for the device; under compilation there is nothing to read
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    bounds = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != tokens or min(lengths) < 0:
        raise ConfigError(
            f"cu_seqlens_{name} do not cover the tokens",
            found=f"from {bounds[0]} to {bounds[-1]}, shortest segment {min(lengths)}",
            expected=f"ascending from 0 to {tokens}",
            mend="give every token a segment; padding rows are a segment of their own",
        )
    if max(lengths) > max_seqlen:
        raise ConfigError(f"max_seqlen_{name} is below the longest segment", found=max_seqlen, expected=max(lengths))
