"""Sizes of a network as frozen dataclasses, and changes of some of them by name, as YAML gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_embodied.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Sizes = TypeVar("_Sizes", bound="DataclassInstance")


def changed_sizes(sizes: _Sizes, changes: Mapping[str, Any], where: str = "sizes") -> _Sizes:
    """Sizes with some values changed.

    Args:
        sizes: A dataclass of numbers, booleans and such dataclasses.
        changes: Field names to values; those of a nested dataclass are a mapping again.
        where: What an error calls the whole.

    Raises:
        ConfigError: A name is unknown, or a value is no size; names it.
    """
    known = {field.name: getattr(sizes, field.name) for field in fields(sizes)}
    values: dict[str, Any] = {}
    for name, value in changes.items():
        place = f"{where}.{name}"
        if name not in known:
            raise ConfigError("no such size", where=place, found=name, expected=", ".join(known))
        if is_dataclass(known[name]):
            if not isinstance(value, Mapping):
                raise ConfigError("a tower's sizes are no mapping", where=place, found=value, expected="{depth: …, …}")
            values[name] = changed_sizes(known[name], value, place)
            continue
        kinds = (int, float) if type(known[name]) is float else (type(known[name]),)
        if type(value) not in kinds or (type(known[name]) is int and value < 1):
            raise ConfigError("this is no size", where=place, found=value, expected=f"something like {known[name]}")
        values[name] = value
    return replace(sizes, **values)
