"""An fsspec store that ranks share and that is no local disk to those who ask: `store://` lies under `$STORE`."""

from __future__ import annotations

import os

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem


class Store(DirFileSystem):
    """Files of a directory under another protocol."""

    protocol = "store"

    def __init__(self, **options) -> None:
        super().__init__(path=os.environ["STORE"], fs=LocalFileSystem(), **options)


fsspec.register_implementation("store", Store)
