"""Checkpoint directories of LeRobot and openpi, read: `config.json` beside `model.safetensors`, whole or in shards.

Tensors are read one by one and become the parameters, so that a policy of 13 GB needs 13 GB; nothing is unpickled.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.hub import local_path
from lightning_embodied.models.pi.config_json import denoising_steps_of, sizes_of
from lightning_embodied.models.pi.sizes import PiSizes

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PREFIX = "model."
EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
TIED_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
"""openpi's towers carry language heads that nothing reads; PaliGemma's is its token embedding."""


class PretrainedDirectory:
    """A checkpoint that is there to be read.

    Args:
        path: The directory, or a hub id.
        revision: Revision of a hub repository.

    Raises:
        CheckpointError: There is no such directory or repository, or no readable `config.json` in it.
    """

    def __init__(self, path: str | PathLike[str], revision: str | None = None) -> None:
        patterns = (CONFIG, INDEX, "model*.safetensors")
        self.path = local_path(path, patterns, revision=revision, error=CheckpointError)
        self.config = _read_json(self.path / CONFIG)

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

    def load_into(self, network: nn.Module) -> None:
        """Makes the stored tensors the network's parameters, in float32; the network may be on the meta device.

        Raises:
            CheckpointError: A file is missing or damaged, or a weight is missing, unexpected or of another shape.
        """
        wanted = {name: list(parameter.shape) for name, parameter in network.state_dict().items()}
        try:
            with ExitStack() as stack:
                files = [stack.enter_context(safe_open(file, framework="pt")) for file in self._files()]
                places = _places(files)
                shapes = {name: list(file.get_slice(stored).get_shape()) for name, (file, stored) in places.items()}
                self._check(wanted, shapes)
                tensors = {name: file.get_tensor(stored).float() for name, (file, stored) in places.items()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                "the weights cannot be read",
                where=self.path,
                found=f"{type(error).__name__}: {error}",
                mend="download the checkpoint again; a file may be missing or cut short",
            ) from error
        network.load_state_dict(tensors, assign=True)

    def _files(self) -> list[Path]:
        if (self.path / WEIGHTS).is_file():
            return [self.path / WEIGHTS]
        if (self.path / INDEX).is_file():
            shards = _read_json(self.path / INDEX).get("weight_map", {})
            return [self.path / name for name in sorted(set(shards.values()))]
        raise CheckpointError(
            "there are no weights in the checkpoint",
            where=self.path,
            found=", ".join(sorted(file.name for file in self.path.iterdir())) or "an empty directory",
            expected=f"{WEIGHTS}, or {INDEX} and its shards",
        )

    def _check(self, wanted: dict[str, list[int]], found: dict[str, list[int]]) -> None:
        shared = wanted.keys() & found.keys()
        problems = {
            "missing": sorted(wanted.keys() - found.keys()),
            "unexpected": sorted(found.keys() - wanted.keys()),
            "of another shape": sorted(
                f"{name} {found[name]} for {wanted[name]}" for name in shared if found[name] != wanted[name]
            ),
        }
        told = [
            f"{len(names)} {what}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
            for what, names in problems.items()
            if names
        ]
        if told:
            raise CheckpointError(
                "the checkpoint's weights do not fit the policy",
                where=self.path,
                found="; ".join(told),
                expected=f"the {len(wanted)} parameters of the policy",
                mend="use the class and the sizes that the checkpoint was made with",
            )


def _places(files: list[Any]) -> dict[str, tuple[Any, str]]:
    """Parameter of the network to the open file and the name it is stored under; LeRobot puts `model.` before it."""
    places = {name.removeprefix(PREFIX): (file, name) for file in files for name in file.keys()}  # noqa: SIM118
    tied = places.pop(TIED_HEAD, None)
    if tied is not None:
        places.setdefault(EMBEDDING, tied)
    places.pop(EXPERT_HEAD, None)
    return places


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "a file of the checkpoint cannot be read",
            where=path,
            found=f"{type(error).__name__}: {error}",
            expected=f"{CONFIG} and {WEIGHTS} as LeRobot or openpi writes them",
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError("a file of the checkpoint holds no JSON object", where=path, found=type(content).__name__)
    return content
