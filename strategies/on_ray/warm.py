"""Warm restarts: plain actors; after a failure those that survive run the next attempt.

A restart then costs neither starting processes nor importing torch; only the worker that was lost is made anew. With an
elastic number of workers the run goes on without it, and takes it in once it is ready. The actors also stay between
calls, of this Trainer and of later ones that ask for the same, until the process ends or something else is asked for.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lightning_embodied.strategies.on_ray.cluster import rendezvous
from lightning_embodied.strategies.on_ray.failures import WorkerFailedError
from lightning_embodied.strategies.on_ray.places import Place, Places
from lightning_embodied.strategies.on_ray.ranks import Assignment, assign, notice_sigterm

if TYPE_CHECKING:
    from lightning_embodied.strategies.on_ray.options import RayOptions

_GRACE_SECONDS = 10.0  # for ranks whose connection broke to say so; those that do not are stuck, and replaced


class WarmWorker:
    """One worker process. Its methods run in the main thread and handle signals there, the job runs beside it.

    In the main thread Lightning would answer SIGTERM with a collective of this rank alone, which the others never join.
    """

    def node(self) -> str:
        """Ray's id of its node, given once torch and Lightning are imported."""
        import lightning_embodied.strategies.on_ray.worker  # noqa: F401 - what every attempt needs

        return str(ray.get_runtime_context().get_node_id())

    def rendezvous(self) -> tuple[str, int]:
        """Where rank 0 of the next attempt listens."""
        return rendezvous()

    def run(self, board: Any, assignment: Assignment) -> None:
        """Runs one attempt.

        Args:
            board: Handle of the `RunBoard` actor.
            assignment: Place in the attempt.
        """
        from lightning_embodied.strategies.on_ray.worker import run_worker

        notice_sigterm()
        with ThreadPoolExecutor(1, "training") as thread:
            thread.submit(run_worker, board, assignment).result()


class WarmWorkers:
    """The actors of this process, kept over attempts and calls.

    Args:
        options: Of the strategy.
    """

    def __init__(self, options: RayOptions) -> None:
        self.options = options
        self._places = Places(options, self._start)

    def run(self, board: Any) -> None:
        """Runs a job until its ranks have finished or failed for good; the board tells which.

        Args:
            board: Handle of the `RunBoard` actor.

        Raises:
            ConfigError: The cluster never had room for the workers.
        """
        while True:
            workers = self._places.fill(self.options)
            places, nodes = [place for place, _ in workers], [node for _, node in workers]
            address, port = ray.get(places[0].actor.rendezvous.remote())
            assignments = assign(nodes, address, port, ray.get(board.begin.remote(len(nodes))))
            pairs = zip(places, assignments, strict=True)
            runs = [place.actor.run.remote(board, assignment) for place, assignment in pairs]
            if not self._wait(board, runs, places):
                if ray.get(board.resizes.remote()):
                    continue
                self._places.give_back_requests(places)
                return
            if not ray.get(board.may_restart.remote(_let_go(runs, places))):
                self.close()  # what a user's error left in them is not for the next call
                return

    def close(self) -> None:
        """Ends the actors and gives their places back."""
        self._places.close()

    def _start(self, where: PlacementGroupSchedulingStrategy) -> Any:
        resources = dict(self.options.resources)
        options = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0), "resources": resources}
        if self.options.runtime_env is not None:
            options["runtime_env"] = self.options.runtime_env
        return ray.remote(WarmWorker).options(scheduling_strategy=where, **options).remote()

    def _wait(self, board: Any, runs: list[Any], places: list[Place]) -> bool:
        """Waits until all are done, or one has failed and the others have had time to notice; tells if one has.

        Meanwhile lets the run go on with more workers once there are more.
        """
        began = time.monotonic()
        pending, failed, resizing = list(runs), False, False
        while pending:
            coming = [] if failed or resizing else self._places.coming(places)
            settling = max(0.0, began + self.options.resize_interval - time.monotonic()) if coming else None
            watched = pending if settling else [*pending, *coming]
            done, _ = ray.wait(watched, num_returns=1, timeout=_GRACE_SECONDS if failed else settling or None)
            if not done:
                if failed:
                    return True
            elif done[0] in pending:
                pending.remove(done[0])
                failed = failed or _error(done[0]) is not None
            elif not self._places.replace_dead():
                resizing = True
                ray.get(board.request_resize.remote())
        return failed


def _let_go(runs: list[Any], places: list[Place]) -> dict[int, str]:
    """Ends the actors that are dead or stuck; tells what is known about each."""
    lost = {}
    for rank, (run, place) in enumerate(zip(runs, places, strict=True)):
        stuck = not ray.wait([run], timeout=0)[0]
        error = "did not notice that another rank failed" if stuck else _error(run)
        if error is not None and not isinstance(error, WorkerFailedError):
            lost[rank] = str(error)
            place.empty()
    return lost


_kept: list[tuple[tuple[Any, ...], WarmWorkers]] = []


def warm_workers(options: RayOptions) -> WarmWorkers:
    """The workers that an earlier call left, if they are such as these options ask for; else new ones.

    Args:
        options: Of the strategy.
    """
    job = ray.get_runtime_context().get_job_id()
    kind = (job, options.worker_range, options.resources, options.placement, options.runtime_env)
    if _kept and _kept[0][0] != kind:
        close_warm_workers()
    if not _kept:
        _kept.append((kind, WarmWorkers(options)))
    workers = _kept[0][1]
    workers.options = options
    return workers


def close_warm_workers() -> None:
    """Ends the workers that an earlier call left."""
    while _kept:
        (job, *_), workers = _kept.pop()
        if job == ray.get_runtime_context().get_job_id():
            workers.close()


def _error(run: Any) -> Exception | None:
    """How a rank ended."""
    try:
        ray.get(run)
    except (WorkerFailedError, RayActorError) as error:
        return error
    return None
