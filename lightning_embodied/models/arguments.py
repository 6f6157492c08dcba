"""The arguments of a policy as a checkpoint holds them: plain values, read without unpickling anything."""

from __future__ import annotations

from typing import Any

from lightning_embodied.errors import ConfigError
from lightning_embodied.models.base import LightningModule


def plain_arguments(policy: LightningModule) -> dict[str, Any]:
    """The arguments a policy was made with.

    Raises:
        ConfigError: One of them is no plain value; names it.
    """
    arguments = dict(policy.hparams)
    for key, value in arguments.items():
        if not _is_plain(value):
            raise ConfigError(
                "an argument of the policy cannot be kept in a checkpoint",
                where=f"{type(policy).__name__}({key}=…)",
                found=type(value).__name__,
                expected="numbers, strings, booleans, None, and lists, tuples and dicts of them",
            )
    return arguments


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)
