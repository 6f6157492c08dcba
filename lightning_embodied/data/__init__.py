"""Robot demonstrations as samples: LeRobot datasets, statistics, sample order, DataModules."""

from lightning_embodied.data.dataset import LeRobotDataset as LeRobotDataset
from lightning_embodied.data.dataset import Sample as Sample
from lightning_embodied.data.stats import compute_stats as compute_stats
from lightning_embodied.data.writer import LeRobotDatasetWriter as LeRobotDatasetWriter

__all__ = ["LeRobotDataset", "LeRobotDatasetWriter", "Sample", "compute_stats"]
