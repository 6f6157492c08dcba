"""When all ranks save and stop at the same batch: for good, or to go on at once with another number of ranks.

Light: the board imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HaltPoint:
    """Where the ranks of an attempt stop.

    Args:
        batches: Training batches of the attempt after which they do.
        resize: Whether the run goes on from there with another number of ranks.
    """

    batches: int
    resize: bool


class Halt:
    """Whether an attempt is to stop, why, where, and which ranks have."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._resize = False
        self._point: HaltPoint | None = None
        self._saved: set[int] = set()

    @property
    def wanted(self) -> bool:
        """Whether ranks are to stop."""
        return self._resize or self.reason is not None

    def begin(self) -> None:
        """An attempt starts: of whatever size, it is the one wanted."""
        self._resize, self._point, self._saved = False, None, set()

    def request(self, reason: str) -> None:
        """The run is to end; the first reason stands."""
        self.reason = self.reason or reason

    def request_resize(self) -> None:
        """The run is to go on with another number of ranks."""
        self._resize = True

    def point(self, rank: int, batches: int, all_told: bool) -> HaltPoint | None:
        """Where to stop, decided once rank 0 asks and every rank has been told.

        Args:
            rank: Who asks.
            batches: Training batches it has done in this attempt.
            all_told: Whether every other rank knows that it is to stop.

        Returns:
            None while that is not decided. No rank can be past it: it lies two batches ahead of rank 0, and a rank
            only ends a batch that rank 0 has begun.
        """
        if self._point is None and rank == 0 and all_told:
            self._point = HaltPoint(batches + 2, resize=self.reason is None)
        return self._point

    def saved(self, rank: int) -> None:
        """A rank has saved and stopped."""
        self._saved.add(rank)

    def goes_on(self, ranks: int) -> bool:
        """Whether all ranks have stopped for another number of them to go on.

        Args:
            ranks: How many there are.
        """
        return self._resize and self.reason is None and len(self._saved) == ranks

    def waits(self, rank: int) -> bool:
        """Whether a rank that has stopped is to be replaced rather than done."""
        return self._resize and self.reason is None and rank in self._saved
