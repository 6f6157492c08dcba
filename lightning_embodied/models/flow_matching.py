"""Flow matching of action chunks: a straight path from noise (t = 1) to actions (t = 0), and the way back.

Conventions are those of pi0 and pi0.5 (openpi, LeRobot): `x_t = t * noise + (1 - t) * actions`, the network predicts
the velocity `noise - actions`, and times are drawn from Beta(1.5, 1), which favours the noisy end. A path the other way
round, as GR00T's, is the same with the two ends exchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TIME_ALPHA = 1.5
TIME_RANGE = (0.001, 1.0)


def sample_time(shape: tuple[int, ...], device: torch.device | None = None) -> Tensor:
    """Draws flow times in `(0.001, 1]` from torch's random state: `Beta(1.5, 1) * 0.999 + 0.001`, float32.

    The Beta draw is `u ** (1 / 1.5)`, its inverse distribution function, so one uniform number is used per time.
    """
    low, high = TIME_RANGE
    return torch.rand(shape, device=device, dtype=torch.float32).pow_(1.0 / TIME_ALPHA).mul_(high - low).add_(low)


def interpolate(actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """The point `x_t` of the path.

    Args:
        actions: `[..., H, A]`, normalised; broadcasts against `noise`.
        noise: `[..., H, A]`.
        time: `[...]`.
    """
    time = time[..., None, None]
    return time * noise + (1 - time) * actions


def velocity_target(actions: Tensor, noise: Tensor) -> Tensor:
    """What the network learns: `d x_t / d t = noise - actions`."""
    return noise - actions


def euler_sample(
    velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor, steps: int, *, noise_time: int = 1
) -> Tensor:
    """Integrates from noise to actions with equal Euler steps.

    Args:
        velocity: Takes `x_t [..., H, A]` and `time [...]` and gives `d x_t / d t`, shaped like `x_t`.
        noise: `[..., H, A]`, the start.
        steps: Number of steps, and of calls of `velocity`.
        noise_time: Flow time of the noise; actions are at the other end of [0, 1].

    Returns:
        Normalised actions `[..., H, A]`.
    """
    sample, direction = noise, 1 - 2 * noise_time
    for step in range(steps):
        time = noise.new_full(noise.shape[:-2], noise_time + direction * step / steps)
        sample = torch.add(sample, velocity(sample, time), alpha=direction / steps)
    return sample
