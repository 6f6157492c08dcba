"""Fully sharded training on Ray workers: `FSDP2Strategy`, launched by `on_ray`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_embodied.strategies.device_mesh import check_replicas_fit
from lightning_embodied.strategies.fsdp2 import FSDP2Strategy
from lightning_embodied.strategies.on_ray.strategy import RayStrategyMixin


class RayFSDPStrategy(RayStrategyMixin, FSDP2Strategy):
    """Fully sharded (FSDP2) and hybrid (HSDP) training on Ray; `strategy: ray_fsdp` with all options at their defaults.

    Args:
        kwargs: Of `RayStrategyMixin` and `FSDP2Strategy` (`units`, `replicate`, `activation_checkpointing`, `weights`
            and so on).
    """

    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(**kwargs)

    def _configure_launcher(self) -> None:
        """Called when the Trainer is built.

        Raises:
            ConfigError: There may be a number of ranks that cannot be divided into the replicas.
        """
        least, most = self._worker_range()
        for ranks in range(least, most + 1):
            check_replicas_fit(ranks, self.replicate)
        super()._configure_launcher()


StrategyRegistry.register("ray_fsdp", RayFSDPStrategy, description="FSDP2 and HSDP on Ray workers")
