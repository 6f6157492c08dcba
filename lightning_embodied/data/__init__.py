"""Robot demonstrations as samples: LeRobot datasets, statistics, sample order, DataModules."""

from lightning_embodied.data.dataset import LeRobotDataset as LeRobotDataset
from lightning_embodied.data.stats import compute_stats as compute_stats

__all__ = ["LeRobotDataset", "compute_stats"]
