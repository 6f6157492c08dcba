"""What the driver sends to every worker: the Trainer, which of its entry points to run, and the driver's surroundings.

One pickle holds all of it, because the entry point is a method of that very Trainer and the DataModule, callbacks and
model refer to each other. Ray only carries the bytes.
"""

from __future__ import annotations

import copyreg
import inspect
import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
from lightning.pytorch.loggers import WandbLogger

from lightning_embodied.strategies.lightning_compat import GlobalState, without_launcher
from lightning_embodied.strategies.on_ray.output import Terminal

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_FORWARDED = ("PL_", "WANDB_", "HF_", "NCCL_", "GLOO_", "TORCH_", "CUBLAS_", "OMP_", "MKL_", "HYDRA_", "MUJOCO_GL")
_NOT_FORWARDED = ("HF_HOME",)  # a path of the driver's machine
# W&B's background process of the driver. Workers that shared it would outlive themselves there: a run whose worker was
# killed stays "in use" and cannot be continued.
_NOT_SHARED = "WANDB_SERVICE"


@dataclass
class Job:
    """One call of `Trainer.fit`, `validate`, `test` or `predict`.

    Args:
        trainer: The Trainer.
        function: Name of its method to run.
        arguments: The method's arguments by name.
        globals: Random generators and deterministic flags.
        environment: Environment variables to set.
        directory: The driver's working directory, which relative paths of the configuration refer to.
        path: The driver's module search path.
        terminal: The driver's terminal.
        wants_weights: Whether rank 0 sends the trained weights back.
    """

    trainer: Trainer
    function: str
    arguments: dict[str, Any]
    globals: GlobalState
    environment: dict[str, str]
    directory: str
    path: list[str]
    terminal: Terminal
    wants_weights: bool

    def resume_from(self, checkpoint: str | None) -> None:
        """Lets a restarted run go on from a checkpoint instead of what the user asked for.

        Args:
            checkpoint: Its path; None to start as the user asked.
        """
        if checkpoint is not None and "ckpt_path" in self.arguments:
            self.arguments["ckpt_path"] = checkpoint
            self.arguments["weights_only"] = False  # our own file: it holds loops and generators beside tensors

    def run(self, entry: Callable[..., Any]) -> Any:
        """Runs the method.

        Args:
            entry: Called with the Trainer, the method and its arguments.
        """
        return entry(self.trainer, getattr(self.trainer, self.function), **self.arguments)


@dataclass(frozen=True)
class Payload:
    """A pickled `Job` beside what must be in place before it can be unpickled.

    Args:
        path: The driver's module search path.
        directory: The driver's working directory.
        environment: Environment variables to set.
        terminal: The driver's terminal.
        job: The pickled `Job`.
    """

    path: list[str]
    directory: str
    environment: dict[str, str]
    terminal: Terminal
    job: bytes

    def prepare_process(self) -> None:
        """Gives this process the driver's environment variables, working directory and search path."""
        os.environ.update(self.environment)
        os.environ.pop(_NOT_SHARED, None)  # forwarded above, or inherited through a cluster that the driver started
        if os.path.isdir(self.directory):  # not on a node without the driver's file system
            os.chdir(self.directory)
        sys.path.extend(entry for entry in self.path if entry not in sys.path and os.path.exists(entry))

    def open(self) -> Job:
        """Unpickles the job."""
        job: Job = pickle.loads(self.job)  # noqa: S301 - from our own driver
        return job


def pack(
    trainer: Trainer,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    wants_weights: bool,
) -> Payload:
    """Pickles a call of the Trainer.

    Args:
        trainer: The Trainer.
        function: Its bound method.
        args: Positional arguments.
        kwargs: Keyword arguments.
        wants_weights: Whether rank 0 is to send the trained weights back.

    Raises:
        Exception: Whatever pickling a part of the Trainer raises.
    """
    arguments = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    path = [os.path.abspath(entry or os.curdir) for entry in sys.path]
    job = Job(
        trainer,
        function.__name__,
        arguments,
        GlobalState.capture(),
        forwarded_environment(os.environ),
        os.getcwd(),
        path,
        Terminal.of_this_process(),
        wants_weights,
    )
    data = io.BytesIO()
    with without_launcher(trainer.strategy):
        _Pickler(data).dump(job)
    return Payload(path, job.directory, job.environment, job.terminal, data.getvalue())


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what a run computes, logs or how it communicates; a cluster does not inherit them.

    Args:
        environment: Of the driver.
    """
    return {k: v for k, v in environment.items() if k.startswith(_FORWARDED) and k not in _NOT_FORWARDED}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is not typed
    """Pickles W&B loggers by their settings: their own way starts a run on the driver for the workers to join."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, WandbLogger):
            return copyreg.__newobj__, (type(obj),), {**vars(obj), "_experiment": None}  # type: ignore[attr-defined]
        return super().reducer_override(obj)
