"""Names of a package that are imported when they are first used, so that a package costs what is used of it."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def on_first_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a package (PEP 562).

    Args:
        package: Its `__name__`.
        homes: For each public name the module it is in, relative to the package.

    Returns:
        What looks a name up; AttributeError for another name.
    """

    def find(name: str) -> Any:  # noqa: ANN401
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return find
