"""The private Lightning names this room uses, all of them here, held by tests/strategies/test_lightning_compat.py.

Lightning documents no way to start processes from a strategy, to hand a Trainer's progress from one process to
another, or to run an entry point with its error handling; these few names are what its own launchers use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot as GlobalState
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.call import _call_and_handle_interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning.pytorch import Trainer

__all__ = [
    "GlobalState",
    "Launcher",
    "load_metrics",
    "load_progress",
    "metrics",
    "pin_wandb_run",
    "progress",
    "run_entry_point",
    "set_launcher",
    "without_launcher",
]

_Result = TypeVar("_Result")
_METRICS = ("_logged_metrics", "_callback_metrics", "_progress_bar_metrics")
_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")


def set_launcher(strategy: Strategy, launcher: Launcher | None) -> None:
    """Sets what starts the processes; `Strategy.launcher` has no setter."""
    strategy._launcher = launcher


@contextmanager
def _detached(strategy: Strategy) -> Iterator[None]:
    launcher = strategy._launcher
    strategy._launcher = None
    try:
        yield
    finally:
        strategy._launcher = launcher


def without_launcher(strategy: Strategy) -> AbstractContextManager[None]:
    """Context in which the strategy has no launcher, so that a Trainer can be pickled."""
    return _detached(strategy)


def run_entry_point(trainer: Trainer, function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:  # noqa: ANN401
    """Runs `Trainer._fit_impl` and its like in this process with Lightning's handling of exceptions."""
    result: _Result = _call_and_handle_interrupt(trainer, function, *args, **kwargs)
    return result


def metrics(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """The three dictionaries behind `logged_metrics`, `callback_metrics` and `progress_bar_metrics`."""
    trainer._logger_connector.logged_metrics  # noqa: B018 - these properties compute what the dictionaries hold
    trainer._logger_connector.callback_metrics  # noqa: B018
    trainer._logger_connector.progress_bar_metrics  # noqa: B018
    return {name: dict(getattr(trainer._logger_connector, name)) for name in _METRICS}


def load_metrics(trainer: Trainer, values: dict[str, dict[str, Any]]) -> None:
    """Puts back what `metrics` gave."""
    for name, value in values.items():
        setattr(trainer._logger_connector, name, value)


def progress(trainer: Trainer) -> dict[str, Any]:
    """Epochs, batches and optimizer steps done, of all loops."""
    return {name: getattr(trainer, name).state_dict() for name in _LOOPS}


def load_progress(trainer: Trainer, state: dict[str, Any]) -> None:
    """Puts back what `progress` gave, without the marks of a run that is being resumed."""
    for name, value in state.items():
        loop = getattr(trainer, name)
        loop.load_state_dict(value)
        for part in _with_children(loop):
            part.on_iteration_done()


def _with_children(loop: _Loop) -> list[_Loop]:
    children = [value for value in vars(loop).values() if isinstance(value, _Loop)]
    return [loop, *(grandchild for child in children for grandchild in _with_children(child))]


def pin_wandb_run(logger: Logger, run_id: str) -> None:
    """Lets every process that opens this logger's run open the same one, instead of attaching to the driver's."""
    if isinstance(logger, WandbLogger):
        logger._wandb_init.setdefault("resume", "allow")
        if not logger._wandb_init.get("id"):
            logger._wandb_init["id"] = run_id
        logger._id = logger._wandb_init["id"]
