"""Runs a training step without its numbers: floating tensors have shapes and no storage, integers are real.

torch's `FakeTensorMode` stops where a model reads a value, and packed batches are read (`cu_seqlens.tolist()`). What is
read are lengths and indices, which are integers and small; so these are computed, and only the rest is imagined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

_DEVICE = torch.ops.prim.device.default


class AbstractExecution(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which operators on floating tensors only work out shapes, dtypes and storage sizes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here, and the guard against it costs a tenth of the time

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func is _DEVICE:
            return args[0].fake_device  # asked more often than all else
        kwargs = kwargs or {}
        inputs = tensors_in(args, kwargs)
        if all(type(value) is Tensor and not value.is_floating_point() and not value.is_meta for value in inputs):
            if not inputs and _makes_floats(result := self._imagine(func, args, kwargs)):
                return result
            result = func(*args, **kwargs)
            if not _makes_floats(result):
                return result
        return self._imagine(func, args, kwargs)

    def _imagine(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        with self.fake:
            return func(*args, **kwargs)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An imagined tensor of any dtype."""
        with self.fake:
            return torch.empty(*shape, dtype=dtype)

    def materialize(self, module: nn.Module) -> None:
        """Gives a module that was built on the meta device imagined parameters and buffers on the CPU, in place."""
        with self.fake:
            module.to_empty(device="cpu")


@contextmanager
def abstract_execution() -> Iterator[AbstractExecution]:
    """Enters `AbstractExecution`; distributions skip the check of their arguments, which reads values."""
    checked = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        with AbstractExecution() as execution:
            yield execution
    finally:
        torch.distributions.Distribution.set_default_validate_args(checked)


def tensors_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among an operator's arguments or results, and in lists of them; operators nest no deeper."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [entry for entry in value if isinstance(entry, Tensor)]
    return found


def _makes_floats(result: object) -> bool:
    return any(tensor.is_floating_point() for tensor in tensors_in((result,), {}))
