"""Selective activation checkpointing: layers keep their inputs alone and compute the rest again when going back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def run_layer(layer: nn.Module, *arguments: Any, recompute: bool) -> Any:  # noqa: ANN401
    """`layer(*arguments)`, without keeping activations if `recompute` (and gradients are wanted)."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(layer, *arguments, use_reentrant=False)
    return layer(*arguments)
