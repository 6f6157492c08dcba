"""Turns linear layers into FP8 layers and back by setting the class of the module.

A layer that `fully_shard` or `replicate` was applied to has a generated class, a mixin before `nn.Linear`; it gets the
same mixin before `FP8Linear`. So conversion works before and after sharding, and leaves everything else as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_embodied.precision.linear import FP8Linear, FP8State
from lightning_embodied.precision.selection import plain_name


def linear_layers(module: nn.Module) -> dict[str, tuple[list[str], nn.Linear]]:
    """All linear layers by their first name, with all names each has."""
    layers: dict[int, tuple[list[str], nn.Linear]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, nn.Linear):
            layers.setdefault(id(layer), ([], layer))[0].append(plain_name(name))
    return {names[0]: (names, layer) for names, layer in layers.values()}


def fp8_layers(module: nn.Module) -> dict[str, FP8Linear]:
    """The converted layers of a module by name."""
    return {name: layer for name, (_, layer) in linear_layers(module).items() if isinstance(layer, FP8Linear)}


def kind_of(layer: nn.Linear) -> type[nn.Module]:
    """The class a layer has when neither sharded nor converted."""
    kind = type(layer)
    base = kind.__bases__[-1] if _is_sharded(kind) else kind
    return nn.Linear if base is FP8Linear else base


def convert(layer: nn.Linear, state: FP8State) -> None:
    """Makes a layer an FP8 layer, in place.

    Args:
        layer: An `nn.Linear`, possibly sharded, possibly converted before.
        state: What it shall know.
    """
    layer.__class__ = _rebased(type(layer), FP8Linear)  # type: ignore[arg-type]  # classes are hashable
    cast(FP8Linear, layer).fp8 = state


def restore(layer: FP8Linear) -> None:
    """Makes an FP8 layer what it was, in place."""
    del layer.fp8
    layer.__class__ = _rebased(type(layer), nn.Linear)  # type: ignore[assignment, arg-type]


@contextmanager
def only_in_fp8(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Within this context, the named FP8 layers compute in FP8, and the others as `nn.Linear` does.

    Args:
        module: With converted layers.
        names: As in `fp8_layers`.
    """
    states = {name: layer.fp8 for name, layer in fp8_layers(module).items()}
    before = [state.enabled for state in states.values()]
    try:
        for name, state in states.items():
            state.enabled = name in names
        yield
    finally:
        for state, enabled in zip(states.values(), before, strict=True):
            state.enabled = enabled


def high_precision(module: nn.Module) -> AbstractContextManager[None]:
    """A context in which all FP8 layers of a module compute as `nn.Linear` does."""
    return only_in_fp8(module, ())


def _is_sharded(kind: type) -> bool:
    return issubclass(kind, FSDPModule) and len(kind.__bases__) > 1


@cache
def _rebased(kind: type[nn.Linear], base: type[nn.Linear]) -> type[nn.Linear]:
    """`base`, behind the mixins of sharding that `kind` has."""
    if not _is_sharded(kind):
        return base
    name = kind.__name__.removesuffix(kind.__bases__[-1].__name__) + base.__name__
    return type(name, (*kind.__bases__[:-1], base), {"__deepcopy__": kind.__dict__["__deepcopy__"]})
