"""Layers with one set of weights per robot: GR00T's state and action encoders and its action decoder.

Robots differ in what a state or action dimension means, so each embodiment projects its own vectors into the shared
transformer (arXiv:2503.14734, section 2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Embodiment = int | Tensor
"""Which embodiment samples are of: one number for all of them, or int64 `[B]`."""


class EmbodimentLinear(nn.Module):
    """`x @ W[e] + b[e]`.

    Args:
        embodiments: Number of embodiments.
        width_in: Width of the input.
        width_out: Width of the output.
    """

    def __init__(self, embodiments: int, width_in: int, width_out: int) -> None:
        super().__init__()
        # NVIDIA's 0.02 is this at full width; a narrow network would pass hardly anything on
        self.W = nn.Parameter(torch.randn(embodiments, width_in, width_out) * width_in**-0.5)
        self.b = nn.Parameter(torch.zeros(embodiments, width_out))

    def forward(self, x: Tensor, embodiment: Embodiment) -> Tensor:
        """`[B, L, width_in]` to `[B, L, width_out]`; one embodiment for all is one matrix product."""
        x = x.to(self.W.dtype)
        if isinstance(embodiment, int):
            return F.linear(x, self.W[embodiment].mT, self.b[embodiment])
        return x @ self.W[embodiment] + self.b[embodiment, None]


class EmbodimentMLP(nn.Module):
    """Two layers with a ReLU between: the state encoder and the action decoder.

    Args:
        embodiments: Number of embodiments.
        width_in: Width of the input.
        hidden: Width between.
        width_out: Width of the output.
    """

    def __init__(self, embodiments: int, width_in: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.layer1 = EmbodimentLinear(embodiments, width_in, hidden)
        self.layer2 = EmbodimentLinear(embodiments, hidden, width_out)

    def forward(self, x: Tensor, embodiment: Embodiment) -> Tensor:
        """`[B, L, width_in]` to `[B, L, width_out]`."""
        out: Tensor = self.layer2(F.relu(self.layer1(x, embodiment)), embodiment)
        return out


class ActionEncoder(nn.Module):
    """Noisy actions and their flow time to tokens.

    Args:
        embodiments: Number of embodiments.
        action_dim: Width of the actions.
        width: Width of the tokens.
    """

    def __init__(self, embodiments: int, action_dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.W1 = EmbodimentLinear(embodiments, action_dim, width)
        self.W2 = EmbodimentLinear(embodiments, 2 * width, width)
        self.W3 = EmbodimentLinear(embodiments, width, width)

    def forward(self, actions: Tensor, timestep: Tensor, embodiment: Embodiment) -> Tensor:
        """Actions `[B, L, A]` at integer flow times `[B, L]` to `[B, L, width]`."""
        embedded = self.W1(actions, embodiment)
        time = sinusoids(timestep, self.width, self.width // 2).to(embedded.dtype)
        hidden = F.silu(self.W2(torch.cat((embedded, time), dim=-1), embodiment))
        tokens: Tensor = self.W3(hidden, embodiment)
        return tokens


def sinusoids(timestep: Tensor, width: int, periods: int) -> Tensor:
    """Sines, then cosines, of `timestep * 10000 ** (-i / periods)` for `i` up to half the width.

    Args:
        timestep: `[...]`.
        width: Width of the result; even.
        periods: What `i` is divided by; its last value or one more, depending on whose formula it is.

    Returns:
        float32 `[..., width]`.
    """
    index = torch.arange(width // 2, device=timestep.device, dtype=torch.float32)
    angles = timestep.float()[..., None] * torch.exp(index * (-math.log(10_000.0) / periods))
    return torch.cat((angles.sin(), angles.cos()), dim=-1)
