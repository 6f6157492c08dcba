"""Starts a Trainer's entry point on Ray workers from inside `trainer.fit`, and brings the results back.

Lightning calls `launch` where its own launchers start processes, so scripts, notebooks and LightningCLI need no other
change than the strategy.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule

from lightning_embodied.strategies.lightning_compat import Launcher
from lightning_embodied.strategies.on_ray.attendant import Attendant
from lightning_embodied.strategies.on_ray.board import BoardConfig, RunBoard
from lightning_embodied.strategies.on_ray.cluster import connect
from lightning_embodied.strategies.on_ray.failures import to_raise
from lightning_embodied.strategies.on_ray.loggers import fix_versions
from lightning_embodied.strategies.on_ray.payload import pack
from lightning_embodied.strategies.on_ray.results import RankResult, merge_predictions, restore

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_embodied.strategies.on_ray.options import RayOptions
    from lightning_embodied.strategies.on_ray.strategy import RayStrategyMixin

log = logging.getLogger(__name__)

EXIT_STOPPED = 75  # EX_TEMPFAIL: not done, try again


class RunStoppedError(SystemExit):
    """The run was asked to stop and did; the process ends with exit code 75 unless this is caught.

    Args:
        reason: Who asked.
        checkpoint: What it can be resumed from; None when there was no time to save.
    """

    def __init__(self, reason: str, checkpoint: str | None) -> None:
        super().__init__(EXIT_STOPPED)
        self.reason = reason
        self.checkpoint = checkpoint


class RayLauncher(Launcher):
    """Launcher of the Ray strategies.

    Args:
        strategy: The strategy it belongs to.
        options: Of that strategy.
    """

    def __init__(self, strategy: RayStrategyMixin, options: RayOptions) -> None:
        self._strategy = strategy
        self._options = options

    @property
    def is_interactive_compatible(self) -> bool:
        """True: classes of a notebook travel by value."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Runs a bound method of the Trainer on all workers.

        Args:
            function: The method.
            args: Its positional arguments.
            trainer: The Trainer.
            kwargs: Its keyword arguments.

        Returns:
            What rank 0 returned; predictions of all ranks.

        Raises:
            RankFailedError: A rank failed and was not restarted.
            EmbodiedError: A rank raised it.
            RunStoppedError: The run was asked to stop.
        """
        if trainer is None:
            raise TypeError("only the entry points of a Trainer can be launched")
        self._strategy.abandon()  # until the workers are done, the driver has nothing to save
        fix_versions(trainer)
        payload = pack(trainer, function, args, kwargs, wants_weights=self._options.bring_back_weights)
        cpus = self._options.resources.get("CPU", 0) * self._options.worker_range[1]
        ray = connect(self._options.address, self._options.runtime_env, cpus)
        results = self._run(ray, ray.put(payload))
        self._strategy.reopen()
        given = (*args, *kwargs.values())
        datamodule = next((value for value in given if isinstance(value, LightningDataModule)), None)
        restore(trainer, results[0].trainer, datamodule)
        if function.__name__ == "_predict_impl":
            return merge_predictions([result.returned for result in results])
        return results[0].returned

    def kill(self, signum: int) -> None:
        """Does nothing: signals reach the workers through the board, so that they save first."""

    def _run(self, ray: Any, payload: Any) -> list[RankResult]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        config = BoardConfig(self._options.max_restarts, self._options.hang_timeout, [payload])
        board = ray.remote(num_cpus=0)(RunBoard).options(scheduling_strategy=here).remote(config)
        with Attendant(ray, board, self._options.stop_grace) as attendant, attendant.signals():
            try:
                self._orchestrate(board)
            except BaseException:  # interrupted: the workers would go on, which in a notebook nothing else ends
                with contextlib.suppress(Exception):  # Ray may be what failed
                    attendant.kill_all("interrupted")
                raise
        return self._outcome(ray, board)

    def _orchestrate(self, board: Any) -> None:
        from lightning_embodied.strategies.on_ray.warm import close_warm_workers, warm_workers

        if self._options.restart == "cold":
            close_warm_workers()
            from lightning_embodied.strategies.on_ray import train

            train.run(board, self._options)
        else:
            warm_workers(self._options).run(board)

    def _outcome(self, ray: Any, board: Any) -> list[RankResult]:
        failures = ray.get(board.failures.remote())
        reason = ray.get(board.stop_reason.remote())
        if failures and reason is None:
            raise to_raise(failures, ray.get(board.restarts.remote()))
        sent: dict[int, bytes] = ray.get(board.results.remote())
        results = [RankResult.from_bytes(sent[rank]) for rank in sorted(sent)]
        stopped = results[0].stopped if results else None
        if reason is not None and (stopped is not None or not results):
            why = f": {failures[0].place}: {failures[0].summary.splitlines()[0]}" if failures else ""
            log.warning("stopped (%s); %s", reason, f"resume from {stopped}" if stopped else f"nothing saved{why}")
            raise RunStoppedError(reason, stopped)
        return results
