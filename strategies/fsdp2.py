"""`FSDP2Strategy`: fully sharded (FSDP2) and hybrid (HSDP) training of any LightningModule, by YAML alone.

Lightning's own `ModelParallelStrategy` leaves the sharding to the module, and trains on in silence when the optimizer
was built too early or parameters were left out. Here the options of `Sharding` do it, and those cases are repaired or
refused. Beside Lightning's documented hooks it uses `Strategy._setup_model`, held by a contract test.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.strategies.async_checkpoint import AsyncShardedCheckpoint
from lightning_embodied.strategies.checkpoint_storage import is_sharded_checkpoint
from lightning_embodied.strategies.device_mesh import sharding_mesh
from lightning_embodied.strategies.sharded_state import restore_sharded
from lightning_embodied.strategies.sharding import Dtype, ShardedModule, Sharding
from lightning_embodied.strategies.sharding_checks import check_replicas
from lightning_embodied.strategies.sharding_weights import load_weights, parameters_on_meta

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FSDP2Strategy(ModelParallelStrategy):
    """Shards parameters, gradients and optimizer state over the ranks; started like Lightning's own strategies.

    Args:
        units: What one all-gather brings together: class names of layers (`GemmaLayer`), or patterns of module names
            (`*.embed_tokens`). Default: the repeated layers of every `ModuleList` and `Sequential`.
        joint_units: Units whose own `forward` is never called, because another module calls their parts.
        replicate: Copies of the sharded model (HSDP): 1 shards over all ranks, the number of nodes within each node.
        activation_checkpointing: Layers, named as `units`, whose activations are computed again in the backward pass.
        param_dtype: Dtype in which parameters are gathered and used. `auto`: bfloat16 with `precision: bf16-mixed`,
            else their own.
        reduce_dtype: Dtype in which gradients are reduced.
        forward_methods: Methods of the module, besides `forward` and the steps, that use its parameters.
        weights: A safetensors file or checkpoint directory to start from. `configure_model` then builds parameters
            without memory, and each rank reads only the rows it holds.
        weights_prefix: What the module's parameter names have in front of those in `weights` (`model.`).
        kwargs: Options of `ModelParallelStrategy`: `save_distributed_checkpoint`, `process_group_backend`, `timeout`.
    """

    def __init__(
        self,
        units: Sequence[str] | None = None,
        joint_units: Sequence[str] = (),
        replicate: int = 1,
        activation_checkpointing: Sequence[str] = (),
        param_dtype: Dtype | Literal["auto"] | None = "auto",
        reduce_dtype: Dtype | None = "float32",
        forward_methods: Sequence[str] = (),
        weights: str | None = None,
        weights_prefix: str = "",
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(data_parallel_size="auto", tensor_parallel_size=1, **kwargs)
        self.units, self.joint_units = units, tuple(joint_units)
        self.replicate = replicate
        self.activation_checkpointing = tuple(activation_checkpointing)
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self.forward_methods = tuple(forward_methods)
        self.weights, self.weights_prefix = weights, weights_prefix
        self.sharded: ShardedModule | None = None
        self._failing = False

    def setup_environment(self) -> None:
        """Joins the ranks; Lightning's mesh has them all in its data-parallel dimension, for samplers to read.

        Raises:
            ConfigError: The Trainer has a checkpoint plugin that could not write sharded checkpoints.
        """
        if self._save_distributed_checkpoint and not isinstance(self.checkpoint_io, AsyncShardedCheckpoint):
            raise ConfigError(
                "this checkpoint plugin cannot write sharded checkpoints",
                where="trainer.plugins",
                found=type(self.checkpoint_io).__name__,
                expected="AsyncShardedCheckpoint, which is the default",
                mend="leave it out, or set `save_distributed_checkpoint: false`",
            )
        self._data_parallel_size = self.world_size
        super().setup_environment()

    def sharding_mesh(self) -> DeviceMesh:
        """The mesh to shard over."""
        return sharding_mesh(self.root_device.type, self.world_size, self.replicate)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """In which `configure_model` builds: parameters without memory if their weights are read later."""
        with super().tensor_init_context(empty_init):
            if self.weights is None:
                yield
            else:
                with parameters_on_meta():
                    yield

    def setup(self, trainer: Trainer) -> None:
        """Shards the module, then builds the optimizers; `configure_model` is not needed for it."""
        super(ModelParallelStrategy, self).setup(trainer)

    def model_to_device(self) -> None:
        """Does nothing: sharding moves the module, unit by unit, so that it never has to fit whole."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self.sharded is None or self.sharded.module is not model:
            self.sharded = self.sharding(model).apply(model, self.sharding_mesh())
            if self.weights is not None:
                load_weights(model, self.weights, self.root_device, self.weights_prefix)
        return model

    def sharding(self, model: nn.Module) -> Sharding:
        """The options as they apply to a module under this Trainer's precision.

        Raises:
            ConfigError: Parameters are to be used in another dtype than their inputs have.
        """
        mixed = isinstance(self.precision_plugin, MixedPrecision)
        param_dtype = self.param_dtype
        if param_dtype == "auto":
            param_dtype = "bfloat16" if mixed else None
        elif param_dtype is not None and not mixed:
            raise ConfigError(
                "parameters would have another dtype than their inputs",
                where="param_dtype",
                found=f"{param_dtype} with precision: {self.precision_plugin.precision}",
                expected="precision: bf16-mixed",
                mend="set `trainer.precision: bf16-mixed`, or `param_dtype: null`",
            )
        steps = [name for name in _STEPS if _runs_forward(model, name)]
        return Sharding(
            units=self.units,
            joint_units=self.joint_units,
            activation_checkpointing=self.activation_checkpointing,
            param_dtype=param_dtype,
            reduce_dtype=self.reduce_dtype,
            forward_methods=[*steps, *self.forward_methods],
        )

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Builds the optimizers; those that were built before sharding, as LightningCLI's are, are bound anew."""
        super().setup_optimizers(trainer)
        assert self.sharded is not None  # noqa: S101
        self.sharded.rebind(self.optimizers)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While gradients accumulate, replicas need not agree; within one, gradients stay reduced and sharded."""
        assert self.sharded is not None  # noqa: S101
        self.sharded.defer_all_reduce(True)
        try:
            yield
        finally:
            self.sharded.defer_all_reduce(False)

    # Checkpoints.

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The checkpoint plugin; `AsyncShardedCheckpoint` unless the Trainer has one or nothing is saved by shards."""
        if self._checkpoint_io is None and self._save_distributed_checkpoint:
            self._checkpoint_io = AsyncShardedCheckpoint()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state, in the shards as they are if checkpoints are saved by shards."""
        if not self._save_distributed_checkpoint:
            return super().lightning_module_state_dict()
        assert self.model is not None  # noqa: S101
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, by position and in shards if checkpoints are saved by shards."""
        if not self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        return getattr(optimizer, "optimizer", optimizer).state_dict()

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | PathLike[str],
        storage_options: Any | None = None,  # noqa: ANN401
    ) -> None:
        """Begins a save, which is complete when training ends at the latest; outside training, when this returns.

        Raises:
            ConfigError: Replicas have drifted apart; there is nothing right to save.
            CheckpointError: This save cannot begin, or the one before it failed.
        """
        io = self.checkpoint_io
        if not isinstance(io, AsyncShardedCheckpoint):
            super().save_checkpoint(checkpoint, Path(filepath), storage_options)
            return
        assert self.sharded is not None and self.lightning_module is not None  # noqa: PT018, S101
        if self.replicate > 1:
            check_replicas(self.sharded.module, self.sharded.mesh)
        io.save_checkpoint(checkpoint, self.broadcast(fspath(filepath)), storage_options)
        if self.lightning_module.trainer.state.status != TrainerStatus.RUNNING:
            io.wait()

    def load_checkpoint(self, checkpoint_path: str | PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
        """Restores from a checkpoint of any number of ranks, or from a directory of them; reads Lightning's as well.

        Raises:
            CheckpointError: It is not complete, damaged, or of another model or other optimizers.
        """
        path = self.broadcast(fspath(checkpoint_path))
        if isinstance(self.checkpoint_io, AsyncShardedCheckpoint):
            self.checkpoint_io.wait()
        if _is_lightnings(path) and not is_sharded_checkpoint(path):
            return super().load_checkpoint(path, weights_only)
        assert self.model is not None and self.lightning_module is not None  # noqa: PT018, S101
        return restore_sharded(path, self.model, self.optimizers, strict=self.lightning_module.strict_loading)

    def on_exception(self, exception: BaseException) -> None:
        """What training failed with is not to be hidden by what follows from it."""
        self._failing = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Waits for the last checkpoint."""
        try:
            self.checkpoint_io.teardown()
        except CheckpointError as error:
            if not self._failing:
                raise
            warnings.warn(str(error), stacklevel=2)
        super().teardown()


def _runs_forward(model: nn.Module, step: str) -> bool:
    """Whether the module has such a step, in which no backward pass runs (manual optimization runs it inside)."""
    manual = step == "training_step" and isinstance(model, LightningModule) and not model.automatic_optimization
    return not manual and getattr(type(model), step, None) is not getattr(LightningModule, step)


def _is_lightnings(path: str) -> bool:
    """Whether Lightning wrote it: one file, or a directory with the file that its own sharded checkpoints have."""
    return Path(path).is_file() or Path(path, "meta.pt").is_file()
