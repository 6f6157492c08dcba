"""Data parallel training on Ray workers: Lightning's DDP strategy, launched by `on_ray` and audited once."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_embodied.errors import ConfigError
from lightning_embodied.strategies.ddp_audit import unused_error, unused_parameters
from lightning_embodied.strategies.ddp_compression import GradientDtype, compressed_all_reduce
from lightning_embodied.strategies.local_sgd import LocalSGD, Meetings
from lightning_embodied.strategies.on_ray.strategy import RayStrategyMixin
from lightning_embodied.strategies.power_sgd import PowerSGD

_MEETINGS = "local_sgd"


class RayDDPStrategy(RayStrategyMixin, DDPStrategy):
    """Distributed data parallel training on Ray; `strategy: ray_ddp` with all options at their defaults.

    Trainable parameters that the first loss does not reach end in an error that names them.

    Args:
        gradient_dtype: In which gradients are averaged over the ranks: `bfloat16` or `float16` halve what travels; None
            keeps their own.
        power_sgd: Gradients travel as low-rank matrices; `{rank: 4}`.
        local_sgd: Ranks train by themselves and meet every so many steps; `{every: 50}`.
        kwargs: Of `RayStrategyMixin`, Lightning's `DDPStrategy` and torch's `DistributedDataParallel`
            (`bucket_cap_mb`, `gradient_as_bucket_view`, `static_graph` and so on).
    """

    def __init__(
        self,
        gradient_dtype: GradientDtype | None = None,
        power_sgd: PowerSGD | None = None,
        local_sgd: LocalSGD | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**kwargs)
        self.gradient_dtype, self.power_sgd, self.local_sgd = gradient_dtype, power_sgd, local_sgd
        given = {"gradient_dtype": gradient_dtype, "power_sgd": power_sgd, "local_sgd": local_sgd}
        chosen = [name for name, value in given.items() if value is not None]
        if len(chosen) > 1:
            raise ConfigError(
                "gradients can travel in one way only", where=", ".join(chosen), found="all set", expected="one of them"
            )
        self._audited = bool(kwargs.get("find_unused_parameters") or kwargs.get("static_graph"))
        self._meetings: Meetings | None = None
        self._meetings_before: dict[str, Any] | None = None

    def configure_ddp(self) -> None:
        """Wraps the module, and chooses how its gradients travel."""
        super().configure_ddp()
        if not isinstance(self.model, DistributedDataParallel):
            return
        if self.gradient_dtype is not None:
            self.model.register_comm_hook(None, compressed_all_reduce(self.gradient_dtype))
        elif self.power_sgd is not None:
            self.power_sgd.register(self.model)
        elif self.local_sgd is not None:
            self._meetings = Meetings(self.local_sgd, self.model)
            if self._meetings_before is not None:
                self._meetings.load_state_dict(self._meetings_before)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Builds the optimizers.

        Raises:
            ConfigError: `local_sgd` with more than one, of which it cannot tell when a step is done.
        """
        super().setup_optimizers(trainer)
        if self.local_sgd is not None and len(self.optimizers) != 1:
            raise ConfigError(
                "local_sgd counts the steps of one optimizer", where="local_sgd", found=len(self.optimizers), expected=1
            )

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:  # noqa: ANN401
        """Takes an optimizer step; with `local_sgd`, ranks may meet after it."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._meetings is not None:
            self._meetings.after_step()
        return result

    def on_train_end(self) -> None:
        """Ranks that trained by themselves meet a last time."""
        super().on_train_end()
        if self._meetings is not None:
            self._meetings.meet()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state; ranks that train by themselves meet before it is taken."""
        if self._meetings is not None:
            self._meetings.meet()
        return super().lightning_module_state_dict()

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | PathLike[str],
        storage_options: Any = None,  # noqa: ANN401
    ) -> None:
        """Saves; with `local_sgd` also the outer optimizer's state."""
        if self._meetings is not None:
            checkpoint = {**checkpoint, _MEETINGS: self._meetings.state_dict()}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads, before the module is wrapped; with `local_sgd` also the outer optimizer's state."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._meetings_before = checkpoint.get(_MEETINGS)
        return checkpoint

    def post_backward(self, closure_loss: Tensor) -> None:
        """Called after each backward pass.

        Args:
            closure_loss: What it started from.

        Raises:
            UnusedParametersError: After the first one, for trainable parameters without a gradient.
        """
        super().post_backward(closure_loss)
        if self._audited or not isinstance(self.model, DistributedDataParallel):
            return
        assert self.lightning_module is not None  # noqa: S101
        if self.lightning_module.automatic_optimization and self.model.require_backward_grad_sync:
            self._audited = True
            if names := unused_parameters(self.model.module):
                raise unused_error(names)


StrategyRegistry.register("ray_ddp", RayDDPStrategy, description="DDP on Ray workers")
