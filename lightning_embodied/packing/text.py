"""Instructions and prompts as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lightning_embodied.errors import ConfigError
from lightning_embodied.packing.prompts import (
    BINS,
    EAGLE_OPENING,
    EAGLE_PICTURE,
    PromptStyle,
    eagle_prompt,
    pi0_prompt,
    pi05_prompt,
    state_bins,
)

StateRange = tuple[Sequence[float], Sequence[float]]
"""The 1 % and the 99 % quantiles of the state."""

_REMEMBERED = 4096


class PromptTokenizer:
    """Writes prompts in one style and tokenises them.

    Args:
        tokenizer_json: JSON text of the `tokenizers` library.
        style: How instructions are written.
        state_range: Between which values pi0.5's prompts discretise the state, if it is known already.

    Attributes:
        vocab_size: Number of the tokenizer's ids.
    """

    def __init__(self, tokenizer_json: str, style: PromptStyle, state_range: StateRange | None = None) -> None:
        self.json, self.style, self.state_range = tokenizer_json, style, state_range
        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.vocab_size = int(self.tokenizer.get_vocab_size())
        self._remembered: dict[str, list[int]] = {}
        self._around: dict[int, list[list[int]]] = {}

    @property
    def words(self) -> int:
        """One more than the largest id that a model must embed: PaliGemma's `<image>` stands for pictures."""
        ids = [number for token, number in self.tokenizer.get_vocab().items() if token != "<image>"]  # noqa: S105
        return max(ids, default=-1) + 1

    def encode(self, task: str, state: NDArray[np.float32]) -> list[int]:
        """Token ids of an instruction and, for pi0.5, a state `[D]` in the dataset's units.

        Raises:
            ConfigError: The range of the state is not known, or is that of another state.
        """
        if self.style == "pi05":
            low, high = self.state_range or ((), ())
            if len(low) != len(state):
                raise ConfigError(
                    "pi0.5's prompt discretises the state, whose range is not known",
                    where="SampleEncoder(prompt='pi05')",
                    found=f"a range of {len(low)} dimensions",
                    expected=f"{len(state)} dimensions",
                    mend="call `encoder.use_statistics(datamodule.stats)`, as LeRobotDataModule does",
                )
            return self._ids(pi05_prompt(task, state_bins(state, low, high)))
        ids = self._remembered.get(task)
        if ids is None:
            write = {"pi0": pi0_prompt, "eagle": eagle_prompt}.get(self.style, str)
            ids = self._ids(write(task))
            if len(self._remembered) < _REMEMBERED:
                self._remembered[task] = ids
        return ids

    def around_pictures(self, count: int) -> list[list[int]]:
        """Token ids before the first of `count` pictures, between two, and behind the last: `count + 1` lists."""
        if self.style != "eagle":
            return [[] for _ in range(count + 1)]
        if count not in self._around:
            gaps = [EAGLE_OPENING, *[""] * count]
            for index in range(count):
                before, after = (text.format(number=index + 1) for text in EAGLE_PICTURE)
                gaps[index] += before
                gaps[index + 1] += after
            self._around[count] = [self._ids(gap) for gap in gaps]
        return self._around[count]

    def count(self, task: str) -> int:
        """Number of tokens; for pi0.5, the most that a prompt can have whatever the state."""
        if self.style != "pi05":
            return len(self.encode(task, np.zeros(0, dtype=np.float32)))
        if task not in self._remembered:
            dimensions = len((self.state_range or ((), ()))[0])
            self._remembered[task] = self._ids(pi05_prompt(task, [self._longest_bin] * dimensions))
        return len(self._remembered[task])

    @cached_property
    def _longest_bin(self) -> int:
        return max(range(-1, BINS), key=lambda number: len(self._ids(pi05_prompt("", [number, number]))))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        start = self.tokenizer.token_to_id("<bos>") if self.style in ("pi0", "pi05") else None
        return ids if start is None else [start, *ids]
