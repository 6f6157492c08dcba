"""Refuses, before a network is built, options and encoders that it could not work with; shared by the policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isinf

from lightning_embodied.errors import ConfigError
from lightning_embodied.models.siglip import SiglipConfig
from lightning_embodied.packing import SampleEncoder


def check_ranges(policy: object, **most: float) -> None:
    """Checks options that are numbers from 0 on.

    Args:
        policy: Its attributes are the options.
        most: Names of options and the largest value of each.

    Raises:
        ConfigError: One is out of range, or not finite; names it.
    """
    for name, limit in most.items():
        found = getattr(policy, name)
        if not 0 <= found <= limit or isinf(found):
            raise ConfigError(
                "the number is out of range",
                where=f"{type(policy).__name__}({name}=…)",
                found=found,
                expected="0 or more" if isinf(limit) else f"from 0 to {limit}",
            )


def check_batch(policy: object, batch: object, expected: type) -> None:
    """Raises `ConfigError` unless the loader gave a batch of the type that the policy reads."""
    if not isinstance(batch, expected):
        raise ConfigError(
            "the loader makes batches that the policy does not read",
            where=f"{type(policy).__name__}: batch",
            found=type(batch).__name__,
            expected=expected.__name__,
            mend="for a PackedBatch give the loader `collate_fn=VarlenPackingCollator(…)`; a DataModule has `collator`",
        )


def check_names(where: str, found: Iterable[str], known: Sequence[str]) -> None:
    """Checks names of parts of a network.

    Args:
        where: Class and option that gives them.
        found: The names given.
        known: Those that exist.

    Raises:
        ConfigError: One does not exist; names it.
    """
    for name in found:
        if name not in known:
            raise ConfigError("there is no such part", where=where, found=name, expected=", ".join(known))


def check_prompt(encoder: SampleEncoder, prompts: Sequence[str]) -> None:
    """Raises `ConfigError` unless the encoder writes one of the prompts that the policy reads, the best one first."""
    if encoder.prompt not in prompts:
        raise ConfigError(
            "the encoder writes another prompt than the policy reads",
            where="SampleEncoder: prompt",
            found=encoder.prompt,
            expected=" or ".join(prompts),
            mend=f"set `prompt: {prompts[0]}` of the encoder",
        )


def check_patches(encoder: SampleEncoder, vision: SiglipConfig) -> None:
    """Raises `ConfigError` unless the encoder cuts pictures as the vision tower reads them."""
    wanted = (vision.image_size, vision.image_size), vision.patch_size
    if (encoder.image_size, encoder.patch_size) != wanted:
        raise ConfigError(
            "the encoder makes other patches than the policy reads",
            where="SampleEncoder: image_size, patch_size",
            found=f"{list(encoder.image_size)}, {encoder.patch_size}",
            expected=f"{list(wanted[0])}, {wanted[1]}",
            mend="set these in the encoder, or `sizes: {vision: {image_size: …, patch_size: …}}` of the policy",
        )


def check_words(encoder: SampleEncoder, option: str, embeddings: int, mend: str) -> None:
    """Checks that there is an embedding for every token of the encoder.

    Args:
        encoder: How samples are encoded.
        option: Name of the size that says how many embeddings there are.
        embeddings: How many.
        mend: What to tell the user to do.

    Raises:
        ConfigError: There are too few.
    """
    if encoder.words > embeddings:
        raise ConfigError(
            "the tokenizer has more tokens than the policy has embeddings",
            where="SampleEncoder: tokenizer",
            found=f"{encoder.words} tokens",
            expected=f"at most {embeddings} (sizes: {option})",
            mend=mend,
        )


def check_limit(what: str, found: int, option: str, limit: int) -> None:
    """Checks that the data are no larger than the network.

    Args:
        what: What is measured, with its unit.
        found: As much the data need.
        option: Name of the size that says how much the network takes.
        limit: As much it takes.

    Raises:
        ConfigError: It takes less.
    """
    if found > limit:
        raise ConfigError(
            f"the data have more {what} than the policy",
            where=f"sizes: {option}",
            found=found,
            expected=f"at most {limit}",
            mend=f"raise {option} to {found}; pretrained weights then no longer fit",
        )
