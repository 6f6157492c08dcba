"""What happens in a training step, in the order the host issues it; the input of the timeline."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_embodied.planning.collectives import Kind


@dataclass(frozen=True)
class Compute:
    """Kernels one after the other.

    Attributes:
        seconds: Their time on the accelerator.
    """

    seconds: float


@dataclass(frozen=True)
class Collective:
    """A collective that is started, not waited for.

    Attributes:
        kind: Which one.
        size: Bytes of the whole tensor.
    """

    kind: Kind
    size: int


@dataclass(frozen=True)
class AwaitGather:
    """The compute stream waits for the oldest all-gather that was not waited for."""


@dataclass(frozen=True)
class GradientReady:
    """The gradient of a parameter is complete.

    Attributes:
        numel: Its numbers.
        itemsize: Bytes of one.
    """

    numel: int
    itemsize: int


Event = Compute | Collective | AwaitGather | GradientReady
