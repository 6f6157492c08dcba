"""Variable-length attention by padding: exact, and the slow way; gives way to `lightning_embodied.attention`."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def varlen_attention(  # noqa: PLR0917
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int
) -> Tensor:
    """Attention within segments: `q [Tq, H, D]`, `k` and `v` `[Tk, H, D]` to `[Tq, H, D]`."""
    batch = cu_q.shape[0] - 1
    query_rows, key_rows = _rows(cu_q, q.shape[0], max_q), _rows(cu_k, k.shape[0], max_k)
    mask = torch.arange(max_k, device=q.device) < cu_k.diff()[:, None]
    padded = F.scaled_dot_product_attention(
        _pad(q, query_rows, batch, max_q),
        _pad(k, key_rows, batch, max_k),
        _pad(v, key_rows, batch, max_k),
        attn_mask=mask[:, None, None],
    )
    return padded.transpose(1, 2).flatten(0, 1).index_select(0, query_rows)


def _pad(rows: Tensor, index: Tensor, batch: int, longest: int) -> Tensor:
    padded = rows.new_zeros(batch * longest, *rows.shape[1:]).index_copy(0, index, rows)
    return padded.view(batch, longest, *rows.shape[1:]).transpose(1, 2)


def _rows(cu_seqlens: Tensor, total: int, longest: int) -> Tensor:
    segment = torch.arange(cu_seqlens.shape[0] - 1, device=cu_seqlens.device)
    segment = segment.repeat_interleave(cu_seqlens.diff().long(), output_size=total)
    offset = torch.arange(total, device=cu_seqlens.device) - cu_seqlens[:-1].long()[segment]
    return segment * longest + offset
