"""GR00T N1.5: a vision-language backbone and a flow-matching action head for many robots."""

from lightning_embodied.models.groot.policy import GrootN15Policy
from lightning_embodied.models.groot.sizes import GrootSizes

__all__ = ["GrootN15Policy", "GrootSizes"]
