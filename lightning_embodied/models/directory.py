"""Checkpoint directories as Hugging Face lays them out: `config.json` beside `model.safetensors`, whole or in shards.

Tensors are read one by one and become the parameters, so that a policy of 13 GB needs 13 GB; nothing is unpickled.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.hub import local_path

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


class CheckpointDirectory(ABC):
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

    @abstractmethod
    def read_arguments(self) -> dict[str, Any]:
        """Arguments of the policy's class that `self.config` decides; may raise whatever reading a mapping can."""

    def arguments(self) -> dict[str, Any]:
        """Arguments of the policy's class that the checkpoint decides.

        Raises:
            CheckpointError: It is of another policy, or its configuration cannot be followed.
        """
        try:
            return self.read_arguments()
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            told = error if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(
                "the configuration cannot be followed", where=self.path / CONFIG, found=told
            ) from error

    def stored(self) -> list[str]:
        """Names of the tensors, from the heads of the files alone.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        with self._opened() as files:
            return list(files)

    def places(self, stored: Iterable[str]) -> dict[str, str]:
        """Which stored tensor is which parameter; a subclass renames, or leaves out what its network lacks.

        Args:
            stored: Names of the tensors in the files.

        Returns:
            Name of a parameter to name of a tensor.
        """
        return {name: name for name in stored}

    def load_into(self, network: nn.Module) -> None:
        """Makes the stored tensors the network's parameters, in float32; the network may be on the meta device.

        Parameters that are tied stay so and need be stored once.

        Raises:
            CheckpointError: A file is missing or damaged, or a weight is missing, unexpected or of another shape.
        """
        names: dict[int, str] = {}
        state = network.state_dict(keep_vars=True)
        tied = {name: names[id(value)] for name, value in state.items() if names.setdefault(id(value), name) != name}
        wanted = {name: list(value.shape) for name, value in state.items() if name not in tied}
        with self._opened() as files:
            places = {name: place for name, place in self.places(files).items() if name not in tied}
            shapes = {name: list(files[place].get_slice(place).get_shape()) for name, place in places.items()}
            self._check(wanted, shapes)
            tensors = {name: files[place].get_tensor(place).float() for name, place in places.items()}
        network.load_state_dict(tensors, assign=True, strict=False)
        for name, original in tied.items():
            parent, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(parent), leaf, network.get_parameter(original))

    @contextmanager
    def _opened(self) -> Iterator[dict[str, Any]]:
        """Name of a stored tensor to its open file."""
        try:
            with ExitStack() as stack:
                files = [stack.enter_context(safe_open(file, framework="pt")) for file in self._files()]
                yield {name: file for file in files for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                "the weights cannot be read",
                where=self.path,
                found=f"{type(error).__name__}: {error}",
                mend="download the checkpoint again; a file may be missing or cut short",
            ) from error

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


def write_directory(path: str | PathLike[str], tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Writes `config.json` and `model.safetensors`.

    Args:
        path: The directory; made if it does not exist. Files of an earlier checkpoint in it are replaced.
        tensors: The weights, on any device; none shares memory with another.
        config: Plain JSON values.

    Raises:
        CheckpointError: It cannot be written; what was there before stays, or does not open.
    """
    directory = Path(path)
    unfinished = directory / f"{WEIGHTS}.unfinished"
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(stored, unfinished, metadata={"format": "pt"})
        for name in (CONFIG, INDEX):  # a directory whose weights are being replaced does not open
            (directory / name).unlink(missing_ok=True)
        unfinished.replace(directory / WEIGHTS)
        (directory / CONFIG).write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            "the checkpoint cannot be written",
            where=directory,
            found=f"{type(error).__name__}: {error}",
            expected="a directory that can be made or written to, and room on the disk",
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "a file of the checkpoint cannot be read",
            where=path,
            found=f"{type(error).__name__}: {error}",
            expected=f"a directory with {CONFIG} and {WEIGHTS}",
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError("a file of the checkpoint holds no JSON object", where=path, found=type(content).__name__)
    return content
