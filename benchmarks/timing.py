"""Time, memory and agreement of alternatives on a CPU or a GPU, interleaved so that a noisy machine disturbs all alike.

On a CPU the time is CPU time of this process, which other processes hardly change; on a GPU that between two events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], object]


@dataclass(frozen=True)
class Bench:
    """Where, in which dtype and how long a benchmark runs.

    Attributes:
        device: `cpu` or `cuda`.
        dtype: Of weights and activations.
        seconds: Length of each comparison, roughly.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    seconds: float = 4.0

    def randn(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def cumulative(self, lengths: list[int]) -> Tensor:
        """Cumulative lengths int32 `[B + 1]`."""
        return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=self.device)

    def milliseconds(self, functions: Mapping[str, Step]) -> dict[str, float]:
        """Lower-quartile milliseconds of each function."""
        measure = _gpu_milliseconds if self.device == "cuda" else _cpu_milliseconds
        times: dict[str, list[float]] = {name: [] for name in functions}
        for function in functions.values():
            function()
        stop = time.monotonic() + self.seconds
        while time.monotonic() < stop or len(next(iter(times.values()))) < 3:
            for name, function in functions.items():
                times[name].append(measure(function))
        return {name: sorted(values)[len(values) // 4] for name, values in times.items()}

    def peak_mebibytes(self, function: Step) -> float:
        """Most memory that torch held at once during a second call of a function, beyond what it held before."""
        function()
        return _gpu_peak(function) if self.device == "cuda" else _cpu_peak(function)

    def assert_same(self, ours: Tensor, theirs: Tensor) -> None:
        """Both ways compute the same, up to rounding."""
        limit = {torch.float64: 1e-10, torch.float32: 1e-4}.get(self.dtype, 5e-2)
        error = float((ours - theirs).norm() / theirs.norm())
        assert error <= limit, f"relative difference {error:.1e}, at most {limit:.0e} expected"


def _cpu_milliseconds(function: Step) -> float:
    start = time.process_time()
    function()
    return 1e3 * (time.process_time() - start)


def _gpu_milliseconds(function: Step) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _cpu_peak(function: Step) -> float:
    """From the allocator's own events, so temporary buffers inside operators count as well."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    assert profiled.profiler is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak / 2**20


def _gpu_peak(function: Step) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def table(title: str, rows: list[dict[str, object]]) -> None:
    """Prints rows of equal keys under a title."""
    cells = [[str(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(rows[0], *cells, strict=True)]
    print(f"\n{title}")
    for line in [list(rows[0]), *cells]:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)
