"""Checkpoint directories of LeRobot and openpi, read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from os import PathLike
from typing import Any

from lightning_embodied.models.directory import CheckpointDirectory
from lightning_embodied.models.pi.config_json import denoising_steps_of, sizes_of

PREFIX = "model."
EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
TIED_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
"""openpi's towers carry language heads that nothing reads; PaliGemma's is its token embedding."""


class PretrainedDirectory(CheckpointDirectory):
    """A checkpoint of pi0 or pi0.5 that is there to be read; see `CheckpointDirectory`.

    Args:
        path: The directory, or a hub id.
        revision: Revision of a hub repository.
        lerobot_type: The policy expected, `pi0` or `pi05`.
    """

    def __init__(self, path: str | PathLike[str], revision: str | None = None, *, lerobot_type: str) -> None:
        super().__init__(path, revision)
        self.lerobot_type = lerobot_type

    def read_arguments(self) -> dict[str, Any]:
        """Sizes and denoising steps."""
        sizes = sizes_of(self.config, self.lerobot_type)
        return {"sizes": asdict(sizes), "denoising_steps": denoising_steps_of(self.config)}

    def places(self, stored: Iterable[str]) -> dict[str, str]:
        """Which stored tensor is which parameter; LeRobot puts `model.` before the names."""
        places = {name.removeprefix(PREFIX): name for name in stored}
        tied = places.pop(TIED_HEAD, None)
        if tied is not None:
            places.setdefault(EMBEDDING, tied)
        places.pop(EXPERT_HEAD, None)
        return places
