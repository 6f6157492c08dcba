"""What is asked of a plan, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_embodied.planning.demands import CheckpointCost, LoaderDemand, SampleSize, Storage
from lightning_embodied.planning.goodput import META_HOURS_BETWEEN_FAILURES, Goodput
from lightning_embodied.planning.hardware import Cluster
from lightning_embodied.planning.profile import Memory
from lightning_embodied.planning.scaling import ScalingLaw
from lightning_embodied.planning.sharding import Sharding, Strategy
from lightning_embodied.planning.timeline import StepTime


@dataclass(frozen=True)
class PlanRequest:
    """What is asked.

    Attributes:
        ranks: GPUs.
        cluster: Their nodes and network.
        micro_batch: Samples of a rank's forward pass.
        sample: What a sample reads from storage.
        storage: Where checkpoints go.
        accumulate: Micro-batches of an optimizer step.
        precision: Lightning's name of it.
        strategies: Which ones to look at. Default: `ddp` and `hsdp`, and `fsdp` where those do not fit or there is but
            one node: over more it sends through the network what `hsdp` sends inside nodes, and is never faster.
        units: Classes of the blocks that FSDP gathers one at a time. Default: all stacked blocks that can be.
        shard_size: Ranks that share one copy under HSDP. Default: those of a node.
        hours_between_failures: Of one GPU, on average.
        restart_seconds: From a failure to training again, without reading the checkpoint.
        measured: Seconds of a step by number of ranks, if some are known: the scaling curve is then fitted to them.
    """

    ranks: int
    cluster: Cluster
    micro_batch: int
    sample: SampleSize
    storage: Storage = field(default_factory=lambda: Storage(5e9, 100e9))
    accumulate: int = 1
    precision: str = "bf16-mixed"
    strategies: tuple[Strategy, ...] | None = None
    units: tuple[str, ...] | None = None
    shard_size: int | None = None
    hours_between_failures: float = META_HOURS_BETWEEN_FAILURES
    restart_seconds: float = 120.0
    measured: Mapping[int, float] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        """Nodes that the ranks fill."""
        return math.ceil(self.ranks / self.cluster.gpus_per_node)

    @property
    def usable(self) -> float:
        """Bytes of a GPU's memory that tensors may fill."""
        return self.cluster.gpu.memory * self.cluster.gpu.usable_share


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        sharding: It.
        memory: Of a rank.
        fits: Whether that is within the usable share of a GPU's memory.
        largest_micro_batch: The largest power of two that fits; 0 if not even one sample does.
        time: Of an optimizer step.
        samples_per_second: All ranks together.
        checkpoint: Cost of one.
    """

    sharding: Sharding
    memory: Memory
    fits: bool
    largest_micro_batch: int
    time: StepTime
    samples_per_second: float
    checkpoint: CheckpointCost


@dataclass(frozen=True)
class ScalingPoint:
    """The recommended way on another number of ranks.

    Attributes:
        ranks: That number.
        seconds: Of a step.
        samples_per_second: All ranks together.
        efficiency: Samples a second and rank, by those on the fewest ranks of the curve.
    """

    ranks: int
    seconds: float
    samples_per_second: float
    efficiency: float


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        request: What was asked.
        parameters: Numbers in the model.
        trainable: Those of them that train.
        flops: Of a micro-batch's forward and backward pass on a rank.
        candidates: All ways that were looked at.
        recommended: Which of them to take; None if none fits.
        reasons: Why, in sentences.
        scaling: The curve of the recommended (or else the least large) one.
        loader: What its loaders need.
        goodput: With synchronous checkpoints.
        goodput_async: With asynchronous ones.
        law: The constants fitted to `measured`.
    """

    request: PlanRequest
    parameters: int
    trainable: int
    flops: int
    candidates: list[Candidate]
    recommended: Candidate | None
    reasons: list[str]
    scaling: list[ScalingPoint]
    loader: LoaderDemand
    goodput: Goodput
    goodput_async: Goodput
    law: ScalingLaw | None
