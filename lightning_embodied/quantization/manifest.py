"""`manifest.json`: everything about a quantised policy that is no tensor, checked before anything is built from it.

Besides what loading needs it says in plain words and numbers what a robot programmer asks: features, units, how values
are scaled, what was quantised and at which error. It carries the hash of the weights and of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_embodied.errors import CheckpointError

MANIFEST, WEIGHTS = "manifest.json", "model.safetensors"
FORMAT, VERSION = "lightning_embodied.quantized_policy", 2

_KEYS = {
    "policy": dict,
    "spec": dict,
    "recipe": dict,
    "layers": dict,
    "tensors": dict,
    "tied": dict,
    "files": dict,
}
"""What must be in a manifest, beside format, version and hash."""


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes a manifest, with its own hash.

    Args:
        folder: The directory.
        content: Plain JSON values without format, version and hash.
    """
    whole = {"format": FORMAT, "version": VERSION, **content}
    whole["sha256"] = _digest(whole)
    (folder / MANIFEST).write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads a manifest, and checks that its files are those it was written with.

    Args:
        folder: The directory.

    Raises:
        CheckpointError: There is no manifest, it is damaged or of another version, or a file is missing or is another.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            "there is no quantised policy",
            where=folder,
            found="no such directory" if not folder.is_dir() else f"no {MANIFEST}",
            expected="a directory that `lightning-embodied quantize` wrote",
        ) from None
    except (OSError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError("this manifest is of something else", where=path, expected=f'"format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise CheckpointError(
            "this quantised policy is of another version of the format",
            where=path,
            found=content.get("version"),
            expected=VERSION,
            mend="quantise the checkpoint again, or use the release that wrote the directory",
        )
    stated = content.pop("sha256", None)
    if stated != _digest(content):
        raise _damaged(path, "its hash is another one: it was changed after it was written")
    for key, kind in _KEYS.items():
        if not isinstance(content.get(key), kind):
            raise _damaged(path, f"no {kind.__name__} {key!r}")
    _check_files(folder, content["files"])
    return content


def file_entry(path: Path) -> dict[str, Any]:
    """Size and hash of a file, as a manifest has them."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _check_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, stated in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(
                "a file of the quantised policy is missing", where=path, mend="copy the directory again, whole"
            )
        found = file_entry(path)
        if found != stated:
            raise CheckpointError(
                "a file of the quantised policy is not the one that was written",
                where=path,
                found=f"{found['bytes']} bytes, sha256 {found['sha256'][:12]}…",
                expected=f"{stated.get('bytes')} bytes, sha256 {str(stated.get('sha256'))[:12]}…",
                mend="copy the directory again, whole",
            )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _damaged(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        "the manifest of the quantised policy is damaged", where=path, found=found, mend="copy the directory again"
    )
