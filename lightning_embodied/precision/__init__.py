"""FP8 training as a Lightning precision plugin, and measuring what it costs in accuracy."""

from lightning_embodied.precision.conversion import fp8_layers, high_precision
from lightning_embodied.precision.exclusions import ExclusionProposal, GradientError, gradients, propose_exclusions
from lightning_embodied.precision.health import LayerHealth, Observation, observe
from lightning_embodied.precision.linear import FP8Linear
from lightning_embodied.precision.plugin import FP8Precision
from lightning_embodied.precision.recipes import Backend, RecipeName
from lightning_embodied.precision.selection import LayerVerdict

__all__ = [
    "Backend",
    "ExclusionProposal",
    "FP8Linear",
    "FP8Precision",
    "GradientError",
    "LayerHealth",
    "LayerVerdict",
    "Observation",
    "RecipeName",
    "fp8_layers",
    "gradients",
    "high_precision",
    "observe",
    "propose_exclusions",
]
