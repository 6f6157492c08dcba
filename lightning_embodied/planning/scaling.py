"""Step time against the number of ranks from measurements: two constants, fitted.

A step is the work of a rank, which does not depend on their number, and what synchronising costs, which grows with it
(a ring has a step for each rank). The paper's table (arXiv:2603.11101, section 3.1: an epoch takes 2.55, 1.24 and
0.73 h on 256, 512 and 1,024 GPUs) is met within 5 % by two constants, and by no such law exactly: a step on 512 GPUs
is faster there than on 256.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_embodied.errors import ConfigError


@dataclass(frozen=True)
class ScalingLaw:
    """Seconds of a step: `fixed + per_rank * ranks`.

    Attributes:
        fixed: Seconds of a rank's own work.
        per_rank: Seconds that each rank adds for all.
    """

    fixed: float
    per_rank: float

    @classmethod
    def fit(cls, measured: Mapping[int, float]) -> ScalingLaw:
        """Least squares of the relative error; neither constant is negative.

        Args:
            measured: Seconds of a step by number of ranks; two numbers at least.

        Raises:
            ConfigError: There are fewer, or one is not positive.
        """
        if len(measured) < 2 or min(*measured, *measured.values()) <= 0:
            raise ConfigError(
                "two constants need two measurements",
                where="measured",
                found=dict(measured),
                expected="seconds of a step by number of ranks, such as {256: 3.0, 1024: 3.4}",
            )
        ranks, seconds = np.array(list(measured)), np.array(list(measured.values()))
        terms = np.stack([1 / seconds, ranks / seconds], axis=1)
        fixed, per_rank = np.linalg.lstsq(terms, np.ones(len(ranks)), rcond=None)[0]
        if per_rank < 0:
            fixed, per_rank = float(np.sum(terms[:, 0]) / np.sum(terms[:, 0] ** 2)), 0.0
        if fixed < 0:
            fixed, per_rank = 0.0, float(np.sum(terms[:, 1]) / np.sum(terms[:, 1] ** 2))
        return cls(float(fixed), float(per_rank))

    def step_seconds(self, ranks: int) -> float:
        """Seconds of a step."""
        return self.fixed + self.per_rank * ranks

    def epoch_hours(self, ranks: int, samples: float, micro_batch: int) -> float:
        """Hours in which `ranks` see `samples`, `micro_batch` each in a step."""
        return samples / (ranks * micro_batch) * self.step_seconds(ranks) / 3600
