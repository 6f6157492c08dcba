"""Variable-length samples packed without padding."""

from lightning_embodied.packing.balance import balance_packs
from lightning_embodied.packing.batch import PackedBatch
from lightning_embodied.packing.collator import VarlenPackingCollator
from lightning_embodied.packing.encoder import Sample, SampleEncoder
from lightning_embodied.packing.images import resize_with_pad
from lightning_embodied.packing.pack import EncodedSample, pack_samples
from lightning_embodied.packing.planners import padding_share, plan_packs
from lightning_embodied.packing.sampler import PackedBatchSampler

__all__ = [
    "EncodedSample",
    "PackedBatch",
    "PackedBatchSampler",
    "Sample",
    "SampleEncoder",
    "VarlenPackingCollator",
    "balance_packs",
    "pack_samples",
    "padding_share",
    "plan_packs",
    "resize_with_pad",
]
