"""Which rank this process is: on a worker what the orchestration assigned, on the driver rank 0 of none running.

Lightning asks for ranks while the Trainer is built, long before a worker exists, so nothing here touches Ray.
"""

from __future__ import annotations

from lightning.fabric.plugins import ClusterEnvironment

from lightning_embodied.strategies.on_ray.ranks import Assignment


class RayEnvironment(ClusterEnvironment):
    """Lightning's view of the ranks that Ray's workers have."""

    def __init__(self) -> None:
        super().__init__()
        self._planned = 1
        self.assignment: Assignment | None = None

    @property
    def creates_processes_externally(self) -> bool:
        """True: the launcher starts them, not Lightning."""
        return True

    @property
    def main_address(self) -> str:
        """Where rank 0 listens."""
        return self._assigned().main_address

    @property
    def main_port(self) -> int:
        """The port it listens on."""
        return self._assigned().main_port

    @staticmethod
    def detect() -> bool:
        """False: it comes with a Ray strategy, never by itself."""
        return False

    def plan(self, world_size: int) -> None:
        """Sets the number of workers that will be started.

        Args:
            world_size: The number.
        """
        self._planned = world_size

    def world_size(self) -> int:
        """Number of workers; on the driver of those that will be started."""
        return self.assignment.world_size if self.assignment else self._planned

    def set_world_size(self, size: int) -> None:
        """Does nothing: the orchestration decides."""

    def global_rank(self) -> int:
        """Rank of this worker; 0 on the driver."""
        return self.assignment.rank if self.assignment else 0

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the orchestration decides."""

    def local_rank(self) -> int:
        """Rank on this node; 0 on the driver."""
        return self.assignment.local_rank if self.assignment else 0

    def node_rank(self) -> int:
        """Rank of this node; 0 on the driver."""
        return self.assignment.node_rank if self.assignment else 0

    def _assigned(self) -> Assignment:
        if self.assignment is None:
            raise RuntimeError("the driver is in no process group; only workers are")
        return self.assignment
