"""Demonstrations recorded from scripted experts, as LeRobot datasets."""

from lightning_embodied.collection.collect import CollectionResult, collect
from lightning_embodied.collection.provenance import PROVENANCE_FILE, EpisodeOrigin, read_provenance
from lightning_embodied.collection.schedule import TaskTally

__all__ = ["PROVENANCE_FILE", "CollectionResult", "EpisodeOrigin", "TaskTally", "collect", "read_provenance"]
