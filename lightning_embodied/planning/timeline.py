"""How long a step takes when communication runs beside computation, and how much of it shows.

A step's events are played on one compute stream and one queue for each network (inside a node, between nodes). The
host runs ahead: FSDP2's next all-gather starts with the layer before it, reductions start when their gradients are
there, and the step ends when the last of either is done. Two collectives of one network share it, so they queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from lightning_embodied.planning.collectives import CollectiveModel, Kind
from lightning_embodied.planning.events import AwaitGather, Collective, Compute, Event, GradientReady
from lightning_embodied.planning.sharding import Sharding

_FIRST_BUCKET = 1 << 20
"""DDP's first bucket is small, so that communication starts early (`torch/csrc/distributed/c10d/reducer.hpp`)."""


@dataclass
class Traffic:
    """Collectives of one kind in a step.

    Attributes:
        calls: How many.
        sent: Bytes that a rank sends in a ring, which is the least possible.
        seconds: Their times, one after the other.
    """

    calls: int = 0
    sent: float = 0.0
    seconds: float = 0.0


@dataclass
class StepTime:
    """Time of an optimizer step.

    Attributes:
        seconds: From the first kernel to the last.
        compute: Of these, kernels' own time.
        traffic: What was sent, by collective.
    """

    seconds: float = 0.0
    compute: float = 0.0
    traffic: dict[Kind, Traffic] = field(default_factory=dict)

    @property
    def exposed(self) -> float:
        """Seconds in which computation waits for communication."""
        return self.seconds - self.compute


def step_time(
    events: Sequence[Event],
    sharding: Sharding,
    model: CollectiveModel,
    *,
    gpus_per_node: int,
    optimizer_seconds: float = 0.0,
    accumulate: int = 1,
) -> StepTime:
    """Plays a step.

    Args:
        events: Of one micro-batch, as `profile_step` records them.
        sharding: How many ranks take part, which may be others than were recorded: only group sizes depend on them.
        model: How long a collective takes.
        gpus_per_node: Groups that span no more than these stay off the network.
        optimizer_seconds: Added at the end.
        accumulate: Micro-batches of a step; only the last one reduces gradients.
    """
    total = StepTime(seconds=optimizer_seconds, compute=optimizer_seconds)
    last = bucketed(events, sharding.bucket_mb) if sharding.strategy == "ddp" else list(events)
    quiet = [event for event in last if not isinstance(event, Collective) or event.kind == "all_gather"]
    for micro_batch in [*[quiet] * (accumulate - 1), last]:
        _play(micro_batch, sharding, model, gpus_per_node, total)
    return total


def _play(
    events: Iterable[Event], sharding: Sharding, model: CollectiveModel, gpus_per_node: int, total: StepTime
) -> None:
    now = began = reduced = 0.0
    free = {True: 0.0, False: 0.0}
    gathers: deque[float] = deque()
    for event in events:
        if isinstance(event, Compute):
            began = now
            now += event.seconds
            total.compute += event.seconds
        elif isinstance(event, AwaitGather):
            now = max(now, gathers.popleft())
        elif isinstance(event, Collective):
            ranks, stride = group_of(event.kind, sharding)
            seconds = model.seconds(event.kind, event.size, ranks, stride)
            local = ranks * stride <= gpus_per_node
            ready = {"all_gather": began, "reduce_scatter": now, "all_reduce": max(now, reduced)}[event.kind]
            end = free[local] = max(free[local], ready) + seconds
            if event.kind == "all_gather":
                gathers.append(end)
            elif event.kind == "reduce_scatter":
                reduced = end
            if ranks > 1:
                _count(total.traffic.setdefault(event.kind, Traffic()), event, ranks, seconds)
    total.seconds += max(now, *free.values())


def _count(traffic: Traffic, event: Collective, ranks: int, seconds: float) -> None:
    traffic.calls += 1
    traffic.sent += event.size * (2 if event.kind == "all_reduce" else 1) * (ranks - 1) / ranks
    traffic.seconds += seconds


def group_of(kind: Kind, sharding: Sharding) -> tuple[int, int]:
    """Size of the group that takes part in a collective, and the ranks between two neighbours in it."""
    if kind == "all_reduce":
        return sharding.replicas, sharding.shard_size
    return sharding.shard_size, 1


def bucketed(events: Iterable[Event], bucket_mb: float) -> list[Event]:
    """Puts DDP's all-reduces where a bucket of gradients is full.

    Buckets follow the order in which gradients become ready, as DDP rebuilds them after its first step.

    Args:
        events: Of a step, with `GradientReady`.
        bucket_mb: Size of a bucket in MiB; one is closed by the gradient that reaches it.
    """
    result: list[Event] = []
    waiting, limit = 0, min(_FIRST_BUCKET, bucket_mb * 2**20)
    for event in events:
        if not isinstance(event, GradientReady):
            result.append(event)
            continue
        waiting += event.numel * event.itemsize
        if waiting >= limit:
            result.append(Collective("all_reduce", waiting))
            waiting, limit = 0, bucket_mb * 2**20
    return [*result, Collective("all_reduce", waiting)] if waiting else result


def resized(sharding: Sharding, ranks: int) -> Sharding:
    """The same way to train on another number of ranks."""
    shard = {"ddp": 1, "fsdp": ranks}.get(sharding.strategy, min(sharding.shard_size, ranks))
    return replace(sharding, ranks=ranks, shard_size=shard)
