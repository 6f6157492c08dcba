"""Data parallel training on Ray workers: Lightning's DDP strategy, launched by `on_ray` and audited once."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_embodied.strategies.ddp_audit import unused_error, unused_parameters
from lightning_embodied.strategies.ddp_compression import GradientDtype, compressed_all_reduce
from lightning_embodied.strategies.on_ray.strategy import RayStrategyMixin


class RayDDPStrategy(RayStrategyMixin, DDPStrategy):
    """Distributed data parallel training on Ray; `strategy: ray_ddp` with all options at their defaults.

    Trainable parameters that the first loss does not reach end in an error that names them.

    Args:
        gradient_dtype: In which gradients are averaged over the ranks: `bfloat16` or `float16` halve what travels; None
            keeps their own.
        kwargs: Of `RayStrategyMixin`, Lightning's `DDPStrategy` and torch's `DistributedDataParallel`
            (`bucket_cap_mb`, `gradient_as_bucket_view`, `static_graph` and so on).
    """

    def __init__(self, gradient_dtype: GradientDtype | None = None, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(**kwargs)
        self.gradient_dtype = gradient_dtype
        self._audited = bool(kwargs.get("find_unused_parameters") or kwargs.get("static_graph"))

    def configure_ddp(self) -> None:
        """Wraps the module, and lets its gradients travel in `gradient_dtype`."""
        super().configure_ddp()
        if self.gradient_dtype is not None and isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(None, compressed_all_reduce(self.gradient_dtype))

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
