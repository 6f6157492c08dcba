"""Lightning strategies; they run any LightningModule and use nothing else of this project but its errors.

Names are imported when they are first used: the small processes that watch over a run need parts of this package and
neither torch nor Lightning.
"""

from typing import TYPE_CHECKING

from lightning_embodied.lazy import on_first_use

if TYPE_CHECKING:
    from lightning_embodied.strategies.async_checkpoint import AsyncShardedCheckpoint as AsyncShardedCheckpoint
    from lightning_embodied.strategies.checkpoint_storage import latest_checkpoint as latest_checkpoint
    from lightning_embodied.strategies.consolidation import consolidate as consolidate
    from lightning_embodied.strategies.device_mesh import sharding_mesh as sharding_mesh
    from lightning_embodied.strategies.fsdp2 import FSDP2Strategy as FSDP2Strategy
    from lightning_embodied.strategies.on_ray.failures import RankFailedError as RankFailedError
    from lightning_embodied.strategies.on_ray.launcher import RunStoppedError as RunStoppedError
    from lightning_embodied.strategies.ray_ddp import RayDDPStrategy as RayDDPStrategy
    from lightning_embodied.strategies.ray_fsdp import RayFSDPStrategy as RayFSDPStrategy
    from lightning_embodied.strategies.sharding import ShardedModule as ShardedModule
    from lightning_embodied.strategies.sharding import Sharding as Sharding
    from lightning_embodied.strategies.sharding_checks import check_replicas as check_replicas
    from lightning_embodied.strategies.sharding_checks import check_sharded as check_sharded
    from lightning_embodied.strategies.sharding_weights import load_weights as load_weights
    from lightning_embodied.strategies.sharding_weights import parameters_on_meta as parameters_on_meta

__all__ = [
    "AsyncShardedCheckpoint",
    "FSDP2Strategy",
    "RankFailedError",
    "RayDDPStrategy",
    "RayFSDPStrategy",
    "RunStoppedError",
    "ShardedModule",
    "Sharding",
    "check_replicas",
    "check_sharded",
    "consolidate",
    "latest_checkpoint",
    "load_weights",
    "parameters_on_meta",
    "sharding_mesh",
]

__getattr__ = on_first_use(
    __name__,
    {
        "AsyncShardedCheckpoint": "async_checkpoint",
        "FSDP2Strategy": "fsdp2",
        "RankFailedError": "on_ray.failures",
        "RayDDPStrategy": "ray_ddp",
        "RayFSDPStrategy": "ray_fsdp",
        "RunStoppedError": "on_ray.launcher",
        "ShardedModule": "sharding",
        "Sharding": "sharding",
        "check_replicas": "sharding_checks",
        "check_sharded": "sharding_checks",
        "consolidate": "consolidation",
        "latest_checkpoint": "checkpoint_storage",
        "load_weights": "sharding_weights",
        "parameters_on_meta": "sharding_weights",
        "sharding_mesh": "device_mesh",
    },
)
