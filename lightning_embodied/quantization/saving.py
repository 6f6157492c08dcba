"""Writes a quantised policy: one directory, whole or not at all.

It is written under another name beside its place and then renamed, so nobody ever sees half of it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_embodied.errors import ConfigError
from lightning_embodied.models import Normalizer, PolicyModule
from lightning_embodied.quantization.loading import description, stored_name
from lightning_embodied.quantization.manifest import MANIFEST, WEIGHTS, file_entry, write_manifest
from lightning_embodied.quantization.quantizing import DTYPES, Quantization
from lightning_embodied.version import __version__


def save_policy(
    policy: PolicyModule,
    quantization: Quantization,
    path: str | Path,
    *,
    overwrite: bool = False,
    source: Mapping[str, Any] | None = None,
    attach: Callable[[Path], object] | None = None,
) -> Path:
    """Writes a quantised policy for `load_policy`.

    Args:
        policy: What `quantize_policy` quantised.
        quantization: What it returned, calibrated or not.
        path: The directory; it must not exist yet.
        overwrite: Replace a quantised policy that is there.
        source: Plain values about where the policy is from, such as its checkpoint's hash.
        attach: Writes more files into the directory it is given; they are hashed as well.

    Returns:
        The directory.

    Raises:
        ConfigError: There is something already, or the directory cannot be written.
    """
    target = Path(path)
    check_target(target, overwrite=overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".unfinished"))
    except OSError as error:
        raise ConfigError("the quantised policy cannot be written", where=target, found=error) from error
    try:
        if attach is not None:
            attach(unfinished)
        _write(unfinished, policy, quantization, source or {})
        _put(unfinished, target)
    except OSError as error:
        raise ConfigError("the quantised policy cannot be written", where=target, found=error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def check_target(target: Path, *, overwrite: bool) -> None:
    """Raises `ConfigError` unless a quantised policy may be written there; called before anything is computed."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / MANIFEST).is_file():
        raise ConfigError(
            "there is something else than a quantised policy",
            where=target,
            mend="choose another directory; nothing is overwritten that this command did not write",
        )
    if not overwrite:
        raise ConfigError(
            "there is a quantised policy already", where=target, mend="choose another directory, or set overwrite"
        )


def stored_tensors(policy: PolicyModule, kept: torch.dtype) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by their name in the file, and the names of tied ones with the name each is stored under."""
    names: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    parameters = {name for name, _ in policy.named_parameters(remove_duplicate=False)}
    for name, value in policy.state_dict(keep_vars=True).items():
        first = names.setdefault(id(value), name)
        if first != name:
            tied[name] = first
        else:
            stored = value.detach().to(kept) if name in parameters else value.detach()
            tensors[stored_name(name)] = stored.cpu().contiguous()
    return tensors, tied


def _write(folder: Path, policy: PolicyModule, quantization: Quantization, source: Mapping[str, Any]) -> None:
    tensors, tied = stored_tensors(policy, DTYPES[quantization.recipe.kept])
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    checkpoint: dict[str, Any] = {}
    policy.on_save_checkpoint(checkpoint)
    content = {
        "policy": checkpoint["policy_class"],
        "spec": checkpoint["policy_spec"],
        "normalizers": _normalizers(policy),
        "recipe": asdict(quantization.recipe),
        "layers": _layers(quantization),
        "kept_layers": {name: one.reason for name, one in quantization.layers.items() if not one.quantized},
        "tensors": {name: description(tensor) for name, tensor in tensors.items()},
        "tied": tied,
        "files": {file.name: file_entry(file) for file in sorted(folder.iterdir())},
        "source": dict(source),
        "versions": {"lightning_embodied": __version__, "torch": str(torch.__version__)},
    }
    write_manifest(folder, content)
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _layers(quantization: Quantization) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "format": quantization.formats[name],
            "relative_error": error,
            "input_scale": quantization.activations.get(name),
        }
        for name, error in quantization.errors.items()
    }


def _normalizers(policy: PolicyModule) -> dict[str, dict[str, Any]]:
    """How states and actions are scaled, for readers without this package: `(value - centre) / scale + shift`."""

    def plain(normalizer: Normalizer, mode: str, keys: tuple[str, ...]) -> dict[str, Any]:
        numbers = {"centre": normalizer.centre.tolist(), "scale": normalizer.scale.tolist()}
        return {"mode": mode, "keys": list(keys), **numbers, "shift": normalizer.shift}

    spec = policy.spec
    return {
        "state": plain(policy.state_normalizer, policy.state_normalization, spec.state_keys),
        "action": plain(policy.action_normalizer, policy.action_normalization, (spec.action_key,)),
    }


def _put(unfinished: Path, target: Path) -> None:
    """Makes the directory that is written the one that is read."""
    mask = os.umask(0)
    os.umask(mask)
    unfinished.chmod(0o777 & ~mask)
    if not target.exists():
        unfinished.rename(target)
        return
    aside = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    target.rename(aside)
    try:
        unfinished.rename(target)
    except OSError:
        aside.rename(target)
        raise
    shutil.rmtree(aside)
