"""Variable-length attention by padding inside the call: for GPUs and dtypes that no variable-length kernel takes.

The rest of the model stays packed, so only attention pays for padding. Nothing is read back from the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lightning_embodied.attention.segments import Segments

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN's: with a mask its gradients may be NaN on Hopper (pytorch/pytorch issue 196678, torch 2.11 to 2.13)."""


def varlen_attention_padded(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """Attention of every segment's queries to its own keys."""
    if query.shape[0] == 0 or key.shape[0] == 0:
        return without_pairs(query, key, value)
    cu_q, cu_k, max_q, max_k, causal, scale = segments
    group = query.shape[1] // key.shape[1]
    rows_q, rows_k = _rows(cu_q, max_q, query.shape[0]), _rows(cu_k, max_k, key.shape[0])
    number = cu_q.shape[0] - 1
    queries = _pad(query, rows_q, number, max_q)
    keys, values = (_pad(rows, rows_k, number, max_k).repeat_interleave(group, dim=1) for rows in (key, value))
    seen = _seen(cu_q.diff(), cu_k.diff(), max_q, max_k, causal)
    blind = seen.any(dim=3, keepdim=True).logical_not()
    # A softmax over nothing is NaN, and so is its gradient: such a query sees everything, and then counts for nothing.
    with sdpa_kernel(_KERNELS):
        out = scaled_dot_product_attention(queries, keys, values, attn_mask=seen | blind, scale=scale)
    out = out.masked_fill(blind, 0.0)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, rows_q)


def without_pairs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention where there are no queries or no keys at all: zeros, and zero gradients for all three."""
    return query * 0.0 + (key.sum() + value.sum()) * 0.0


def _rows(cu_seqlens: Tensor, longest: int, tokens: int) -> Tensor:
    """Where each token lies in the flattened padded batch: int64 `[tokens]`."""
    starts, lengths = cu_seqlens.narrow(0, 0, cu_seqlens.shape[0] - 1), cu_seqlens.diff()
    shift = torch.arange(lengths.shape[0], device=cu_seqlens.device) * longest - starts
    return torch.arange(tokens, device=cu_seqlens.device) + shift.repeat_interleave(lengths, output_size=tokens)


def _pad(rows: Tensor, places: Tensor, number: int, longest: int) -> Tensor:
    """`[tokens, H, D]` to `[number, H, longest, D]`, 0 where there is no token."""
    padded = rows.new_zeros(number * longest, *rows.shape[1:]).index_copy(0, places, rows)
    return padded.view(number, longest, *rows.shape[1:]).transpose(1, 2)


def _seen(lengths_q: Tensor, lengths_k: Tensor, max_q: int, max_k: int, causal: bool) -> Tensor:
    """Which padded query sees which padded key: bool `[B, 1, 1 or max_q, max_k]`."""
    keys = torch.arange(max_k, device=lengths_k.device)
    seen = keys < lengths_k.view(-1, 1, 1, 1)
    if causal:
        queries = torch.arange(max_q, device=lengths_q.device).view(-1, 1)
        seen = seen & (keys <= queries + (lengths_k - lengths_q).view(-1, 1, 1, 1))
    return seen
