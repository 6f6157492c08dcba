"""Turns jsonargparse's messages into ours: what key, what was found, what was expected, the closest valid name.

The parser reports a nested mistake as the failure of every member of a Union around it; the reader needs the
innermost cause. Messages that no rule knows pass through unchanged.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from jsonargparse import ArgumentParser

from lightning_embodied.cli.suggestions import closest
from lightning_embodied.errors import ConfigError

_KEY = re.compile(r'Parser key "([^"]+)"')
_IN_CLASS = re.compile(r"Problem with given class_path '([^']+)':\s*\n\s*(?P<inner>.*)")
_UNKNOWN = re.compile(
    r"(?:does not accept option|[Oo]ption|Key) ['\"]([^'\"]+)['\"](?: is not accepted| is not expected|$|\n)"
)
_UNRECOGNIZED = re.compile(r"[Uu]nrecognized arguments: (.+)")
_NO_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_NO_ATTRIBUTE = re.compile(
    r"Problem with given class_path '([^']+)':\s*\n\s*(?:module .* has no attribute|No module named)"
)
_BASE = re.compile(r"<class '([\w.]+)'>|\b(?:list|List|Sequence|Iterable)\[([\w.]+)\]")
_EXPECTED = re.compile(r"Expected a (.+?)(?:\. Got value: (.*))?$", re.MULTILINE)
_MAPPING = re.compile(r"(Unexpected|Missing required) keys: \{(.+)\}")
_GIVEN = re.compile(r"Given value: (.*)$", re.MULTILINE)


def explain(message: str, parser: ArgumentParser) -> str:
    """The message to show for one of the parser's.

    Args:
        message: What jsonargparse says.
        parser: The parser it came from; its options are the candidates for a mistyped one.
    """
    rules: list[Callable[[str, ArgumentParser], ConfigError | None]] = [_class_name, _option, _mapping, _value]
    for rule in rules:
        error = rule(message, parser)
        if error is not None:
            return str(error)
    return message


def _option(message: str, parser: ArgumentParser) -> ConfigError | None:
    """An option or key that does not exist, of the parser or of a class named in the YAML."""
    in_classes = list(_IN_CLASS.finditer(message))
    for match in reversed(in_classes):
        unknown = _UNKNOWN.search(match["inner"])
        if unknown is not None:
            key, owner = unknown[1], match[1]
            return _unknown_key(key, _init_args(owner), where=f"{_where(message)}init_args of {owner}")
    unknown = None if in_classes else _UNKNOWN.search(message)
    if unknown is not None:
        return _unknown_key(unknown[1], _options(parser))
    unrecognized = _UNRECOGNIZED.search(message)
    if unrecognized is not None:
        key = unrecognized[1].split()[0].lstrip("-").partition("=")[0]
        return _unknown_key(key, _options(parser))
    return None


def _unknown_key(key: str, known: list[str], where: str | None = None) -> ConfigError:
    near = closest(key, known)
    few = len(known) <= 30
    return ConfigError(
        f"unknown key {key!r}",
        where=where,
        expected="one of " + ", ".join(sorted(known)) if few and known else None,
        mend=f"did you mean {near!r}?" if near else None,
    )


def _mapping(message: str, parser: ArgumentParser) -> ConfigError | None:
    """A mapping with a key too many or too few."""
    match = _MAPPING.search(message)
    if match is None:
        return None
    where = ".".join(dict.fromkeys(_KEY.findall(message))) or None
    innermost = message[message.rfind("Subtypes:", 0, match.start()) :]
    known = [key for base in _bases(innermost) for key in getattr(base, "__annotations__", {})]
    key = sorted(re.findall(r"'([^']+)'", match[2]))[0]
    if match[1] == "Unexpected":
        return _unknown_key(key, known, where)
    return ConfigError(f"the key {key!r} is missing", where=where, expected=f"a mapping with {key!r} in it")


def _class_name(message: str, parser: ArgumentParser) -> ConfigError | None:
    """A class that does not exist under the name given."""
    match = _NO_ATTRIBUTE.search(message) or _NO_CLASS.search(message)
    if match is None:
        return None
    name = match[1].rstrip(".,")
    if re.search(rf"Problem with given class_path '[\w.]+\.{re.escape(name)}'", message):
        return None  # it exists, for another of the types allowed here
    names = {leaf: path for base in _bases(message) for leaf, path in _subclasses(base)}
    near = closest(name.rpartition(".")[2], names)
    return ConfigError(
        f"there is no class {name!r}",
        where=_where(message).rstrip(": ") or None,
        expected="a class by its full path, or by its name if it comes from lightning or lightning_embodied",
        mend=f"did you mean {near!r} ({names[near]})?"
        if near
        else "check the spelling and that its package is installed",
    )


def _value(message: str, parser: ArgumentParser) -> ConfigError | None:
    """A value of the wrong type or outside the allowed ones."""
    expected = [(kind, got) for kind, got in _EXPECTED.findall(message)]
    if not expected or ("Problem with given class_path" in message and "Parser key" not in message):
        return None
    given = _GIVEN.search(message)
    inner = next((got for _, got in expected if got), None)
    nested = "Problem with given class_path" in message  # then what is expected of the members around it is no help
    kinds = [kind for kind, got in expected if got or not nested] or [kind for kind, _ in expected]
    return ConfigError(
        "the value does not fit",
        where=".".join(dict.fromkeys(_KEY.findall(message))) or None,
        found=inner or (given[1] if given else None),
        expected=" or ".join(dict.fromkeys(_readable(kind) for kind in kinds)),
        mend=_closest_choice(inner or (given[1] if given else ""), kinds),
    )


def _closest_choice(found: str, kinds: list[str]) -> str | None:
    choices = [choice for kind in kinds if "Literal" in kind for choice in re.findall(r"'([^']+)'", kind)]
    near = closest(found, choices)
    return f"did you mean {near!r}?" if near else None


def _readable(kind: str) -> str:
    if kind == "<class 'NoneType'>":
        return "null"
    literal = re.fullmatch(r"typing\.Literal\[(.*)\]", kind)
    if literal is not None:
        return "one of " + literal[1]
    return re.sub(r"<class '([^']+)'>", r"\1", kind)


def _where(message: str) -> str:
    key = _KEY.search(message)
    return f"{key[1]}: " if key else ""


def _options(parser: ArgumentParser) -> list[str]:
    skipped = ("help", "config", "subcommand", "print_config", "print_shtab")
    return [action.dest for action in parser._actions if action.dest not in skipped]


def _init_args(class_path: str) -> list[str]:
    owner = _import(class_path)
    if owner is None:
        return []
    probe = ArgumentParser(exit_on_error=False)
    probe.add_class_arguments(owner, "init", fail_untyped=False)
    return [dest.removeprefix("init.") for dest in _options(probe) if dest.startswith("init.")]


def _bases(message: str) -> Iterator[type]:
    subtypes = re.search(r"Subtypes: (.*)", message)
    for match in _BASE.finditer(subtypes[1] if subtypes else message):
        base = _import(match[1] or match[2])
        if isinstance(base, type):
            yield base


def _subclasses(base: type) -> Iterator[tuple[str, str]]:
    subclasses: list[type] = base.__subclasses__()
    for subclass in subclasses:
        if not subclass.__name__.startswith("_"):
            yield subclass.__name__, f"{subclass.__module__}.{subclass.__name__}"
        yield from _subclasses(subclass)


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None
