"""The order of the samples: a pure function of (seed, epoch, global sample number).

Neither rank, world size nor worker count enters it (MosaicML Streaming's idea), so its state is a few integers and a
run continues on another machine. The permutation is a keyed Feistel network with cycle walking (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002): any position is found without building the epoch in memory, and integer
arithmetic gives the same order in every version of torch and numpy, which `torch.randperm` does not promise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_embodied.errors import ConfigError

_ROUNDS = 8
_MASK = (1 << 64) - 1


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: every output bit depends on every input bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _key(*parts: int) -> int:
    key = 0
    for part in parts:
        salted = (key * 0x9E3779B97F4A7C15 + (part & _MASK) + 0x632BE59BD9B4E019) & _MASK
        key = int(_mix(np.array([salted], dtype=np.uint64))[0])
    return key


@dataclass(frozen=True)
class SampleOrder:
    """Which sample is the n-th of an epoch.

    Args:
        size: Number of samples of an epoch, at least 1.
        seed: Any integer; another seed is another order.
        shuffle: Without it the n-th sample is sample n in every epoch.

    Raises:
        ConfigError: `size` is less than 1.
    """

    size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError("a sample order needs at least one sample", found=self.size, expected="size >= 1")

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Dataset indices of the samples `start <= n < stop` of `epoch`: int64 `[stop - start]`."""
        return self.indices_of(epoch, np.arange(start, stop))

    def seeds(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Seeds for the random augmentation of the same samples: int64 `[stop - start]`, not negative."""
        return self.seeds_of(epoch, np.arange(start, stop))

    def indices_of(self, epoch: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Dataset indices of any sample numbers: int64 of the shape of `numbers`."""
        if not self.shuffle or self.size == 1:
            return numbers.astype(np.int64)
        bits = (self.size - 1).bit_length()
        keys = [np.uint64(_key(self.seed, epoch, turn)) for turn in range(_ROUNDS)]
        found = _permute(numbers.astype(np.uint64), bits, keys)
        # Fewer than half of the 2^bits values lie outside; walking the cycle ends inside because it began inside.
        while (outside := found >= self.size).any():
            found[outside] = _permute(found[outside], bits, keys)
        return found.astype(np.int64)

    def seeds_of(self, epoch: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Seeds of any sample numbers: int64 of the shape of `numbers`."""
        salt = np.uint64(_key(self.seed, epoch, _ROUNDS))
        mixed = _mix(numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ salt)
        return (mixed >> np.uint64(1)).astype(np.int64)


def _permute(values: NDArray[np.uint64], bits: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    """One pass of an unbalanced Feistel network over `bits` bits; an even number of rounds restores the split."""
    low_bits, high_bits = bits - bits // 2, bits // 2
    high, low = values >> np.uint64(low_bits), values & np.uint64((1 << low_bits) - 1)
    for key in keys:
        high, low = low, high ^ (_mix(low ^ key) & np.uint64((1 << high_bits) - 1))
        low_bits, high_bits = high_bits, low_bits
    return (high << np.uint64(low_bits)) | low
