"""Lightning strategies; they run any LightningModule and use nothing else of this project but its errors."""

from lightning_embodied.strategies.fsdp2 import FSDP2Strategy
from lightning_embodied.strategies.sharding import ShardedModule, Sharding
from lightning_embodied.strategies.sharding_checks import check_replicas, check_sharded
from lightning_embodied.strategies.sharding_mesh import sharding_mesh
from lightning_embodied.strategies.sharding_weights import load_weights, parameters_on_meta

__all__ = [
    "FSDP2Strategy",
    "ShardedModule",
    "Sharding",
    "check_replicas",
    "check_sharded",
    "load_weights",
    "parameters_on_meta",
    "sharding_mesh",
]
