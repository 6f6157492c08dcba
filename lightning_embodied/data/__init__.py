"""Robot demonstrations as samples: LeRobot datasets, statistics, sample order, DataModules.

Names are imported when they are first used: recording needs neither torch nor Lightning.
"""

from typing import TYPE_CHECKING

from lightning_embodied.lazy import on_first_use

if TYPE_CHECKING:
    from lightning_embodied.data.batches import Place as Place
    from lightning_embodied.data.batches import SampleBatches as SampleBatches
    from lightning_embodied.data.batches import TokenBatches as TokenBatches
    from lightning_embodied.data.datamodule import LeRobotDataModule as LeRobotDataModule
    from lightning_embodied.data.dataset import LeRobotDataset as LeRobotDataset
    from lightning_embodied.data.dataset import Sample as Sample
    from lightning_embodied.data.loader import ResumableLoader as ResumableLoader
    from lightning_embodied.data.loader import ShardedLoader as ShardedLoader
    from lightning_embodied.data.order import SampleOrder as SampleOrder
    from lightning_embodied.data.stats import compute_stats as compute_stats
    from lightning_embodied.data.writer import LeRobotDatasetWriter as LeRobotDatasetWriter

__all__ = [
    "LeRobotDataModule",
    "LeRobotDataset",
    "LeRobotDatasetWriter",
    "Place",
    "ResumableLoader",
    "Sample",
    "SampleBatches",
    "SampleOrder",
    "ShardedLoader",
    "TokenBatches",
    "compute_stats",
]

__getattr__ = on_first_use(
    __name__,
    {
        "LeRobotDataModule": "datamodule",
        "LeRobotDataset": "dataset",
        "LeRobotDatasetWriter": "writer",
        "Place": "batches",
        "ResumableLoader": "loader",
        "Sample": "dataset",
        "SampleBatches": "batches",
        "SampleOrder": "order",
        "ShardedLoader": "loader",
        "TokenBatches": "batches",
        "compute_stats": "stats",
    },
)
