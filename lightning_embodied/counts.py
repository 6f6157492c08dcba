"""Whole numbers of tokens, samples or ranks, checked where they come in; every room may import it.

A length that is NaN or negative passes through sums and comparisons and ends in packs that lose samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import SupportsIndex

from lightning_embodied.errors import ConfigError


def check_count(value: SupportsIndex, where: str, least: int = 1) -> int:
    """A count as a Python int.

    Args:
        value: An int, or one of NumPy or torch.
        where: What an error calls it.
        least: Smallest count allowed.

    Raises:
        ConfigError: It is not a whole number, or below `least`.
    """
    expected = f"a whole number from {least} on"
    try:
        count = index(value)
    except TypeError:
        raise ConfigError(f"{where} is no whole number", where=where, found=repr(value), expected=expected) from None
    if count < least:
        raise ConfigError(f"{where} is too small", where=where, found=count, expected=expected)
    return count


def check_counts(values: Iterable[SupportsIndex], where: str, least: int = 0) -> list[int]:
    """As `check_count`, for many; an error names the first wrong one by its position."""
    values = list(values)
    try:
        counts = list(map(index, values))
    except TypeError:
        counts = []
    if len(counts) == len(values) and min(counts, default=least) >= least:
        return counts
    return [check_count(value, f"{where}[{position}]", least) for position, value in enumerate(values)]
