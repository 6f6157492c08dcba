"""Cold restarts: Ray Train v2 places the workers, watches them and starts all of them anew after a failure.

Of Ray Train only the controller is used. Lightning makes the process group, so the strategy's backend and timeout
count; checkpoints are Lightning's; and the board decides whether a failure is followed by a restart, because Ray
Train would repeat the user's own errors. Uses `ray.train.v2` names that Ray marks as for developers or private:
`DataParallelTrainer` and three of its methods, `DefaultFailurePolicy`, `ElasticScalingPolicy` and two callbacks that
are left out.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.train import BackendConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.v2._internal.callbacks import DatasetsCallback, WorkingDirectorySetupCallback
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

from lightning_embodied.strategies.on_ray.cluster import no_room, rendezvous
from lightning_embodied.strategies.on_ray.failures import WorkerFailedError
from lightning_embodied.strategies.on_ray.ranks import Assignment, assign, notice_sigterm

if TYPE_CHECKING:
    from lightning_embodied.strategies.on_ray.options import RayOptions

_NOT_NEEDED = (DatasetsCallback, WorkingDirectorySetupCallback)  # Ray Data's process; a change of directory

_place: list[Assignment] = []  # that of this worker process; Ray Train calls the training function without it


def run(board: Any, options: RayOptions) -> None:
    """Runs a job until its ranks have finished or failed for good; the board tells which.

    Args:
        board: Handle of the `RunBoard` actor.
        options: Of the strategy.

    Raises:
        ConfigError: The cluster never had room for the workers.
    """
    low, high = options.worker_range
    trainer = _BoardTrainer(
        partial(_train, board),
        backend_config=_BoardBackendConfig(board),
        scaling_config=ScalingConfig(
            num_workers=high if low == high else (low, high),
            elastic_resize_monitor_interval_s=options.resize_interval,
            use_gpu=options.resources.get("GPU", 0) > 0,
            resources_per_worker=options.resources,
            placement_strategy=options.placement.upper(),
        ),
        run_config=RunConfig(
            storage_path=os.path.join(tempfile.gettempdir(), "ray_results"),
            worker_runtime_env=options.runtime_env,
            failure_config=FailureConfig(max_failures=-1, controller_failure_limit=options.max_restarts),
        ),
    )
    with _environment(options):
        try:
            trainer.fit()
        except TrainingFailedError as error:
            if not ray.get(board.failures.remote()):
                raise no_room(ray, options, str(error).splitlines()[0]) from error


def _train(board: Any) -> None:
    from lightning_embodied.strategies.on_ray.worker import run_worker  # here, for the controller needs no torch

    place = _place[0]
    run_worker(board, place)
    while ray.get(board.awaits_resize.remote(place.rank)):  # Ray Train would count a rank that returns as finished
        threading.Event().wait(0.5)


class _BoardTrainer(DataParallelTrainer):  # type: ignore[misc]  # Ray is not typed
    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        board = self.backend_config.board
        policies: dict[str, Any] = {"failure_policy": _BoardFailurePolicy(self.run_config.failure_config, board)}
        if self.scaling_config.elasticity_enabled:
            policies["scaling_policy"] = _BoardScalingPolicy(self.scaling_config, board)
        return super()._initialize_and_run_controller(**{**arguments, **policies})

    def _create_default_callbacks(self) -> list[Any]:
        return [part for part in super()._create_default_callbacks() if not isinstance(part, _NOT_NEEDED)]

    def _register_sigint_handler(self, controller: Any) -> None:
        """Ray's would abort the run; ours lets it save first."""


class _BoardFailurePolicy(DefaultFailurePolicy):  # type: ignore[misc]  # Ray is not typed
    """Runs in Ray Train's controller."""

    def __init__(self, failure_config: FailureConfig, board: Any) -> None:
        super().__init__(failure_config)
        self._board = board

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        if not isinstance(training_failed_error, WorkerGroupError):
            return super().make_decision(training_failed_error)
        failures = training_failed_error.worker_failures
        lost = {rank: str(error) for rank, error in failures.items() if not isinstance(error, WorkerFailedError)}
        again = ray.get(self._board.may_restart.remote(lost))
        return FailureDecision.RETRY if again else FailureDecision.RAISE


class _BoardScalingPolicy(ElasticScalingPolicy):  # type: ignore[misc]  # Ray is not typed
    """Runs in Ray Train's controller: has ranks save before their number changes, and knows which nodes are gone."""

    def __init__(self, scaling_config: ScalingConfig, board: Any) -> None:
        super().__init__(scaling_config)
        self._board = board
        self._decided: ResizeDecision | None = None

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._decided = None
        return super().make_decision_for_non_running_worker_group()

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        if self._decided is None:
            decision = super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)
            if not isinstance(decision, ResizeDecision):
                return decision
            self._decided = decision
            ray.get(self._board.request_resize.remote())
        if not ray.get(self._board.resizes.remote()):
            return NoopDecision()
        decided, self._decided = self._decided, None
        return decided

    def _get_reserved_resources(self) -> dict[str, Any] | None:
        """Ray goes on to count a node that is lost for up to 20 s, and would wait for a worker on it."""
        reserved = super()._get_reserved_resources()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"] and _answers(node)}
        return reserved and {node: resources for node, resources in reserved.items() if node in alive}


def _answers(node: dict[str, Any]) -> bool:
    """Whether a node's raylet listens; Ray itself notices seconds after the workers that it does not."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=2.0).close()
    except OSError:
        return False
    return True


class _BoardBackendConfig(BackendConfig):  # type: ignore[misc]  # Ray is not typed
    def __init__(self, board: Any) -> None:
        self.board = board

    @property
    def backend_cls(self) -> type[Backend]:
        return _BoardBackend


class _BoardBackend(Backend):  # type: ignore[misc]  # Ray is not typed
    """Runs in Ray Train's controller, once for each attempt."""

    def on_start(self, worker_group: Any, backend_config: _BoardBackendConfig) -> None:
        nodes = [worker.metadata.node_id for worker in worker_group.get_workers()]
        address, port = worker_group.execute_single(0, rendezvous)
        beginning = ray.get(backend_config.board.begin.remote(len(nodes)))
        places = assign(nodes, address, port, beginning)
        execute = worker_group.execute_single_async
        ray.get([execute(place.rank, _take_assignment, place) for place in places])


def _take_assignment(assignment: Assignment) -> None:
    _place[:] = [assignment]
    notice_sigterm()  # here, for training itself runs in a thread, which may set no handlers


@contextlib.contextmanager
def _environment(options: RayOptions) -> Iterator[None]:
    """What Ray Train reads from the driver's environment only."""
    wanted = {
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(options.start_timeout),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(max(0.25, options.worker_range[1] / 512)),
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it would send what rank 0 prints to a log file
    }
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
