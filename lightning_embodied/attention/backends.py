"""Which kernel computes variable-length attention: the one place that chooses.

On CUDA the FlashAttention made for the GPU if it is installed, else torch's own `varlen_attn`; on the CPU torch's flash
kernels through `cpu.py`; elsewhere, and for float32 on a GPU, padding inside the call. A choice can be forced by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_embodied.attention.cpu import varlen_attention_cpu
from lightning_embodied.attention.cuda import flash_attention, torch_varlen
from lightning_embodied.attention.padded import varlen_attention_padded
from lightning_embodied.attention.reference import varlen_attention_reference
from lightning_embodied.attention.segments import Segments
from lightning_embodied.errors import ConfigError

HALF = (torch.float16, torch.bfloat16)

Capability = tuple[int, int]
Kernel = Callable[[Tensor, Tensor, Tensor, Segments], Tensor]


@dataclass(frozen=True)
class AttentionBackend:
    """One way to compute `varlen_attention`.

    Attributes:
        name: Name to force it by.
        available: Whether this machine has it.
        reason: Why it is there or not, one clause for `doctor`.
        device: Device type it runs on; empty for any.
        dtypes: Dtypes it takes; empty for any floating dtype.
        kernel: The function; takes queries, keys and values as `varlen_attention`, and `Segments`, all checked.
        largest_head: Largest width of a head; widths are multiples of 8 then. 0 for any.
    """

    name: str
    available: bool
    reason: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    kernel: Kernel
    largest_head: int = 0

    def takes(self, query: Tensor) -> bool:
        """Whether it can compute these tensors here."""
        right_dtype = not self.dtypes or query.dtype in self.dtypes
        width = query.shape[2]
        right_head = not self.largest_head or (width <= self.largest_head and width % 8 == 0)
        return self.available and self.device in ("", query.device.type) and right_dtype and right_head

    @property
    def limits(self) -> str:
        """What tensors it takes, for an error message."""
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes) or "any dtype"
        heads = f", heads of up to {self.largest_head} in eights" if self.largest_head else ""
        return f"{self.device or 'any device'}, {dtypes}{heads}"


def attention_backends() -> tuple[AttentionBackend, ...]:
    """All backends in order of preference, with the reason why each is or is not available here."""
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
    return _backends


def _find_backends(capability: Capability | None = None) -> tuple[AttentionBackend, ...]:
    """The backends where the GPU has that compute capability (None: where no GPU is in use)."""
    cpu = "torch's CPU flash kernels, one call per run of equal lengths"
    return (
        # FlashAttention 3 is written for Hopper and 4 for Blackwell; 2 runs on both, and on Ampere and Ada.
        _flash("flash-attn-3", "flash_attn_interface", capability, oldest=9, newest=9),
        _flash("flash-attn-4", "flash_attn.cute", capability, oldest=10, largest_head=128),
        _flash("flash-attn-2", "flash_attn", capability, oldest=8),
        _torch_varlen(capability),
        AttentionBackend("cpu-flash", True, cpu, "cpu", (torch.float32, torch.float64, *HALF), varlen_attention_cpu),
        AttentionBackend("padded-sdpa", True, "pads inside the call: any dtype, any device", "", (),
                         varlen_attention_padded),
        AttentionBackend("reference", True, "dense softmax per segment: any derivative, slow", "", (),
                         varlen_attention_reference),
    )  # fmt: skip


def _flash(
    name: str, module: str, capability: Capability | None, *, oldest: int, newest: int = 99, largest_head: int = 256
) -> AttentionBackend:
    function, missing = None, _unfit(capability, oldest, newest)
    if not missing:
        function, missing = _import(module, "flash_attn_varlen_func")
    kernel = partial(flash_attention, function or _absent)
    return AttentionBackend(name, not missing, missing or "installed", "cuda", HALF, kernel, largest_head)


def _torch_varlen(capability: Capability | None) -> AttentionBackend:
    missing = _unfit(capability, 8, 99) or _import("torch.nn.attention.varlen", "varlen_attn")[1]
    reason = missing or "part of torch"
    return AttentionBackend("torch-varlen", not missing, reason, "cuda", HALF, torch_varlen, largest_head=256)


def _unfit(capability: Capability | None, oldest: int, newest: int) -> str:
    if capability is None:
        return "no CUDA device"
    if oldest <= capability[0] <= newest:
        return ""
    bound = f"{oldest}.x" if newest == oldest else f"{oldest}.0 or more"
    return f"this GPU is of compute capability {capability[0]}.{capability[1]}, not {bound}"


def _import(module: str, name: str) -> tuple[Callable[..., Any] | None, str]:
    """A function of an optional module, or why there is none."""
    try:
        return getattr(import_module(module), name), ""
    except Exception as error:  # a build for another torch fails with OSError or RuntimeError
        return None, f"{type(error).__name__}: {error}"


def _absent(*_: object, **__: object) -> Tensor:
    raise ConfigError("this attention backend is not available here")


def choose_backend(query: Tensor, name: str | None = None) -> AttentionBackend:
    """The backend for tensors like `query`.

    Args:
        query: Its device and dtype decide.
        name: Forces this backend. Default: the one forced by `force_backend`, else the first that can.

    Raises:
        ConfigError: No such backend, or it is not available here or cannot take these tensors.
    """
    name = name or _forced
    backends = _backends
    if name is None:
        return next(backend for backend in backends if backend.takes(query))
    for backend in backends:
        if backend.name == name:
            if backend.takes(query):
                return backend
            raise ConfigError(
                f"the attention backend {name!r} cannot be used",
                found=f"{query.dtype} on {query.device.type}, heads of {query.shape[2]}; {backend.reason}",
                expected=backend.limits,
                mend="leave the backend to be chosen, or force another one",
            )
    raise ConfigError("no such attention backend", found=name, expected=", ".join(b.name for b in backends))


_forced: str | None = None


@contextmanager
def force_backend(name: str | None) -> Iterator[None]:
    """Forces a backend by name for all calls in the block that name none (None: back to choosing)."""
    global _forced  # noqa: PLW0603
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def _find_again() -> None:
    global _backends  # noqa: PLW0603
    _backends = _find_backends(torch.cuda.get_device_capability())


_backends = _find_backends()
# Asking a GPU for its capability takes hold of it, which an import must not do, and torch.compile cannot trace the
# search: so it is made again when something else first uses CUDA.
torch.cuda._lazy_call(_find_again)  # type: ignore[no-untyped-call]
