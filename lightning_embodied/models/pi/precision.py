"""Which parts compute in float32 under `bf16-mixed`, as in openpi: norms, flow time, action and state projections."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or as it is if it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def full_precision(x: Tensor) -> torch.autocast:
    """A context in which nothing is rounded to half precision."""
    return torch.autocast(x.device.type, enabled=False)


def to_compute_dtype(x: Tensor) -> Tensor:
    """Tokens in the dtype that autocast computes in, so that residuals are not kept in twice the bytes."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
