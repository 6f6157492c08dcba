"""Checkpoint directories of LeRobot and openpi, read."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.models.directory import CONFIG, CheckpointDirectory
from lightning_embodied.models.pi.config_json import denoising_steps_of, sizes_of
from lightning_embodied.models.pi.sizes import PiSizes

PREFIX = "model."
EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
TIED_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
"""openpi's towers carry language heads that nothing reads; PaliGemma's is its token embedding."""


class PretrainedDirectory(CheckpointDirectory):
    """A checkpoint of pi0 or pi0.5 that is there to be read; see `CheckpointDirectory`."""

    def sizes(self, lerobot_type: str) -> PiSizes:
        """Sizes of the network.

        Args:
            lerobot_type: The policy expected, `pi0` or `pi05`.

        Raises:
            CheckpointError: It is of another policy, or its configuration cannot be followed.
        """
        try:
            return sizes_of(self.config, lerobot_type)
        except (KeyError, TypeError, ValueError) as error:
            told = error if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(
                "the configuration cannot be followed", where=self.path / CONFIG, found=told
            ) from error

    def denoising_steps(self) -> int:
        """Euler steps that the checkpoint acts with."""
        return denoising_steps_of(self.config)

    def places(self, stored: Iterable[str]) -> dict[str, str]:
        """Which stored tensor is which parameter; LeRobot puts `model.` before the names."""
        places = {name.removeprefix(PREFIX): name for name in stored}
        tied = places.pop(TIED_HEAD, None)
        if tied is not None:
            places.setdefault(EMBEDDING, tied)
        places.pop(EXPERT_HEAD, None)
        return places
