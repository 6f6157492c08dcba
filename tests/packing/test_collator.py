"""VarlenPackingCollator: layout, budget, mixed shapes, use by a DataLoader."""

from __future__ import annotations

import pytest
import torch
from packing_samples import make_sample
from torch.utils.data import DataLoader

from lightning_embodied.errors import ConfigError, DatasetError
from lightning_embodied.packing import PackedBatch, SampleEncoder, VarlenPackingCollator

ENCODER = SampleEncoder()
SAMPLES = [
    make_sample(("front", "wrist"), "open the drawer", seed=1),
    make_sample((), "go", seed=2, dataset=4),
    make_sample(("wrist",), "push the red block onto the blue pad", seed=3),
]


def test_layout():
    batch = VarlenPackingCollator(ENCODER)(SAMPLES)
    lengths = [ENCODER.length(sample) for sample in SAMPLES]
    assert batch.batch_size == 3
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.diff().tolist() == lengths
    assert batch.cu_seqlens[-1] == batch.num_tokens == sum(lengths)
    assert (batch.max_seqlen, type(batch.max_seqlen)) == (max(lengths), int)
    assert batch.position_ids.tolist() == [i for length in lengths for i in range(length)]
    assert int((batch.input_ids == ENCODER.image_token_id).sum()) == 3 * ENCODER.tokens_per_image
    assert batch.pixel_values.shape == (3, 3, 64, 64)
    assert batch.pixel_values.dtype == torch.uint8
    assert batch.state.shape == (3, 5)
    assert batch.actions.shape == (3, 8, 4)
    assert batch.action_is_pad.dtype == torch.bool
    assert batch.dataset.tolist() == [0, 4, 0]
    assert batch.frame_index.tolist() == [1, 2, 3]
    assert batch.loss_weight.tolist() == [1.0] * 3


def test_equal_lengths_can_lie_side_by_side_in_their_order():
    samples = [make_sample(cameras, seed=i) for i, cameras in enumerate([("a",), (), ("b",), (), ("a", "b")])]
    batch = VarlenPackingCollator(ENCODER, sort_by_length=True)(samples)
    assert batch.frame_index.tolist() == [1, 3, 0, 2, 4]


def test_workers_collate_and_pin_like_any_collate_fn():
    loader = DataLoader(SAMPLES, batch_size=3, num_workers=1, collate_fn=VarlenPackingCollator(ENCODER))  # type: ignore[arg-type]
    (batch,) = loader
    assert isinstance(batch, PackedBatch)
    assert torch.equal(batch.input_ids, VarlenPackingCollator(ENCODER)(SAMPLES).input_ids)


def test_a_sample_over_the_budget_is_named():
    with pytest.raises(DatasetError) as caught:
        VarlenPackingCollator(ENCODER, token_budget=20)(SAMPLES)
    assert "a sample is over the token budget" in str(caught.value)
    assert "dataset 0, episode 3, frame 1" in str(caught.value)


def test_a_batch_over_the_budget_points_to_the_planner():
    with pytest.raises(DatasetError, match="ResumableLoader"):
        VarlenPackingCollator(ENCODER, token_budget=40)(SAMPLES)
    total = sum(ENCODER.length(sample) for sample in SAMPLES)
    assert VarlenPackingCollator(ENCODER, token_budget=total)(SAMPLES).num_tokens == total


def test_different_shapes_and_empty_batches_are_errors():
    with pytest.raises(DatasetError, match="frame 9"):
        VarlenPackingCollator(ENCODER)([*SAMPLES, make_sample(seed=9, action=torch.zeros(8, 7))])
    with pytest.raises(DatasetError, match="no samples"):
        VarlenPackingCollator(ENCODER)([])
    with pytest.raises(ConfigError):
        VarlenPackingCollator(ENCODER, token_budget=0)
