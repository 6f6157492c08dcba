"""Exact variable-length attention on the CPU, over torch's own flash kernels.

torch's `varlen_attn` is CUDA only and padding costs what it pads, so segments go to the CPU flash kernel directly.
Neighbouring segments of equal lengths share one call: a robot batch has many short samples of few distinct lengths
(`VarlenPackingCollator(sort_by_length=True)` puts them side by side), and there the call is the cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_embodied.attention.segments import Segments

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class _Run:
    """`count` neighbouring segments of equal lengths, from rows `query_start` and `key_start` on.

    The first `skip` queries of each segment see no key (causal, more queries than keys).
    """

    count: int
    query_start: int
    query_length: int
    key_start: int
    key_length: int
    skip: int

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute. torch's kernel divides by the lengths: it would kill the process."""
        return self.query_length == 0 or self.key_length == 0

    @property
    def is_whole(self) -> bool:
        """Whether every query of the run has a result."""
        return not self.is_empty and not self.skip

    def queries(self, rows: Tensor) -> Tensor:
        """`[Tq, H, D]` to the kernel's view `[count, H, query_length - skip, D]`."""
        return _view(rows, self.count, self.query_start, self.query_length, self.skip)

    def keys(self, rows: Tensor) -> Tensor:
        """`[Tk, H, D]` to the kernel's view `[count, H, key_length, D]`."""
        return _view(rows, self.count, self.key_start, self.key_length, 0)

    def options(self, causal: bool, scale: float, dtype: torch.dtype) -> dict[str, Any]:
        """The kernel's keyword arguments. Its own causal mask is top-left; ours is bottom-right."""
        length = self.query_length - self.skip
        if not causal or length == self.key_length:
            return {"is_causal": causal, "scale": scale}
        seen = torch.ones(length, self.key_length, dtype=torch.bool).tril(self.key_length - length)
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
        return {"is_causal": False, "scale": scale, "attn_mask": mask}


def _view(rows: Tensor, count: int, start: int, length: int, skip: int) -> Tensor:
    token, head, value = rows.stride()
    size = (count, rows.shape[1], length - skip, rows.shape[2])
    return rows.as_strided(size, (length * token, head, token, value), rows.storage_offset() + (start + skip) * token)


@lru_cache(maxsize=256)
def _plan(cu_q: tuple[int, ...], cu_k: tuple[int, ...], causal: bool) -> tuple[_Run, ...]:
    runs = []
    query_start = key_start = 0
    lengths = [(cu_q[i + 1] - cu_q[i], cu_k[i + 1] - cu_k[i]) for i in range(len(cu_q) - 1)]
    for (query_length, key_length), same in groupby(lengths):
        count = sum(1 for _ in same)
        skip = max(0, query_length - key_length) if causal else 0
        runs.append(_Run(count, query_start, query_length, key_start, key_length, skip))
        query_start += count * query_length
        key_start += count * key_length
    return tuple(runs)


def _rows(part: Tensor) -> Tensor:
    """The kernel's `[count, H, length, D]` back to rows, most often without a copy."""
    return part.transpose(1, 2).flatten(0, 1)


def _target(like: Tensor, runs: tuple[_Run, ...], width: int, dtype: torch.dtype) -> Tensor:
    """Rows to write the runs' results into, one after the other; zeros where a run leaves some of them as they are."""
    make = like.new_zeros if any(run.is_empty or run.skip for run in runs) else like.new_empty
    return make(*like.shape[:2], width, dtype=dtype)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output `[Tq, Hq, D]` and log-sum-exp `[Tq, Hq, 1]`; both are 0 where a query has no key."""
    runs = _plan(tuple(cu_q.tolist()), tuple(cu_k.tolist()), causal)

    def attend(run: _Run) -> tuple[Tensor, Tensor]:
        options = run.options(causal, scale, query.dtype)
        out, lse = _flash(run.queries(query), run.keys(key), run.keys(value), **options)
        return out, lse.unsqueeze(3)

    if len(runs) == 1 and runs[0].is_whole:
        out, lse = attend(runs[0])
        return _rows(out), _rows(lse)
    outs, sums = (_target(query, runs, width, dtype) for width, dtype in (
        (query.shape[2], query.dtype), (1, torch.promote_types(query.dtype, torch.float32)),
    ))  # fmt: skip
    for run in runs:
        if not run.is_empty:
            out, lse = attend(run)
            run.queries(outs).copy_(out)
            run.queries(sums).copy_(lse)
    return outs, sums


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    runs = _plan(tuple(cu_q.tolist()), tuple(cu_k.tolist()), causal)
    grad = grad.contiguous()

    def differentiate(run: _Run) -> list[Tensor]:
        inputs = run.queries(query), run.keys(key), run.keys(value), run.queries(out), run.queries(lse).squeeze(3)
        options = run.options(causal, scale, query.dtype)
        return list(_flash_backward(run.queries(grad), *inputs, dropout_p=0.0, **options))

    if len(runs) == 1 and runs[0].is_whole:
        dquery, dkey, dvalue = map(_rows, differentiate(runs[0]))
        return dquery, dkey, dvalue
    dquery, dkey, dvalue = (_target(like, runs, like.shape[2], like.dtype) for like in (query, key, value))
    for run in runs:
        if not run.is_empty:
            parts = differentiate(run)
            run.queries(dquery).copy_(parts[0])
            run.keys(dkey).copy_(parts[1])
            run.keys(dvalue).copy_(parts[2])
    return dquery, dkey, dvalue


class _VarlenAttention(torch.autograd.Function):
    """The eager path: an autograd Function costs 0.2 ms a call less than a registered operator."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:  # noqa: ANN401
        """Runs the kernels and keeps what backward reads."""
        out, lse = _forward(*inputs)
        ctx.save_for_backward(*inputs[:5], out, lse)
        ctx.options = inputs[5:]
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Gradients of query, key and value."""
        query, key, value, cu_q, cu_k, out, lse = ctx.saved_tensors
        return *_backward(grad, query, key, value, out, lse, cu_q, cu_k, *ctx.options), None, None, None, None


_forward_op = torch.library.custom_op("lightning_embodied::varlen_attention", _forward, mutates_args=())
_backward_op = torch.library.custom_op("lightning_embodied::varlen_attention_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape), query.new_empty(*query.shape[:2], 1, dtype=lse_dtype)


@_backward_op.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.options = inputs[5:]


def _op_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    query, key, value, cu_q, cu_k, out, lse = ctx.saved_tensors
    return *_backward_op(grad, query, key, value, out, lse, cu_q, cu_k, *ctx.options), None, None, None, None


_forward_op.register_autograd(_op_backward, setup_context=_setup_context)


def varlen_attention_cpu(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """Attention of every segment's queries to its own keys."""
    options = segments.cu_q, segments.cu_k, segments.causal, segments.scale
    if torch.compiler.is_compiling():
        out: Tensor = _forward_op(query, key, value, *options)[0]
        return out
    result: Tensor = _VarlenAttention.apply(query, key, value, *options)  # type: ignore[no-untyped-call]
    return result
