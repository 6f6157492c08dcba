"""The device mesh of fully sharded (FSDP) and hybrid (HSDP) training: replicas of a model whose shards ranks share.

Sharding over all ranks saves most memory; sharding within a node and replicating across nodes keeps the all-gathers on
the fast network (hybrid sharding, arXiv:2304.11277, section 3.2.2).
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_embodied.errors import ConfigError

REPLICATE, SHARD = "replicate", "shard"


def check_replicas_fit(world_size: int, replicate: int) -> None:
    """Refuses numbers of ranks that cannot be divided into the replicas.

    Args:
        world_size: Number of ranks.
        replicate: Copies of the sharded model.

    Raises:
        ConfigError: They cannot.
    """
    if replicate < 1 or world_size % replicate:
        raise ConfigError(
            "the ranks cannot be divided into so many replicas",
            where="replicate",
            found=replicate,
            expected=f"a divisor of the number of ranks, {world_size}",
            mend="set it to 1, or to the number of nodes",
        )


def sharding_mesh(device_type: str, world_size: int, replicate: int = 1) -> DeviceMesh:
    """Makes the mesh; all ranks call it.

    Args:
        device_type: `cuda` or `cpu`.
        world_size: Number of ranks.
        replicate: Copies of the sharded model. 1 shards over all ranks; the number of nodes shards within a node.

    Returns:
        A mesh with the dimension `shard`, or with `replicate` and `shard` of which neighbouring ranks share a replica.

    Raises:
        ConfigError: The ranks cannot be divided so.
    """
    check_replicas_fit(world_size, replicate)
    if replicate == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=(SHARD,))
    shape = (replicate, world_size // replicate)
    return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD))
