"""Packs samples into one batch without padding: the `collate_fn` of any DataLoader.

The layout is the one FlashAttention's variable-length kernels take (concatenated tokens and their cumulative
lengths), so a batch computes exactly the tokens its samples have.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_embodied.counts import check_count
from lightning_embodied.errors import DatasetError
from lightning_embodied.packing.batch import PackedBatch
from lightning_embodied.packing.encoder import SampleEncoder
from lightning_embodied.packing.pack import EncodedSample, pack_samples
from lightning_embodied.packing.sample import Sample


class VarlenPackingCollator:
    """Encodes the samples of a batch and concatenates them.

    Args:
        encoder: How one sample becomes tokens.
        token_budget: Most tokens a batch may have, so that the memory of a step is known; a batch over it is an
            error. `LeRobotDataModule` and `ResumableLoader` plan batches that fill one. Default: no limit.
        sort_by_length: Lay samples of equal lengths side by side instead of in the loader's order. On the CPU they
            then share one attention call, which pays in training with many short samples; `predict` returns its
            results in the order of the batch.

    Raises:
        ConfigError: The budget is no positive whole number.
    """

    def __init__(self, encoder: SampleEncoder, token_budget: int | None = None, sort_by_length: bool = False) -> None:
        if token_budget is not None:
            check_count(token_budget, "VarlenPackingCollator(token_budget=…)")
        self.encoder = encoder
        self.token_budget = token_budget
        self.sort_by_length = sort_by_length

    def __call__(self, samples: Sequence[Sample]) -> PackedBatch:
        """Packs `B` samples.

        Raises:
            DatasetError: A sample cannot be encoded, has other shapes than the first one, or is over the token
                budget; names the sample.
        """
        encoded = [self.encoder.encode(sample) for sample in samples]
        if self.sort_by_length:
            encoded.sort(key=lambda sample: sample.input_ids.shape[0])
        if self.token_budget is not None:
            self._check_budget(encoded, self.token_budget)
        return pack_samples(encoded)

    def _check_budget(self, encoded: Sequence[EncodedSample], budget: int) -> None:
        total = sum(sample.input_ids.shape[0] for sample in encoded)
        if total <= budget:
            return
        longest = max(encoded, key=lambda sample: sample.input_ids.shape[0])
        alone = longest.input_ids.shape[0] > budget
        raise DatasetError(
            "a sample is over the token budget" if alone else "a batch is over the token budget",
            where=str(longest) if alone else f"{len(encoded)} samples, {encoded[0]} first",
            found=f"{longest.input_ids.shape[0] if alone else total} tokens",
            expected=f"at most {budget} (token_budget)",
            mend="raise token_budget" if alone else "plan the batches (ResumableLoader with token_budget), or raise it",
        )
