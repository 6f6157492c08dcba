"""Policies: the LightningModule to subclass, flow matching, and a small pi0.5-shaped policy."""

from lightning_embodied.models.checkpoint import find_checkpoint, load_policy
from lightning_embodied.models.flow_matching import euler_sample, interpolate, sample_time, velocity_target
from lightning_embodied.models.flow_module import FlowMatchingModule
from lightning_embodied.models.flow_policy import FlowMatchingPolicy
from lightning_embodied.models.groot import GrootN15Policy
from lightning_embodied.models.lerobot_policy import LeRobotPolicyModule
from lightning_embodied.models.lora import LoRA
from lightning_embodied.models.loss import LossTerms
from lightning_embodied.models.module import PolicyModule
from lightning_embodied.models.normalizer import Normalizer
from lightning_embodied.models.pi import Pi0Policy, Pi05Policy
from lightning_embodied.models.spec import PolicySpec

__all__ = [
    "FlowMatchingModule",
    "FlowMatchingPolicy",
    "GrootN15Policy",
    "LeRobotPolicyModule",
    "LoRA",
    "LossTerms",
    "Normalizer",
    "Pi0Policy",
    "Pi05Policy",
    "PolicyModule",
    "PolicySpec",
    "euler_sample",
    "find_checkpoint",
    "interpolate",
    "load_policy",
    "sample_time",
    "velocity_target",
]
