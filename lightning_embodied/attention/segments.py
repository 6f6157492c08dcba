"""What every kernel of variable-length attention is told beside queries, keys and values."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Segments(NamedTuple):
    """Who sees whom, checked by `varlen_attention`.

    Attributes:
        cu_q: int32 `[B + 1]`, from 0 to the number of queries: segment `b` owns queries `cu_q[b]:cu_q[b + 1]`.
        cu_k: int32 `[B + 1]`, likewise for keys.
        max_q: Longest segment of queries.
        max_k: Longest segment of keys.
        causal: Hide keys after a query, the last query aligned with the last key.
        scale: Factor of the scores.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    scale: float
