"""Attention written out: dense softmax per segment, for every dtype, device and derivative torch has.

The yardstick of the tests and the backend of last resort; slow on many segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_embodied.attention.segments import Segments


def varlen_attention_reference(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """Attention of every segment's queries to its own keys."""
    query_lengths, key_lengths = segments.cu_q.diff().tolist(), segments.cu_k.diff().tolist()
    parts = zip(
        torch.split(query, query_lengths),
        torch.split(key, key_lengths),
        torch.split(value, key_lengths),
        strict=True,
    )
    return torch.cat([_segment(*part, segments.causal, segments.scale) for part in parts])


def _segment(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    key, value = (rows.to(dtype).repeat_interleave(group, dim=1) for rows in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.to(dtype), key) * scale
    seen = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool, device=query.device)
    if causal:
        seen = seen.tril(key.shape[0] - query.shape[0])
    scores = scores.masked_fill(~seen, float("-inf"))
    blind = ~seen.any(dim=1)
    weights = scores.masked_fill(blind[:, None], 0.0).softmax(dim=-1).masked_fill(blind[:, None], 0.0)
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
