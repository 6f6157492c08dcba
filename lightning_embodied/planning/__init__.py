"""Memory, communication and time of a training step on a thousand ranks, before paying for them."""

from lightning_embodied.planning.abstract import AbstractExecution, abstract_execution
from lightning_embodied.planning.answer import Candidate, Plan, PlanRequest, ScalingPoint
from lightning_embodied.planning.collectives import CollectiveModel, MeasuredLink, Measurement, NcclModel
from lightning_embodied.planning.demands import CheckpointCost, LoaderDemand, SampleSize, Storage
from lightning_embodied.planning.goodput import META_HOURS_BETWEEN_FAILURES, Goodput, goodput
from lightning_embodied.planning.hardware import ACCELERATORS, Accelerator, Cluster, parse_rate
from lightning_embodied.planning.plan import make_plan
from lightning_embodied.planning.profile import Memory, StepProfile, profile_step
from lightning_embodied.planning.scaling import ScalingLaw
from lightning_embodied.planning.sharding import Sharding
from lightning_embodied.planning.timeline import StepTime, Traffic, step_time
from lightning_embodied.planning.world import fake_world

__all__ = [
    "ACCELERATORS",
    "META_HOURS_BETWEEN_FAILURES",
    "AbstractExecution",
    "Accelerator",
    "Candidate",
    "CheckpointCost",
    "Cluster",
    "CollectiveModel",
    "Goodput",
    "LoaderDemand",
    "MeasuredLink",
    "Measurement",
    "Memory",
    "NcclModel",
    "Plan",
    "PlanRequest",
    "SampleSize",
    "ScalingLaw",
    "ScalingPoint",
    "Sharding",
    "StepProfile",
    "StepTime",
    "Storage",
    "Traffic",
    "abstract_execution",
    "fake_world",
    "goodput",
    "make_plan",
    "parse_rate",
    "profile_step",
    "step_time",
]
