"""The closest valid name to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when none is near.

    Args:
        name: What was typed; a dotted path is compared by its last part too.
        known: The names that would have been right.
    """
    names = list(dict.fromkeys(known))
    by_folded = {candidate.lower(): candidate for candidate in reversed(names)}
    near = difflib.get_close_matches(name.lower(), by_folded, n=1, cutoff=0.6)
    if near:
        return by_folded[near[0]]
    by_leaf = {candidate.lower().rpartition(".")[2]: candidate for candidate in reversed(names)}
    near = difflib.get_close_matches(name.lower().rpartition(".")[2], by_leaf, n=1, cutoff=0.75)
    return by_leaf[near[0]] if near else None
