"""How an instruction is written for a policy: as it stands, or as pi0, pi0.5 and GR00T were trained to read it.

pi0 ends it with a line break; pi0.5 writes the state behind it, each dimension as one of 256 bins (arXiv:2504.16054,
openpi's `tokenizer.py`). Both are `<bos>` and text, with `_` and line breaks as spaces. Eagle, which GR00T N1.5 sees
through, reads a chat in which the user shows numbered pictures and says the instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

PromptStyle = Literal["instruction", "pi0", "pi05", "eagle"]

BINS = 256
EPSILON = 1e-8
"""LeRobot's divisor for a dimension that does not vary."""

EAGLE_OPENING = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
EAGLE_PICTURE = ("<image {number}><img>", "</img>")
"""What stands before and after the tokens of each picture."""


def eagle_prompt(task: str) -> str:
    """An instruction for Eagle, behind the pictures."""
    return f"{task}<|im_end|>\n<|im_start|>assistant\n"


def pi0_prompt(task: str) -> str:
    """An instruction for pi0."""
    return f"{_one_line(task)}\n"


def pi05_prompt(task: str, bins: Sequence[int]) -> str:
    """An instruction and a state for pi0.5.

    Args:
        task: The instruction.
        bins: The state, from `state_bins`.
    """
    return f"Task: {_one_line(task)}, State: {' '.join(map(str, bins))};\nAction: "


def state_bins(state: NDArray[np.float32], low: Sequence[float], high: Sequence[float]) -> list[int]:
    """Which of 256 equal bins between `low` and `high` each dimension is in.

    Args:
        state: float32 `[D]`, in the dataset's units.
        low: `D` values, the 1 % quantiles.
        high: `D` values, the 99 % quantiles.

    Returns:
        `D` numbers from 0 to 255; -1 below `low`, 255 from `high` on.
    """
    start, span = np.asarray(low, dtype=np.float32), np.asarray(high, dtype=np.float32) - np.asarray(low, np.float32)
    scaled = 2 * (state - start) / np.where(span == 0, np.float32(EPSILON), span) - 1
    bins: list[int] = (np.digitize(scaled, np.linspace(-1, 1, BINS + 1)[:-1]) - 1).tolist()
    return bins


def _one_line(task: str) -> str:
    return task.strip().replace("_", " ").replace("\n", " ")
