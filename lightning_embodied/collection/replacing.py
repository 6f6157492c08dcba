"""Replaces a dataset only when its successor is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from lightning_embodied.errors import DatasetError


@contextmanager
def replacing(root: Path, if_exists: Literal["error", "overwrite"]) -> Iterator[None]:
    """Moves an existing dataset aside while another is written in its place.

    It is deleted when something stands at `root` at the end, and moved back otherwise.

    Args:
        root: Directory of the dataset.
        if_exists: `error` leaves an existing directory where it is, for the writer to refuse.

    Raises:
        DatasetError: There is something else than a dataset, which is never deleted.
    """
    if if_exists == "error" or not root.exists() or not any(root.iterdir()):
        yield
        return
    if not (root / "meta" / "info.json").is_file():
        raise DatasetError(
            "what is to be overwritten is not a dataset",
            where=root,
            expected="meta/info.json in it",
            mend="choose another directory, or remove this one",
        )
    aside = root.with_name(f".{root.name}.replaced-{os.getpid()}")
    root.rename(aside)
    try:
        yield
    finally:
        if root.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(root)
