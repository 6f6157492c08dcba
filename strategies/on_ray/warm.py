"""Warm restarts: plain actors in a placement group; after a failure those that survive run the next attempt.

A restart then costs neither starting processes nor importing torch; only the worker that was lost is made anew, in
the place that the group still holds. The actors also stay between calls, of this Trainer and of later ones that ask
for the same, until the process ends or something else is asked for.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lightning_embodied.strategies.on_ray.cluster import no_room, rendezvous
from lightning_embodied.strategies.on_ray.failures import WorkerFailedError
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
        options: Of the strategy; its number of workers is fixed.
    """

    def __init__(self, options: RayOptions) -> None:
        self.options = options
        self._count = options.worker_range[1]
        self._group: Any = None
        self._actors: dict[int, Any] = {}

    def run(self, board: Any) -> None:
        """Runs a job until its ranks have finished or failed for good; the board tells which.

        Args:
            board: Handle of the `RunBoard` actor.

        Raises:
            ConfigError: The cluster never had room for the workers.
        """
        while True:
            nodes = self._complete()
            address, port = ray.get(self._actors[0].rendezvous.remote())
            places = assign(nodes, address, port, ray.get(board.begin.remote(len(nodes))))
            runs = [self._actors[place.rank].run.remote(board, place) for place in places]
            if not self._wait(runs):
                return
            if not ray.get(board.may_restart.remote(self._let_go(runs))):
                self.close()  # what a user's error left in them is not for the next call
                return

    def close(self) -> None:
        """Ends the actors and gives their places back."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _complete(self) -> list[str]:
        """Starts the actors that are missing; gives the node of each."""
        if self._group is None:
            bundles = [self.options.resources] * self._count
            self._group = placement_group(bundles, strategy=self.options.placement.upper())
        for place in range(self._count):
            if place not in self._actors:
                self._actors[place] = self._start(place)
        try:
            asked = [self._actors[place].node.remote() for place in range(self._count)]
            nodes: list[str] = ray.get(asked, timeout=self.options.start_timeout)
        except GetTimeoutError as error:
            raise no_room(ray, self.options, f"after {self.options.start_timeout:g} s") from error
        return nodes

    def _start(self, place: int) -> Any:
        resources = dict(self.options.resources)
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        options = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0), "resources": resources}
        if self.options.runtime_env is not None:
            options["runtime_env"] = self.options.runtime_env
        return ray.remote(WarmWorker).options(scheduling_strategy=where, **options).remote()

    def _wait(self, runs: list[Any]) -> bool:
        """Waits until all are done, or one has failed and the others have had time to notice; tells if one has."""
        pending, failed = list(runs), False
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=_GRACE_SECONDS if failed else None)
            if not done:
                return True
            failed = failed or _error(done[0]) is not None
        return failed

    def _let_go(self, runs: list[Any]) -> dict[int, str]:
        """Drops the actors that are dead or stuck; tells what is known about each."""
        lost = {}
        for rank, run in enumerate(runs):
            stuck = not ray.wait([run], timeout=0)[0]
            error = "did not notice that another rank failed" if stuck else _error(run)
            if error is not None and not isinstance(error, WorkerFailedError):
                lost[rank] = str(error)
                ray.kill(self._actors.pop(rank))
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
