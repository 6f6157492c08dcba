"""Variable-length samples packed without padding."""

from lightning_embodied.packing.balance import balance_packs
from lightning_embodied.packing.batch import PackedBatch
from lightning_embodied.packing.collator import VarlenPackingCollator
from lightning_embodied.packing.encoder import SampleEncoder
from lightning_embodied.packing.images import resize_with_pad
from lightning_embodied.packing.pack import EncodedSample, pack_samples
from lightning_embodied.packing.planners import check_budget, pack_stream, padding_share, plan_packs
from lightning_embodied.packing.sample import Sample
from lightning_embodied.packing.steps import PackingOptions, StepPlan

__all__ = [
    "EncodedSample",
    "PackedBatch",
    "PackingOptions",
    "Sample",
    "SampleEncoder",
    "StepPlan",
    "VarlenPackingCollator",
    "balance_packs",
    "check_budget",
    "pack_samples",
    "pack_stream",
    "padding_share",
    "plan_packs",
    "resize_with_pad",
]
