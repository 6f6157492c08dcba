"""What flow-matching policies share: draws that share an observation, the loss of the velocity, and denoising.

Whatever a network makes of an observation alone (keys and values of pictures, instruction and state) depends on neither
noise nor flow time. It is computed once, and serves all noise draws of a training step and all denoising steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from lightning_embodied.counts import check_count
from lightning_embodied.models.flow_matching import euler_sample, interpolate, sample_time, velocity_target
from lightning_embodied.models.loss import LossTerms
from lightning_embodied.models.module import PolicyModule
from lightning_embodied.models.noise import Generators
from lightning_embodied.packing import PackedBatch

Velocity = Callable[[Tensor, Tensor], Tensor]
"""Noisy chunks `[B, R, H, W]` and their flow times `[B, R]` to velocities, shaped like the chunks."""


class FlowMatchingModule(PolicyModule):
    """Base of policies that denoise action chunks; implement `build` and `observe`.

    Args:
        noise_samples_per_observation: Noise and time draws per observation and step, `R`.
        denoising_steps: Euler steps from noise to actions at inference.
        kwargs: Options of `PolicyModule`.

    Attributes:
        noise_time: Flow time of pure noise, 1 or 0; actions are at the other end.
    """

    noise_time: ClassVar[int] = 1

    def __init__(
        self,
        *,
        noise_samples_per_observation: int = 1,
        denoising_steps: int = 10,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**kwargs)
        self.noise_samples_per_observation = noise_samples_per_observation
        self.denoising_steps = denoising_steps
        for name in ("noise_samples_per_observation", "denoising_steps"):
            check_count(getattr(self, name), f"{type(self).__name__}({name}=…)")

    # What a subclass implements.

    @abstractmethod
    def observe(self, batch: PackedBatch) -> Velocity:
        """Reads the observations of a batch, once; what it returns gives the velocities of any noisy chunks."""

    # What it may change.

    @property
    def action_width(self) -> int:
        """Width `W` of the action vectors inside the network; the data's, padded with zeros behind."""
        return self.action_normalizer.dim

    def sample_time(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Draws flow times for training, float32."""
        return sample_time(shape, device)

    # What they share.

    def forward(self, batch: PackedBatch, noise: Tensor | None = None, time: Tensor | None = None) -> LossTerms:
        """Squared error of the velocity over the action dimensions that the data has.

        Args:
            batch: `B` samples.
            noise: `[B, R, H, W]`, `R` draws per sample; default: drawn.
            time: `[B, R]`, flow times; default: drawn.
        """
        actions = self.normalized_actions(batch)[:, None]
        dim = actions.shape[-1]
        actions = F.pad(actions, (0, self.action_width - dim))
        draws = (batch.batch_size, self.noise_samples_per_observation)
        if noise is None:
            noise = torch.randn(*draws, *actions.shape[2:], device=actions.device, dtype=actions.dtype)
        if time is None:
            time = self.sample_time(draws, actions.device)
        ends = (actions, noise) if self.noise_time else (noise, actions)
        velocity = self.observe(batch)(interpolate(*ends, time), time)
        losses = (velocity - velocity_target(*ends)).square()[..., :dim]
        return LossTerms.of_actions(losses, batch.action_is_pad, batch.loss_weight)

    def sample_actions(
        self, batch: PackedBatch, *, generator: Generators | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """Denoises action chunks; the observations are read once for all steps.

        Args:
            batch: `B` observations.
            generator: Source of the noise, one generator or one a row; default: see `sampling_seed`.
            noise: `[B, H, W]` to start from, in place of a draw.

        Returns:
            Normalised actions float32 `[B, H, A]`.
        """
        if noise is None:
            noise = self.initial_noise(batch.batch_size, generator, self.action_width)
        velocity = self.observe(batch)
        actions = euler_sample(velocity, noise[:, None], self.denoising_steps, noise_time=self.noise_time)
        return actions[:, 0, :, : self.action_normalizer.dim]
