"""`FP8Precision`: Lightning's way to train in FP8, with Trainer and Fabric, under any strategy that takes plugins.

Only linear layers change; everything else computes in `high_precision`. Inputs, targets, flow times, buffers and the
dtype of the weights are not touched, checkpoints are those of the unconverted model, and after `fit` the model has its
own classes again. Private Lightning API: `LightningModule._trainer`, to tell Trainer from Fabric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import count
from typing import Any, Literal

import torch
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_embodied.errors import ConfigError
from lightning_embodied.precision.conversion import convert, kind_of, linear_layers, restore
from lightning_embodied.precision.linear import DelayedAmax, FP8Linear, FP8State
from lightning_embodied.precision.products import products
from lightning_embodied.precision.recipes import (
    RECIPES,
    Backend,
    RecipeName,
    alignment,
    check_combination,
    check_device,
)
from lightning_embodied.precision.scaling import DelayedScaling
from lightning_embodied.precision.selection import KEPT_IN_TRAINING, LayerVerdict, Selection
from lightning_embodied.precision.summary import summary
from lightning_embodied.precision.transformer_engine import EngineLinear, engine_context


class FP8Precision(Precision):
    """Multiplies a model's linear layers in FP8, forward and backward.

    Use it as `trainer.plugins` or `Fabric(plugins=…)`, without `precision`. Layers are converted when training is set
    up. To convert before `fully_shard`, call `convert_module` in `configure_model`; after it works as well.

    Args:
        recipe: How tensors are scaled: `rowwise` (one scale a row, all E4M3), `rowwise_with_gw_hp` (the same, weight
            gradients in high precision), `tensorwise` (one scale a tensor, gradients E5M2), `delayed` (the same, scales
            from earlier steps), `blockwise` (1 x 128 and 128 x 128), `mxfp8` (1 x 32, Blackwell).
        backend: `torchao` (all but the last two), `transformer_engine` (all but the rowwise ones; needs its CUDA
            build), or `emulated`: the same numbers by casting to FP8 and back, slowly, on any device.
        include: Patterns of the full names of the layers to convert: `*.q_proj`, `model.expert.*`. Default: all.
        exclude: Patterns of layers that stay in high precision; stronger than `include`.
        safe_defaults: Also leave layers alone that read actions, states or flow time, write actions or tokens,
            modulate norms or embed, that attention's values go through, and an action expert's first block.
        high_precision: What everything else computes in: `bf16-mixed` (autocast), `32-true`, or `auto`, which is the
            first on a GPU and the second on a CPU.
        amax_history_len: Steps that `delayed` remembers.

    Attributes:
        report: The verdict on each linear layer by name, once the model is converted.

    Raises:
        ConfigError: The backend has no such recipe. Before training starts also: the device cannot run it, a pattern
            matches nothing, or no layer is left to convert.
        MissingExtraError: The backend is not installed; raised before training starts.
    """

    def __init__(
        self,
        recipe: RecipeName = "rowwise",
        backend: Backend = "torchao",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        safe_defaults: bool = True,
        high_precision: Literal["auto", "bf16-mixed", "32-true"] = "auto",
        amax_history_len: int = 16,
    ) -> None:
        check_combination(recipe, backend)
        if amax_history_len < 1:
            raise ConfigError(
                "delayed scaling has to remember something",
                where="FP8Precision.amax_history_len",
                found=amax_history_len,
                expected="1 or more",
            )
        self.recipe, self.backend = recipe, backend
        self.high_precision, self.amax_history_len = high_precision, amax_history_len
        self.precision = "32-true" if high_precision == "auto" else high_precision
        self.selection = Selection(
            tuple(include) if include is not None else ("*",),
            tuple(exclude),
            safe_defaults,
            alignment(recipe, backend),
            KEPT_IN_TRAINING,
        )
        self.report: dict[str, LayerVerdict] = {}
        self._linear: dict[str, nn.Linear] = {}
        self._device: torch.device | None = None
        self._scaling = DelayedScaling(amax_history_len)
        self._engine_states: dict[str, Any] = {}

    # Conversion.

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts the linear layers of a module in place; doing it again changes nothing.

        Layers converted under another name or by another plugin are decided anew.

        Args:
            module: The model, or with Fabric each of several.

        Returns:
            The module itself.

        Raises:
            ConfigError: A pattern matches nothing, or no layer is left to convert.
            MissingExtraError: The backend is not installed.
        """
        layers = linear_layers(module)
        self.selection.check_patterns(name for names, _ in layers.values() for name in names)
        verdicts = {
            name: self.selection.verdict(names, layer, kind_of(layer)) for name, (names, layer) in layers.items()
        }
        if not any(verdict.fp8 for verdict in verdicts.values()):
            raise ConfigError(
                "no layer is left to compute in FP8",
                where=f"FP8Precision for {type(module).__name__}",
                found="; ".join(sorted({verdict.reason for verdict in verdicts.values()})) or "no linear layers",
                mend="change include, exclude or safe_defaults, or train without FP8Precision",
            )
        self._forget(layer for _, layer in layers.values())
        for name, verdict in verdicts.items():
            layer = layers[name][1]
            if verdict.fp8:
                self._convert(layer)
            elif isinstance(layer, FP8Linear):
                restore(layer)
            unique = self._unique(name)
            self._linear[unique], self.report[unique] = layer, verdict
        scaled = {name: layer.fp8.amax for name, layer in self._converted.items()}
        self._scaling.watch({name: amax for name, amax in scaled.items() if amax is not None})
        self._load_engines()
        self._device = None
        return module

    @property
    def _converted(self) -> dict[str, FP8Linear]:
        return {name: layer for name, layer in self._linear.items() if isinstance(layer, FP8Linear)}

    def _convert(self, layer: nn.Linear) -> None:
        state = FP8State(self.recipe, self.backend)
        if self.backend == "transformer_engine":
            state.engine = EngineLinear(layer)
        else:
            products(self.recipe, self.backend)  # imports the backend now, not inside a compiled step
            if RECIPES[self.recipe].delayed:
                state.amax = DelayedAmax.cold(torch.device("cpu"))
        convert(layer, state)

    def _forget(self, layers: Iterable[nn.Linear]) -> None:
        """Drops what is known of layers that are about to be decided on; of all layers once they were torn down."""
        again = {id(layer) for layer in layers}
        if not self._linear:
            self.report.clear()
        for name in [name for name, layer in self._linear.items() if id(layer) in again]:
            del self._linear[name], self.report[name]

    def _unique(self, name: str) -> str:
        """The name itself, or a numbered one if another of Fabric's modules has a layer of that name."""
        names = (f"{name}#{number}" for number in count(2))
        return name if name not in self._linear else next(other for other in names if other not in self._linear)

    # Lightning's hooks.

    def connect(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], list[Any]]:
        """Checks the device before training starts, and shows what was converted beside Lightning's model summary."""
        self._prepare()
        rank_zero_info(summary(self.report, self.recipe, self.backend))
        return model, optimizers, lr_schedulers

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context of a step: autocast for what is not in FP8."""
        self._prepare()
        stack = ExitStack()
        if self.precision == "bf16-mixed" and self._device is not None:
            stack.enter_context(torch.autocast(self._device.type, dtype=torch.bfloat16))
        if self.backend == "transformer_engine":
            stack.enter_context(engine_context(self.recipe, self.amax_history_len))
        return stack

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:  # noqa: ANN401
        """Calls the Trainer's hooks, if there is one."""
        return super().pre_backward(tensor, module) if _has_trainer(module) else None

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Lets the LightningModule go backward, or the tensor under Fabric."""
        if _has_trainer(model):
            super().backward(tensor, model, *args, **kwargs)
        else:
            FabricPrecision.backward(self, tensor, model, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:  # noqa: ANN401
        """Calls the Trainer's hooks, if there is one."""
        return super().post_backward(tensor, module) if _has_trainer(module) else None

    def optimizer_step(
        self,
        optimizer: Any,  # noqa: ANN401
        model: Any = None,  # noqa: ANN401
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Steps, then lets the step's largest values count for the scales to come."""
        if closure is not None and _has_trainer(model):
            result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        else:
            with_closure = {"closure": closure} if closure is not None else {}
            result = FabricPrecision.optimizer_step(self, optimizer, **with_closure, **kwargs)
        self._scaling.update()
        return result

    def teardown(self) -> None:
        """Gives the layers their own class back; what delayed scaling has learned is kept."""
        self._engine_states.update(self._engine_state())
        for layer in self._converted.values():
            restore(layer)
        self._linear.clear()

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Scaling state of `delayed`; empty for the other recipes, which have none."""
        if not RECIPES[self.recipe].delayed:
            return {}
        if self.backend == "transformer_engine":
            return {"engine": self._engine_states | self._engine_state()}
        return self._scaling.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over scaling state; that of another recipe or backend is left aside, and scales are found again.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            CheckpointError: It cannot be read.
        """
        if not RECIPES[self.recipe].delayed:
            return
        if self.backend == "transformer_engine":
            self._engine_states = dict(state_dict.get("engine", {}))
            self._load_engines()
        elif "amax_history" in state_dict or "version" in state_dict:
            self._scaling.load_state_dict(state_dict)

    def _engine_state(self) -> dict[str, Any]:
        engines = {name: layer.fp8.engine for name, layer in self._converted.items()}
        return {name: engine.state() for name, engine in engines.items() if engine is not None}

    def _load_engines(self) -> None:
        for name, layer in self._converted.items():
            if layer.fp8.engine is not None and name in self._engine_states:
                layer.fp8.engine.load_state(self._engine_states.pop(name))

    def _prepare(self) -> None:
        """Finds out once where the model computes."""
        layer = next(iter(self._converted.values()), None)
        if layer is None or layer.weight.device == self._device:
            return
        self._device = layer.weight.device
        check_device(self.recipe, self.backend, self._device)
        if self.high_precision == "auto":
            self.precision = "32-true" if self._device.type == "cpu" else "bf16-mixed"
        self._scaling.to(self._device)


def _has_trainer(module: object) -> bool:
    return isinstance(module, LightningModule) and module._trainer is not None
