"""Watches a step operator by operator: what memory is alive, how long the kernels take, which collectives start.

Memory is counted by storage, as an allocator sees it, so that views count once, and so that FSDP2, which empties
storages without dropping them, counts as it should.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_embodied.planning.abstract import tensors_in
from lightning_embodied.planning.collectives import Kind
from lightning_embodied.planning.events import AwaitGather, Collective, Compute, Event, GradientReady
from lightning_embodied.planning.hardware import Accelerator

_aten, _c10d = torch.ops.aten, torch.ops.c10d
_COLLECTIVES: dict[Any, Kind] = {
    _c10d._allgather_base_.default: "all_gather",
    _c10d._reduce_scatter_base_.default: "reduce_scatter",
    _c10d.allreduce_.default: "all_reduce",
}
_FREE = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten._unsafe_view.default,
    _aten.lift_fresh.default,
    _aten._local_scalar_dense.default,
}
"""Operators that start no kernel, beside views."""


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records the operators in it.

    Args:
        gpu: Whose kernel times are recorded.

    Attributes:
        events: What happened, in order.
        flops: Multiplications and additions so far.
        kernels: Kernels so far.
        alive: Bytes of the storages that are alive.
        peak: Most bytes alive at once since `restart_peak`.
        peak_without_gradients: The same, gradients that were complete left out.
    """

    def __init__(self, gpu: Accelerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpu = gpu
        self.events: list[Event] = []
        self.flops = 0
        self.kernels = 0
        self.alive = self.peak = self.peak_without_gradients = 0
        self._gradients = 0
        self._sizes: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see AbstractExecution

    def track(self, tensor: Tensor) -> None:
        """Counts a tensor's storage, once, until it dies."""
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = 0
        weakref.finalize(storage, self._release, key)
        self._resize(key, storage.nbytes())

    def restart_peak(self) -> None:
        """Forgets earlier peaks and gradients."""
        self._gradients = 0
        self.peak = self.peak_without_gradients = self.alive

    def gradient_ready(self, parameter: Tensor) -> None:
        """A hook for `register_post_accumulate_grad_hook`."""
        self._gradients += parameter.numel() * parameter.itemsize
        self.events.append(GradientReady(parameter.numel(), parameter.itemsize))

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func.namespace == "prim":
            return func(*args)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on local tensors come here again
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = tensors_in((result,), {})
        for output in outputs:
            self.track(output)
        if func in _COLLECTIVES:
            self.events.append(Collective(_COLLECTIVES[func], max(tensor.nbytes for tensor in tensors_in(args, {}))))
        elif str(func).startswith("fsdp.split_with_sizes_copy"):
            self.events.append(AwaitGather())
        if not func.is_view and func not in _FREE and func.namespace != "c10d":
            self._kernel(func, args, kwargs, result, outputs)
        return result

    def _kernel(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object, outputs: list[Tensor]
    ) -> None:
        inputs = tensors_in(args, kwargs)
        if all(type(value) is Tensor and value.numel() < 1 << 16 for value in inputs) and not any(
            value.is_floating_point() for value in outputs
        ):
            return  # small integers: indices that the host works out
        for value in inputs:
            self.track(value)  # the batch, which no operator made
        flops = _flops(func, args, kwargs, result)
        moved = sum(tensor.numel() * tensor.itemsize for tensor in (*inputs, *outputs))
        dtype = next((value.dtype for value in inputs if value.is_floating_point()), torch.float32)
        self.flops += flops
        self.kernels += 1
        seconds = self.gpu.kernel(flops, moved, dtype)
        if self.events and isinstance(last := self.events[-1], Compute):
            self.events[-1] = Compute(last.seconds + seconds)
        else:
            self.events.append(Compute(seconds))

    def _resize(self, key: int, size: int) -> None:
        self.alive += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.alive)
        self.peak_without_gradients = max(self.peak_without_gradients, self.alive - self._gradients)

    def _release(self, key: int) -> None:
        self.alive -= self._sizes.pop(key, 0)

    @contextmanager
    def watching_storages(self) -> Iterator[StepRecorder]:
        """Enters the recorder, and sees storages that are resized in place, as torch's own `MemTracker` does."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            original(storage, size)
            if storage._cdata in self._sizes:
                self._resize(storage._cdata, storage.nbytes())

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def _flops(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> int:
    """By torch's formulas; its list lacks the CPU's attention kernel."""
    packet = func.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))  # type: ignore[no-untyped-call]
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))  # type: ignore[no-untyped-call]
    return 0
