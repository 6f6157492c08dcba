"""The one entry of a worker process, whoever started it: run the job of the payload as the assigned rank.

Nothing here knows the orchestration. An exception is reported to the board before it is raised, so that the cause is
known before its consequences on other ranks are.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_embodied.errors import ConfigError, import_extra
from lightning_embodied.strategies.lightning_compat import run_entry_point
from lightning_embodied.strategies.on_ray.callbacks import FailureReporter, GoesOnDrawing, RunStopped, StopTogether
from lightning_embodied.strategies.on_ray.client import BoardClient
from lightning_embodied.strategies.on_ray.failures import WorkerFailedError
from lightning_embodied.strategies.on_ray.loggers import continue_logs
from lightning_embodied.strategies.on_ray.output import forwarded_output
from lightning_embodied.strategies.on_ray.results import RankResult, collect

if TYPE_CHECKING:
    from lightning_embodied.strategies.on_ray.payload import Job, Payload
    from lightning_embodied.strategies.on_ray.ranks import Assignment


def run_worker(board: Any, assignment: Assignment) -> None:
    """Runs the job in this process.

    Args:
        board: Handle of the `RunBoard` actor.
        assignment: Place of this process.

    Raises:
        WorkerFailedError: The job raised; the board knows what.
    """
    ray = import_extra("ray", "ray")
    before = dict(os.environ)
    assignment.export()
    with BoardClient(board, assignment) as client:
        try:
            payload: Payload = ray.get(ray.get(board.payload.remote())[0])
            result = _run(payload, assignment, client)
            client.finished(result.to_bytes(), stopped=result.stopped is not None)
        except BaseException as error:
            client.failed(error)
            raise WorkerFailedError(f"rank {assignment.rank}: {type(error).__name__}: {error}") from None
        finally:
            _leave_process_group()
            os.environ.clear()  # a process that is kept starts the next job as it started this one
            os.environ.update(before)


def _run(payload: Payload, assignment: Assignment, client: BoardClient) -> RankResult:
    with ExitStack() as stack:
        if assignment.rank == 0:
            stack.enter_context(forwarded_output(client.write, payload.terminal))
        payload.prepare_process()
        job = _open(payload)
        job.globals.restore()
        _take_place(job, assignment, client)
        callbacks = list(job.trainer.callbacks)  # type: ignore[attr-defined]
        job.trainer.callbacks[:] = [  # type: ignore[attr-defined]
            FailureReporter(client, job.trainer.strategy),  # type: ignore[arg-type]
            *_restored(assignment, client),
            *callbacks,
            StopTogether(client),
        ]
        try:
            returned = job.run(run_entry_point)
        except RunStopped as stop:
            return RankResult(stopped=stop.checkpoint)
        state = collect(job.trainer, wants_weights=job.wants_weights, callbacks=callbacks)
        if assignment.rank == 0:
            return RankResult(returned, trainer=state)
        return RankResult(returned if job.trainer.predict_loop.return_predictions else None)


def _open(payload: Payload) -> Job:
    try:
        return payload.open()
    except ModuleNotFoundError as error:
        raise ConfigError(
            "a module of the driver cannot be imported on a worker",
            found=error,
            expected="all code on every node",
            mend="start Ray where the code is, or set the strategy's runtime_env: {working_dir: ..., pip: [...]}",
        ) from error


def _take_place(job: Job, assignment: Assignment, client: BoardClient) -> None:
    strategy: Any = job.trainer.strategy
    strategy.take_place(assignment, client)
    if assignment.attempt == 0:
        return
    job.resume_from(assignment.checkpoint)
    continue_logs(job.trainer, assignment.step)


def _restored(assignment: Assignment, client: BoardClient) -> list[GoesOnDrawing]:
    if assignment.checkpoint is None:
        return []
    state = client.generators(assignment.checkpoint, assignment.step)
    return [] if state is None else [GoesOnDrawing(state)]


def _leave_process_group() -> None:
    """A process group that stays would keep this process from joining the next one."""
    if dist.is_available() and dist.is_initialized():
        closing = threading.Thread(target=dist.destroy_process_group, daemon=True)
        closing.start()
        closing.join(timeout=10.0)  # NCCL waits for ranks that may be gone
    elif dist.is_available():
        # torch names groups by counting them, also one that could not be made; a new worker would wait for another name
        dist.distributed_c10d._world.group_count = 0
