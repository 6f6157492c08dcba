"""Which kernel computes variable-length attention: the one place that chooses.

On CUDA FlashAttention if it is installed, else torch's own `varlen_attn`; on the CPU torch's flash kernels through
`cpu.py`; the dense reference for what none of them does. A choice can be forced by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from lightning_embodied.attention.cpu import varlen_attention_cpu
from lightning_embodied.attention.reference import varlen_attention_reference
from lightning_embodied.errors import ConfigError

HALF = (torch.float16, torch.bfloat16)

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, bool, float], Tensor]


@dataclass(frozen=True)
class AttentionBackend:
    """One way to compute `varlen_attention`.

    Attributes:
        name: Name to force it by.
        available: Whether this machine has it.
        reason: Why it is there or not, one clause for `doctor`.
        device: Device type it runs on; empty for any.
        dtypes: Dtypes it takes; empty for any floating dtype.
        kernel: The function, with checked arguments.
    """

    name: str
    available: bool
    reason: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    kernel: Kernel

    def takes(self, query: Tensor) -> bool:
        """Whether it can compute these tensors here."""
        right_dtype = not self.dtypes or query.dtype in self.dtypes
        return self.available and self.device in ("", query.device.type) and right_dtype


def attention_backends() -> tuple[AttentionBackend, ...]:
    """All backends in order of preference, with the reason why each is or is not available here."""
    return _BACKENDS


def _find_backends() -> tuple[AttentionBackend, ...]:
    cuda = "" if torch.cuda.is_available() else "no CUDA device"
    flash = cuda or _missing("flash_attn")
    varlen = cuda or _missing("torch.nn.attention.varlen")
    return (
        AttentionBackend("flash-attn", not flash, flash or "installed", "cuda", HALF, _flash_attn),
        AttentionBackend("torch-varlen", not varlen, varlen or "part of torch", "cuda", HALF, _torch_varlen),
        AttentionBackend("cpu-flash", True, "torch's CPU flash kernels, one call per run of equal lengths", "cpu",
                         (torch.float32, torch.float64, *HALF), _cpu_flash),
        AttentionBackend("reference", True, "dense softmax per segment: any dtype, any device, slow", "", (),
                         _reference),
    )  # fmt: skip


def choose_backend(query: Tensor, name: str | None = None) -> AttentionBackend:
    """The backend for tensors like `query`.

    Args:
        query: Its device and dtype decide.
        name: Forces this backend. Default: the one forced by `force_backend`, else the first that can.

    Raises:
        ConfigError: No such backend, or it is not available here or cannot take these tensors.
    """
    name = name or _forced
    backends = attention_backends()
    if name is None:
        return next(backend for backend in backends if backend.takes(query))
    for backend in backends:
        if backend.name == name:
            if backend.takes(query):
                return backend
            raise ConfigError(
                f"the attention backend {name!r} cannot be used",
                found=f"{query.dtype} on {query.device.type}; {backend.reason}",
                expected=f"device {backend.device}, dtypes {', '.join(map(str, backend.dtypes))}",
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


def _missing(module: str) -> str:
    try:
        import_module(module)
    except Exception as error:  # a build for another torch fails with OSError or RuntimeError
        return f"{type(error).__name__}: {error}"
    return ""


def _flash_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool,
    scale: float,
) -> Tensor:  # fmt: skip
    kernel = import_module("flash_attn").flash_attn_varlen_func
    deterministic = torch.are_deterministic_algorithms_enabled()
    out: Tensor = kernel(
        query, key, value, cu_q, cu_k, max_q, max_k,
        softmax_scale=scale, causal=causal, deterministic=deterministic,
    )  # fmt: skip
    return out


def _torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool,
    scale: float,
) -> Tensor:  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn

    group = query.shape[1] // key.shape[1]
    if group > 1:  # torch 2.11 has no `enable_gqa`
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    window = (-1, 0) if causal else (-1, -1)
    out = varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window)
    return out if isinstance(out, Tensor) else out[0]


def _cpu_flash(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool,
    scale: float,
) -> Tensor:  # fmt: skip
    return varlen_attention_cpu(query, key, value, cu_q, cu_k, causal, scale)


def _reference(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool,
    scale: float,
) -> Tensor:  # fmt: skip
    return varlen_attention_reference(query, key, value, cu_q, cu_k, causal, scale)


_BACKENDS = _find_backends()  # once, at import: torch.compile cannot trace the search
