"""Finds files by a path or by the id of a repository on the Hugging Face hub; every room may import it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from lightning_embodied.errors import EmbodiedError, import_extra

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def local_path(
    path: str | PathLike[str],
    patterns: Sequence[str],
    *,
    revision: str | None = None,
    error: type[EmbodiedError],
) -> Path:
    """A file or directory on this machine: `path` itself if it exists, else a download of what it names on the hub.

    Args:
        path: A path, or a hub id `owner/name`.
        patterns: Names of the repository's files that are needed, with `*`.
        revision: Branch, tag or commit of the repository.
        error: What to raise.

    Raises:
        EmbodiedError: As `error`: it is neither there nor a hub id, or the download failed.
    """
    if Path(path).exists():
        return Path(path)
    if not _HUB_ID.fullmatch(str(path)):
        raise error("there is no such path", where=path, expected="a path that exists, or a hub id `owner/name`")
    hub = import_extra("huggingface_hub", "models")
    try:
        return Path(hub.snapshot_download(str(path), revision=revision, allow_patterns=list(patterns)))
    except Exception as reason:  # the hub's own errors, those of the network below it, and of the disk
        raise error(
            "it is neither a path that exists nor a repository that the hub hands out",
            where=path,
            found=f"{type(reason).__name__}: {str(reason).strip().splitlines()[0] if str(reason).strip() else ''}",
            mend="check the spelling and the network; a gated repository needs `hf auth login`",
        ) from reason
