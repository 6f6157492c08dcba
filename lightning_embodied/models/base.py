"""What policies inherit from: Lightning's module or, where Lightning is not installed, as much of it as acting needs.

A robot runs policies and trains none, so it can do without Lightning and what Lightning brings.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING or find_spec("lightning") is not None:
    from lightning.pytorch import LightningModule
else:

    class LightningModule(nn.Module):
        """A module that knows its device; it can be loaded and can act, nothing else."""

        _trainer = None

        def save_hyperparameters(self, **_: Any) -> None:  # noqa: ANN401
            """Keeps nothing: what was loaded has its arguments in the file that it was loaded from."""
            self.hparams: dict[str, Any] = {}

        @property
        def device(self) -> torch.device:
            """Where the weights are."""
            return next((tensor.device for tensor in (*self.parameters(), *self.buffers())), torch.device("cpu"))


__all__ = ["LightningModule"]
