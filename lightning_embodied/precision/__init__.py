"""FP8 training as a Lightning precision plugin, and measuring what it costs in accuracy."""

from lightning_embodied.precision.conversion import fp8_layers, high_precision
from lightning_embodied.precision.linear import FP8Linear
from lightning_embodied.precision.plugin import FP8Precision
from lightning_embodied.precision.selection import LayerVerdict

__all__ = ["FP8Linear", "FP8Precision", "LayerVerdict", "fp8_layers", "high_precision"]
