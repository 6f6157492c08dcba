"""Finds the modules that are sharded, or recomputed, as one: declared by class name, or the repeated layers by default.

A unit is what one all-gather brings together, so units set the peak memory. A name that matches nothing would leave
everything in one unit and save nothing, in silence; it is an error here.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from lightning_embodied.errors import ConfigError


def select_modules(root: nn.Module, names: Sequence[str], option: str) -> list[nn.Module]:
    """Modules with parameters that the names mean, children before their parents.

    Args:
        root: Where to look; it is not selected itself.
        names: Class names (`GemmaLayer`), or patterns of module names (`*.embed_tokens`): those with a dot or a star.
        option: The option they come from, for the error.

    Raises:
        ConfigError: A name matches no module; says which are closest.
    """
    candidates = {name: module for name, module in root.named_modules() if name and _has_parameters(module)}
    selected: set[nn.Module] = set()
    for wanted in names:
        found = [module for name, module in candidates.items() if _matches(wanted, name, module)]
        if not found:
            raise _no_match(wanted, candidates, option)
        selected.update(found)
    return [module for module in reversed(list(candidates.values())) if module in selected]


def repeated_layers(root: nn.Module) -> list[nn.Module]:
    """Entries of the `ModuleList`s and `Sequential`s that hold at least two of one class, children before parents."""
    layers: dict[nn.Module, None] = {}
    for container in root.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            entries = [module for module in container if _has_parameters(module)]
            classes = [type(module) for module in entries]
            layers.update(dict.fromkeys(m for m in entries if classes.count(type(m)) > 1 and _has_children(m)))
    return [module for module in reversed(list(root.modules())) if module in layers]


def parts_of(unit: nn.Module) -> list[nn.Module]:
    """The modules in a unit that hold parameters themselves."""
    return [module for module in unit.modules() if any(True for _ in module.parameters(recurse=False))]


def is_called(unit: nn.Module) -> bool:
    """Whether a module has a `forward` that can be called at all."""
    return type(unit).forward is not nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    container = isinstance(module, nn.ModuleList | nn.ModuleDict) and not is_called(module)
    return not container and any(True for _ in module.parameters())


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _matches(wanted: str, name: str, module: nn.Module) -> bool:
    if "." in wanted or "*" in wanted:
        return fnmatchcase(name, wanted)
    return type(module).__name__ == wanted


def _no_match(wanted: str, candidates: dict[str, nn.Module], option: str) -> ConfigError:
    pattern = "." in wanted or "*" in wanted
    known = list(candidates) if pattern else sorted({type(module).__name__ for module in candidates.values()})
    close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.4) or known[:8]
    return ConfigError(
        f"no {'module name matches this pattern' if pattern else 'module of this class is in the model'}",
        where=option,
        found=wanted,
        expected=f"for example {', '.join(close)}" if close else "a module with parameters; the model has none",
        mend="name the class of the repeated layers, or leave `units` out to have them found",
    )
