"""CPU time of alternatives, interleaved so that a noisy machine disturbs all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch.profiler import ProfilerActivity, profile


def cpu_milliseconds(functions: Mapping[str, Callable[[], object]], seconds: float = 4.0) -> dict[str, float]:
    """Lower-quartile CPU milliseconds of each function; `seconds` bounds the whole measurement roughly."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    stop = time.monotonic() + seconds
    while time.monotonic() < stop or len(next(iter(times.values()))) < 3:
        for name, function in functions.items():
            start = time.process_time()
            function()
            times[name].append(time.process_time() - start)
    return {name: 1e3 * sorted(values)[len(values) // 4] for name, values in times.items()}


def peak_mebibytes(function: Callable[[], object]) -> float:
    """Most memory that torch's CPU allocator held at once during a second call, beyond what it held before.

    From the allocator's own events, so temporary buffers inside operators count as well.
    """
    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    assert profiled.profiler is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak / 2**20


def table(title: str, rows: list[dict[str, object]]) -> None:
    """Prints rows of equal keys under a title."""
    cells = [[str(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(rows[0], *cells, strict=True)]
    print(f"\n{title}")
    for line in [list(rows[0]), *cells]:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
