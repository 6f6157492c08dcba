"""Variable-length samples packed without padding."""

from lightning_embodied.packing.batch import PackedBatch

__all__ = ["PackedBatch"]
