"""Variable-length attention on CUDA: FlashAttention 2, 3 and 4, and torch's own `varlen_attn`.

All take the same cumulative lengths, mask bottom-right and give 0 to a query without keys. They take half precisions
only. Interfaces after flash-attn 2.8, FlashAttention-3 (hopper/flash_attn_interface.py) and flash-attn-4 4.0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_embodied.attention.padded import without_pairs
from lightning_embodied.attention.segments import Segments


def flash_attention(
    function: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, segments: Segments
) -> Tensor:
    """Attention by a FlashAttention package's `flash_attn_varlen_func`.

    They go by name, because FlashAttention 4 has another one in the place where 2 and 3 have `cu_seqlens_q`. The
    function's result may be a tuple with the log-sum-exp behind.
    """
    if query.shape[0] == 0 or key.shape[0] == 0:
        return without_pairs(query, key, value)  # a launch without blocks is an error
    out = function(
        query,
        key,
        value,
        cu_seqlens_q=segments.cu_q,
        cu_seqlens_k=segments.cu_k,
        max_seqlen_q=segments.max_q,
        max_seqlen_k=segments.max_k,
        softmax_scale=segments.scale,
        causal=segments.causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


def torch_varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """Attention by `torch.nn.attention.varlen.varlen_attn`."""
    from torch.nn.attention.varlen import varlen_attn

    if query.shape[0] == 0 or key.shape[0] == 0:
        return without_pairs(query, key, value)
    cu_q, cu_k, max_q, max_k, causal, scale = segments
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0) if causal else (-1, -1)}
    group = query.shape[1] // key.shape[1]
    if group > 1 and _TAKES_GROUPS:
        options["enable_gqa"] = True
    elif group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    out = varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, **options)
    return out if isinstance(out, Tensor) else out[0]


def _takes_groups() -> bool:
    """Whether torch's `varlen_attn` has `enable_gqa`: 2.11 does not, 2.13 does."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


_TAKES_GROUPS = _takes_groups()  # once: torch.compile cannot trace the question
