"""Finds a tokenizer: the one shipped with this package, a file, a directory, or a repository on the hub."""

from __future__ import annotations

from importlib import resources

from tokenizers import Tokenizer

from lightning_embodied.errors import ConfigError
from lightning_embodied.hub import local_path

TOKENIZER = "tokenizer.json"


def read_tokenizer(name: str | None) -> str:
    """The JSON text of a tokenizer.

    Args:
        name: Path of a file of the `tokenizers` library, of a directory that holds `tokenizer.json`, or a hub id such
            as `google/paligemma-3b-pt-224`. None: the byte-level BPE shipped with this package.

    Raises:
        ConfigError: There is no such tokenizer, or the file is not one.
    """
    if name is None:
        return resources.files("lightning_embodied.packing").joinpath("instruction_tokenizer.json").read_text("utf-8")
    path = local_path(name, [TOKENIZER], error=ConfigError)
    path = path / TOKENIZER if path.is_dir() else path
    try:
        text = path.read_text("utf-8")
        Tokenizer.from_str(text)
    except Exception as error:  # `tokenizers` raises bare Exception for a file it cannot parse
        raise ConfigError(
            "the tokenizer cannot be read",
            where=path,
            found=f"{type(error).__name__}: {error}",
            expected="a JSON file written by the `tokenizers` library (Hugging Face's `tokenizer.json`)",
        ) from error
    return text
