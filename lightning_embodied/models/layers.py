"""Building blocks of the transformers: RMS norms, rotary positions, gated MLP and flow-time embedding.

Shapes and formulas follow pi0.5 (openpi's `gemma.py` and `pi0.py`, Apache-2.0); projections that share an input are
fused into one matrix product, which is what a small model on few cores gains most from.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

NORM_EPSILON = 1e-6


def rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """`x / sqrt(mean(x^2) + 1e-6)` over the last dimension, times `weight` if given."""
    return F.rms_norm(x, (x.shape[-1],), weight, NORM_EPSILON)


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Adaptive RMS norm of pi0.5: `rms_norm(x) * (1 + scale) + shift`."""
    return torch.addcmul(shift, rms_norm(x), 1 + scale)


class RotaryEmbedding(nn.Module):
    """Rotary positions (RoPE) on neighbouring pairs, as complex numbers: one kernel in place of seven.

    Args:
        head_dim: Width of a head; even.
        base: Base of the wave lengths.
    """

    frequencies: Tensor

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        self.register_buffer("frequencies", (base**-exponents).float(), persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Rotations complex64 `[T, 1, head_dim / 2]` of positions `[T]`."""
        angles = position_ids.float()[:, None, None] * self.frequencies.float()
        return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Applies rotary positions to queries or keys `[T, heads, head_dim]`."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


class GatedMLP(nn.Module):
    """Gemma's MLP: `down(gelu(gate(x)) * up(x))`, gate and up in one product.

    Args:
        width: Input and output width.
        hidden: Width between.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to `[..., width]`."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        down: Tensor = self.down(F.gelu(gate, approximate="tanh") * up)
        return down


def time_embedding(time: Tensor, width: int, min_period: float = 4e-3, max_period: float = 4.0) -> Tensor:
    """Sines and cosines of flow times, as openpi's `posemb_sincos`.

    Args:
        time: `[N]`, in [0, 1].
        width: Width of the result; even.
        min_period: Shortest period.
        max_period: Longest period.

    Returns:
        float32 `[N, width]`: the sines, then the cosines.
    """
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    period = min_period * (max_period / min_period) ** fraction
    angles = time.double()[:, None] * (2 * math.pi / period)
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float()


class TimeConditioning(nn.Module):
    """Flow time to the conditioning vector of the adaptive norms: two linear layers with SiLU after each.

    Args:
        width: Width of the result.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.linear_in = nn.Linear(width, width)
        self.linear_out = nn.Linear(width, width)

    def forward(self, time: Tensor) -> Tensor:
        """`[N]` to `[N, width]`."""
        hidden = F.silu(self.linear_in(time_embedding(time, self.width).to(self.linear_in.weight.dtype)))
        return F.silu(self.linear_out(hidden))
