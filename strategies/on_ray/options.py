"""The options that all Ray strategies have, checked and completed once the Trainer's devices are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_embodied.errors import ConfigError

Placement = Literal["pack", "spread", "strict_pack", "strict_spread"]
Restart = Literal["cold", "warm"]


@dataclass(frozen=True)
class RayOptions:
    """How workers are started and restarted.

    Args:
        worker_range: Least and most workers; equal where the number is fixed.
        address: Of the cluster; see `cluster.connect`.
        resources: Of each worker, by Ray's names.
        placement: Ray's placement strategy.
        runtime_env: Ray's description of the workers' environment.
        restart: Whether survivors of a failure are kept.
        max_restarts: Restarts before a failure ends the run.
        hang_timeout: Seconds without a sign of life after which a worker is killed.
        start_timeout: Seconds that the cluster has to start all workers.
        resize_interval: Seconds that an elastic run keeps its size before it takes in more workers.
        stop_grace: Seconds that ranks have to save and stop once asked to.
        bring_back_weights: Whether the driver's module gets the trained weights.
    """

    worker_range: tuple[int, int]
    address: str | None
    resources: dict[str, float]
    placement: Placement
    runtime_env: dict[str, Any] | None
    restart: Restart
    max_restarts: int
    hang_timeout: float
    start_timeout: float
    resize_interval: float
    stop_grace: float
    bring_back_weights: bool

    def __post_init__(self) -> None:
        _check(self.worker_range[0] >= 1, "num_workers", self.worker_range[0], "at least one worker")
        _check(self.worker_range[0] <= self.worker_range[1], "num_workers", list(self.worker_range), "[least, most]")
        gathered = self.restart == "cold" or not self.elastic or self.placement == "pack"
        _check(gathered, "placement", self.placement, "pack, for num_workers: [least, most] with restart: warm")
        _check(self.max_restarts >= 0, "max_restarts", self.max_restarts, "0 or more")
        for name in ("hang_timeout", "start_timeout", "resize_interval", "stop_grace"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "a positive number of seconds")

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change during a run."""
        return self.worker_range[0] < self.worker_range[1]


def worker_range(num_workers: int | Sequence[int] | None, devices: int) -> tuple[int, int]:
    """Least and most workers.

    Args:
        num_workers: Of the strategy: a number, `[least, most]`, or None for one worker a device.
        devices: `devices` times `num_nodes` of the Trainer.

    Raises:
        ConfigError: A list of other than two.
    """
    if num_workers is None:
        return devices, devices
    if isinstance(num_workers, int):
        return num_workers, num_workers
    _check(len(num_workers) == 2, "num_workers", list(num_workers), "a number or [least, most]")
    return num_workers[0], num_workers[1]


def _check(good: bool, name: str, found: object, expected: str) -> None:
    if not good:
        raise ConfigError("a Ray strategy cannot use this option", where=name, found=found, expected=expected)
