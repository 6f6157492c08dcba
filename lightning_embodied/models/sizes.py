"""Sizes of a network as frozen dataclasses: presets, and changes of some of them by name, as YAML gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lightning_embodied.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Preset = Literal["base", "tiny"]
"""The published sizes, or those of a laptop."""

_Sizes = TypeVar("_Sizes", bound="DataclassInstance")


def preset_sizes(presets: Mapping[str, _Sizes], preset: str, changes: Mapping[str, Any] | None = None) -> _Sizes:
    """A preset with some values changed.

    Args:
        presets: Sizes by name.
        preset: One of the names.
        changes: As in `changed_sizes`; `dataclasses.asdict` of sizes is a change that gives just them.

    Raises:
        ConfigError: There is no such preset or name, a value is no size, or the sizes do not fit each other.
    """
    if preset not in presets:
        raise ConfigError("no such preset", where="preset", found=preset, expected=", ".join(presets))
    return changed_sizes(presets[preset], changes or {})


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


def check_divisible(rules: Iterable[tuple[str, int, str, int]], where: str = "sizes") -> None:
    """Checks sizes that must be multiples.

    Args:
        rules: Name and value of a size, and name and value of what it must be a multiple of.
        where: What an error calls the whole.

    Raises:
        ConfigError: One is not; names it.
    """
    for name, value, divisor_name, divisor in rules:
        if divisor < 1 or value % divisor:
            of = divisor_name if divisor_name == str(divisor) else f"{divisor_name} ({divisor})"
            raise ConfigError(
                "a size does not divide", where=f"{where}: {name}", found=value, expected=f"a multiple of {of}"
            )
