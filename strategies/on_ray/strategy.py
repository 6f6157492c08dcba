"""What every Ray strategy adds to Lightning's of the same kind: ranks, launcher and the record of checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import rank_zero_only
from lightning.pytorch.strategies import ParallelStrategy

from lightning_embodied.strategies.lightning_compat import set_launcher
from lightning_embodied.strategies.on_ray.callbacks import BETWEEN_SIZES
from lightning_embodied.strategies.on_ray.environment import RayEnvironment
from lightning_embodied.strategies.on_ray.launcher import RayLauncher
from lightning_embodied.strategies.on_ray.options import Placement, RayOptions, Restart, worker_range

if TYPE_CHECKING:
    from lightning_embodied.strategies.on_ray.client import BoardClient
    from lightning_embodied.strategies.on_ray.ranks import Assignment


class RayStrategyMixin(ParallelStrategy):
    """Put before one of Lightning's parallel strategies among the bases of a class.

    Args:
        num_workers: Number of workers, one rank each; None takes `trainer.devices` times `trainer.num_nodes`.
            `[least, most]` starts as many as the cluster has room for, goes on with fewer after a loss and with more
            once there is room again.
        address: Of a Ray cluster. None finds the one of RAY_ADDRESS or of this machine and starts one when there is
            none; `local` always starts one.
        resources_per_worker: By Ray's names, such as `{GPU: 1, CPU: 8}`; None is one GPU on GPUs and one CPU.
        placement: Whether workers share as few nodes as possible (`pack`) or as many (`spread`); `strict_` insists.
        runtime_env: Ray's description of the workers' environment: `pip`, `env_vars`, `working_dir` and so on.
        restart: `cold` leaves workers to Ray Train and starts all of them anew after a failure; `warm` keeps those
            that survive.
        max_restarts: Restarts from the last complete checkpoint after a worker died, hung or lost its connection.
            Exceptions of your own code are not retried.
        hang_timeout: Seconds without a sign of life after which a worker counts as hung and is killed.
        start_timeout: Seconds that the cluster has to start all workers.
        resize_interval: Seconds that an elastic run stays at least as large as it is before it takes in more workers.
        stop_grace: Seconds that all ranks have to save and stop after SIGTERM or Ctrl-C.
        bring_back_weights: Whether the module of the driver has the trained weights after `fit`; off for models that
            do not fit into its memory.
        kwargs: Of Lightning's strategy.
    """

    def __init__(
        self,
        num_workers: int | list[int] | None = None,
        address: str | None = None,
        resources_per_worker: dict[str, float] | None = None,
        placement: Placement = "pack",
        runtime_env: dict[str, Any] | None = None,
        restart: Restart = "cold",
        max_restarts: int = 3,
        hang_timeout: float = 60.0,
        start_timeout: float = 300.0,
        resize_interval: float = 60.0,
        stop_grace: float = 120.0,
        bring_back_weights: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.cluster_environment = self.environment = RayEnvironment()
        self._num_workers = num_workers
        self._resources = resources_per_worker
        self._ray_options: dict[str, Any] = {
            "address": address,
            "placement": placement,
            "runtime_env": runtime_env,
            "restart": restart,
            "max_restarts": max_restarts,
            "hang_timeout": hang_timeout,
            "start_timeout": start_timeout,
            "resize_interval": resize_interval,
            "stop_grace": stop_grace,
            "bring_back_weights": bring_back_weights,
        }
        self._client: BoardClient | None = None
        self._abandoned = False
        self._spare: str | None = None

    @property
    def root_device(self) -> torch.device:
        """The device of this worker; Ray shows a worker only the GPUs it was given."""
        device = (self.parallel_devices or [torch.device("cpu")])[0]
        if device.type != "cuda":
            return device
        return torch.device("cuda", self.local_rank if torch.cuda.device_count() > self.local_rank else 0)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How Lightning's samplers share out the data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Called while the Trainer is built, and again on a worker before it joins the process group."""
        if self.environment.assignment is None:
            self.environment.plan(self._worker_range()[1])
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # how Lightning's own strategies set it

    def _configure_launcher(self) -> None:
        set_launcher(self, RayLauncher(self, self._options()))

    def take_place(self, assignment: Assignment, client: BoardClient) -> None:
        """Makes this copy of the strategy that of a worker.

        Args:
            assignment: Its place.
            client: Its line to the board.
        """
        self.environment.assignment = assignment
        self._client = client
        self._abandoned = False
        began_from = assignment.checkpoint or ""
        self._spare = began_from if os.path.basename(began_from).startswith(BETWEEN_SIZES) else None
        self.set_world_ranks()

    def abandon(self) -> None:
        """From here on nothing is saved and no other rank waited for."""
        self._abandoned = True

    def reopen(self) -> None:
        """Undoes `abandon`."""
        self._abandoned = False

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks, unless this one has failed.

        Args:
            name: Of the barrier.
        """
        if not self._abandoned:
            super().barrier(name)  # type: ignore[safe-super]  # that of the Lightning strategy after this class

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves, and tells the board once a run could resume from the result.

        Args:
            checkpoint: What to save.
            filepath: Where.
            storage_options: For the checkpoint plugin.
        """
        if self._abandoned:
            return
        path = _absolute(filepath)
        client = self._client if self.is_global_zero else None
        if client is not None:
            client.saving(path)
        resumable, step = "loops" in checkpoint, int(checkpoint.get("global_step", 0))
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        if self._client is not None and resumable:
            self._client.keep_generators(path, step)
            self._remove_spare(path)
        if client is not None and resumable:
            client.saved(path, step)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint, which the board forgets first.

        Args:
            filepath: Where it is.
        """
        if self._client is not None and self.is_global_zero:
            self._client.removed(_absolute(filepath))
        super().remove_checkpoint(filepath)

    def _remove_spare(self, newer: str) -> None:
        """Removes what this attempt began from if it was saved for the change of size only."""
        spare, self._spare = self._spare, None
        if spare is not None and spare != newer:
            self.remove_checkpoint(spare)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    def _options(self) -> RayOptions:
        cuda = self.parallel_devices is not None and self.parallel_devices[0].type == "cuda"
        default = {"GPU": 1.0, "CPU": 1.0} if cuda else {"CPU": 1.0}
        resources = self._resources if self._resources is not None else default
        return RayOptions(worker_range=self._worker_range(), resources=resources, **self._ray_options)

    def _worker_range(self) -> tuple[int, int]:
        nodes = getattr(self, "num_nodes", 1)
        return worker_range(self._num_workers, len(self.parallel_devices or []) * nodes)


def _absolute(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)
