"""What a run asks of storage: samples to read, checkpoints to write."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_embodied.planning.sharding import Sharding


@dataclass(frozen=True)
class SampleSize:
    """What one training sample reads.

    Attributes:
        cameras: Pictures of a sample.
        picture_pixels: Pixels of one, as recorded.
        encoded_bytes_per_pixel: Of the videos, on average.
        frames_decoded: Frames from the key frame before a picture to the picture, on average; LeRobot writes a key
            frame every second frame.
        other_bytes: States, actions and the like.
    """

    cameras: int
    picture_pixels: int
    encoded_bytes_per_pixel: float = 0.1
    frames_decoded: float = 1.5
    other_bytes: int = 4096

    @property
    def read_bytes(self) -> float:
        """Bytes read from storage."""
        pictures = self.cameras * self.picture_pixels * self.encoded_bytes_per_pixel * self.frames_decoded
        return pictures + self.other_bytes

    @property
    def reads(self) -> int:
        """Places read from: one in each camera's video, one in the table."""
        return self.cameras + 1


@dataclass(frozen=True)
class LoaderDemand:
    """What the loaders of all ranks need so that no step waits.

    Attributes:
        samples: Samples a second, all ranks.
        read_rate: Bytes a second from storage, all ranks.
        iops: Places read a second, all ranks.
        frames_per_node: Video frames that a node decodes a second.
        pixels_rate_per_node: Bytes of decoded pictures a second in a node.
    """

    samples: float
    read_rate: float
    iops: float
    frames_per_node: float
    pixels_rate_per_node: float

    @classmethod
    def of(cls, sample: SampleSize, samples: float, nodes: int) -> LoaderDemand:
        """The demand of `samples` a second over `nodes`."""
        frames = samples / nodes * sample.cameras * sample.frames_decoded
        return cls(
            samples=samples,
            read_rate=samples * sample.read_bytes,
            iops=samples * sample.reads,
            frames_per_node=frames,
            pixels_rate_per_node=frames * sample.picture_pixels * 3,
        )


@dataclass(frozen=True)
class Storage:
    """Where checkpoints go.

    Attributes:
        node_rate: Bytes/s that one node writes.
        total_rate: Bytes/s that the storage takes from all nodes together.
        host_rate: Bytes/s from a GPU to its host, which is how long an asynchronous checkpoint stops training.
    """

    node_rate: float
    total_rate: float
    host_rate: float = 25e9


@dataclass(frozen=True)
class CheckpointCost:
    """One checkpoint.

    Attributes:
        size: Bytes in all.
        write_seconds: Time to write it, which is how long a synchronous one stops training.
        stall_seconds: How long an asynchronous one stops training: the copy to the host.
        load_seconds: Time to read it when a run starts again.
    """

    size: int
    write_seconds: float
    stall_seconds: float
    load_seconds: float

    @classmethod
    def of(cls, size: int, sharding: Sharding, storage: Storage, gpus_per_node: int) -> CheckpointCost:
        """The cost of a checkpoint of `size` bytes.

        One rank writes it all under DDP; shards are written by the nodes that hold one copy of them, at once.
        """
        nodes = math.ceil(sharding.ranks / gpus_per_node)
        writers = 1 if sharding.strategy == "ddp" else max(1, math.ceil(sharding.shard_size / gpus_per_node))
        rate = min(storage.node_rate * min(writers, nodes), storage.total_rate)
        copies = nodes if sharding.strategy == "ddp" else nodes / writers
        reading = min(storage.total_rate / copies, storage.node_rate * writers)
        return cls(
            size=size,
            write_seconds=size / rate,
            stall_seconds=size / sharding.shard_size / storage.host_rate,
            load_seconds=size / reading,
        )
