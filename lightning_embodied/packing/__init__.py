"""Variable-length samples packed without padding."""

from lightning_embodied.packing.batch import PackedBatch
from lightning_embodied.packing.collator import VarlenPackingCollator
from lightning_embodied.packing.encoder import Sample, SampleEncoder
from lightning_embodied.packing.images import resize_with_pad
from lightning_embodied.packing.pack import EncodedSample, pack_samples

__all__ = [
    "EncodedSample",
    "PackedBatch",
    "Sample",
    "SampleEncoder",
    "VarlenPackingCollator",
    "pack_samples",
    "resize_with_pad",
]
