"""`FSDP2Strategy`: fully sharded (FSDP2) and hybrid (HSDP) training of any LightningModule, by YAML alone.

Lightning's own `ModelParallelStrategy` leaves the sharding to the module, and trains on in silence when the optimizer
was built too early or parameters were left out. Here the options of `Sharding` do it, and those cases are repaired or
refused. Beside Lightning's documented hooks it uses `Strategy._setup_model`, held by a contract test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_embodied.errors import ConfigError
from lightning_embodied.strategies.sharding import Dtype, ShardedModule, Sharding
from lightning_embodied.strategies.sharding_mesh import sharding_mesh
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

    def setup_environment(self) -> None:
        """Joins the ranks; Lightning's mesh has them all in its data-parallel dimension, for samplers to read."""
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


def _runs_forward(model: nn.Module, step: str) -> bool:
    """Whether the module has such a step, in which no backward pass runs (manual optimization runs it inside)."""
    manual = step == "training_step" and isinstance(model, LightningModule) and not model.automatic_optimization
    return not manual and getattr(type(model), step, None) is not getattr(LightningModule, step)
