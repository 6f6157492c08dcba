"""From a model and a cluster to a plan: what each way of training costs, which one to take, and how it scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_embodied.errors import ConfigError
from lightning_embodied.planning.answer import Candidate, Plan, PlanRequest, ScalingPoint
from lightning_embodied.planning.collectives import CollectiveModel, NcclModel
from lightning_embodied.planning.demands import CheckpointCost, LoaderDemand
from lightning_embodied.planning.goodput import goodput
from lightning_embodied.planning.profile import (
    MakeOptimizer,
    Step,
    StepProfile,
    default_optimizer,
    forward_bytes,
    profile_step,
)
from lightning_embodied.planning.scaling import ScalingLaw
from lightning_embodied.planning.sharding import Sharding, repeated_blocks
from lightning_embodied.planning.timeline import StepTime, resized, step_time

BUCKETS_MB = (5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0)
_SAME = 0.02
"""Differences of predicted times below this are none: the simpler choice is taken."""


def make_plan(
    build: Callable[[], nn.Module],
    step_of: Callable[[int], Step],
    request: PlanRequest,
    *,
    optimizer: MakeOptimizer = default_optimizer,
    collectives: CollectiveModel | None = None,
) -> Plan:
    """Profiles a model under DDP, HSDP and FSDP and compares them.

    Args:
        build: Makes the model; is called on the meta device, once for each profile.
        step_of: Of a micro-batch, its forward pass (see `Step`).
        request: What is asked.
        optimizer: Makes the optimizer.
        collectives: How long collectives take. Default: NCCL's own model on the cluster.

    Raises:
        ConfigError: Something of the request cannot be; see `profile_step`.
    """
    if request.ranks < 1 or request.micro_batch < 1 or request.accumulate < 1:
        raise ConfigError("too small", where="ranks, micro_batch or accumulate", expected=">= 1")
    model = collectives or NcclModel(request.cluster)
    profiles = list(_profiles(build, step_of, request, optimizer))
    growth = _growth(build, step_of, request, profiles[0])
    candidates = [_candidate(profile, request, model, growth) for profile in profiles]
    best = _choose(candidates)
    shown = best or min(candidates, key=lambda candidate: candidate.memory.peak)
    profile = profiles[candidates.index(shown)]
    law = ScalingLaw.fit(request.measured) if request.measured else None
    saves = shown.checkpoint
    failing: dict[str, Any] = {
        "hours_between_failures": request.hours_between_failures,
        "restart_seconds": request.restart_seconds + saves.load_seconds,
    }
    return Plan(
        request=request,
        parameters=profile.parameters,
        trainable=profile.trainable,
        flops=profile.flops,
        candidates=candidates,
        recommended=best,
        reasons=_reasons(candidates, best, profiles, request),
        scaling=_scaling(profile, shown, request, model, law),
        loader=LoaderDemand.of(request.sample, shown.samples_per_second, request.nodes),
        goodput=goodput(request.ranks, save_seconds=saves.write_seconds, **failing),
        goodput_async=goodput(
            request.ranks, save_seconds=saves.stall_seconds, least_interval=saves.write_seconds, **failing
        ),
        law=law,
    )


def _profiles(
    build: Callable[[], nn.Module], step_of: Callable[[int], Step], request: PlanRequest, optimizer: MakeOptimizer
) -> Iterator[StepProfile]:
    """DDP first: it tells which blocks can be units."""
    units = request.units

    def profile(sharding: Sharding) -> StepProfile:
        with torch.device("meta"):
            module = build()
        return profile_step(
            module,
            step_of(request.micro_batch),
            sharding,
            request.cluster.gpu,
            precision=request.precision,
            optimizer=optimizer,
            accumulate=request.accumulate,
        )

    unsharded = profile(Sharding("ddp", request.ranks))
    yield unsharded
    if units is None:
        with torch.device("meta"):
            units = tuple(sorted(repeated_blocks(build()) - unsharded.reached_into))
    half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(request.precision)
    reduce = None if half is None else torch.float32
    shard, fits = request.shard_size or request.cluster.gpus_per_node, False
    if shard < request.ranks and "hsdp" in (request.strategies or ("hsdp",)):
        hybrid = profile(Sharding("hsdp", request.ranks, shard, units, half, reduce))
        fits = hybrid.memory.peak <= request.usable
        yield hybrid
    if request.ranks > 1 and ("fsdp" in request.strategies if request.strategies else not fits):
        yield profile(Sharding("fsdp", request.ranks, request.ranks, units, half, reduce))


def _growth(
    build: Callable[[], nn.Module], step_of: Callable[[int], Step], request: PlanRequest, profile: StepProfile
) -> float:
    """Bytes of activations that one more sample of a micro-batch adds."""
    with torch.device("meta"):
        module = build()
    doubled = forward_bytes(module, step_of(2 * request.micro_batch), request.precision)
    return (doubled - profile.saved) / request.micro_batch


def _candidate(profile: StepProfile, request: PlanRequest, model: CollectiveModel, growth: float) -> Candidate:
    usable = request.usable
    times = {
        bucket: _time(profile, replace(profile.sharding, bucket_mb=bucket), request, model)
        for bucket in (BUCKETS_MB if profile.sharding.strategy == "ddp" else (profile.sharding.bucket_mb,))
    }
    fastest = min(time.seconds for time in times.values())
    bucket = next(bucket for bucket, time in times.items() if time.seconds <= fastest * (1 + _SAME / 4))
    sharding, time = replace(profile.sharding, bucket_mb=bucket), times[bucket]
    spare = request.micro_batch + (usable - profile.memory.peak) / growth if growth > 0 else request.micro_batch
    return Candidate(
        sharding=sharding,
        memory=profile.memory,
        fits=profile.memory.peak <= usable,
        largest_micro_batch=2 ** math.floor(math.log2(spare)) if spare >= 1 else 0,
        time=time,
        samples_per_second=request.ranks * request.micro_batch * request.accumulate / time.seconds,
        checkpoint=CheckpointCost.of(profile.state_bytes, sharding, request.storage, request.cluster.gpus_per_node),
    )


def _time(profile: StepProfile, sharding: Sharding, request: PlanRequest, model: CollectiveModel) -> StepTime:
    return step_time(
        profile.events,
        sharding,
        model,
        gpus_per_node=request.cluster.gpus_per_node,
        optimizer_seconds=profile.optimizer_seconds,
        accumulate=request.accumulate,
    )


def _choose(candidates: list[Candidate]) -> Candidate | None:
    """The fastest that fits; of equals the first, which is the simplest."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return None
    fastest = min(candidate.time.seconds for candidate in fitting)
    return next(candidate for candidate in fitting if candidate.time.seconds <= fastest * (1 + _SAME))


def _reasons(
    candidates: list[Candidate], best: Candidate | None, profiles: list[StepProfile], request: PlanRequest
) -> list[str]:
    usable = request.usable / 2**30
    reasons = []
    for candidate in candidates:
        label, peak = candidate.sharding.label, candidate.memory.peak / 2**30
        if not candidate.fits:
            reasons.append(f"{label} needs {peak:.1f} GiB of {usable:.1f} usable")
        elif candidate is not best and best is not None:
            slower = candidate.time.seconds / best.time.seconds - 1
            reasons.append(
                f"{label} is {slower:.0%} slower" if slower > _SAME else f"{label} is no faster, and less simple"
            )
    if best is None:
        reasons.append("nothing fits: try a smaller micro-batch, recomputed activations or frozen parts")
    elif best.largest_micro_batch > request.micro_batch:
        reasons.append(f"a micro-batch of {best.largest_micro_batch} fits as well, and more work hides more traffic")
    inside = sorted(profiles[0].reached_into)
    if inside:
        reasons.append(f"{', '.join(inside)} cannot be a unit of sharding: layers inside are called from elsewhere")
    return reasons


def _scaling(
    profile: StepProfile, shown: Candidate, request: PlanRequest, model: CollectiveModel, law: ScalingLaw | None
) -> list[ScalingPoint]:
    counts = [2**power for power in range(3, 13) if 2**power <= max(1024, request.ranks)]
    points: list[ScalingPoint] = []
    for ranks in sorted({*counts, request.ranks}):
        seconds = (
            law.step_seconds(ranks) if law else _time(profile, resized(shown.sharding, ranks), request, model).seconds
        )
        rate = ranks * request.micro_batch * request.accumulate / seconds
        first = points[0] if points else None
        efficiency = rate / ranks / (first.samples_per_second / first.ranks) if first else 1.0
        points.append(ScalingPoint(ranks, seconds, rate, efficiency))
    return points
