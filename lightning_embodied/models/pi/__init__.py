"""pi0 and pi0.5 with openpi's and LeRobot's weights, on packed batches."""

from lightning_embodied.models.pi.policy import Pi0Policy, Pi05Policy, PiPolicy
from lightning_embodied.models.pi.sizes import GemmaSizes, PiSizes

__all__ = ["GemmaSizes", "Pi0Policy", "Pi05Policy", "PiPolicy", "PiSizes"]
