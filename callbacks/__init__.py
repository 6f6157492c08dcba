"""Lightning callbacks; they may use any room, and no room uses them."""

from lightning_embodied.callbacks.attention import ForceAttentionBackend as ForceAttentionBackend
from lightning_embodied.callbacks.finite_loss import FiniteLoss as FiniteLoss
from lightning_embodied.callbacks.fp8_health import FP8Health as FP8Health
from lightning_embodied.callbacks.goodput import BatchSize as BatchSize
from lightning_embodied.callbacks.goodput import GoodputMonitor as GoodputMonitor
from lightning_embodied.callbacks.last_step import SaveLastStep as SaveLastStep

__all__ = ["BatchSize", "FP8Health", "FiniteLoss", "ForceAttentionBackend", "GoodputMonitor", "SaveLastStep"]
