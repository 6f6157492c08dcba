"""The default optimizer: AdamW that decays matrices only, with linear warm-up and cosine decay.

A YAML's own `optimizer:` and `lr_scheduler:` sections replace it, as LightningCLI does for any module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR


def adamw(
    parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float, *, fused: bool = True
) -> AdamW:
    """AdamW with `weight_decay` on matrices and convolutions and none on vectors (norms, biases).

    Args:
        parameters: Those that train; frozen ones are left out.
        learning_rate: Peak learning rate.
        weight_decay: Decoupled weight decay.
        fused: Allow one kernel for all on the CPU. Under mixed precision Lightning clips no gradients of such a one.
    """
    training = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in training if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in training if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=learning_rate,
        betas=(0.9, 0.95),
        fused=(fused and all(parameter.device.type == "cpu" for parameter in training)) or None,
    )


def warmup_cosine(optimizer: torch.optim.Optimizer, total_steps: float, warmup: float, final: float) -> LambdaLR:
    """Linear warm-up, then a half cosine down to a share of the peak; constant if the run has no known end.

    Args:
        optimizer: Its learning rates are the peak.
        total_steps: Optimizer steps of the run; may be infinite.
        warmup: Warm-up as a share of the run, at most 1000 steps.
        final: Last learning rate as a share of the peak.
    """
    warmup_steps = max(1.0, min(warmup * total_steps, 1000.0)) if warmup else 0.0

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if math.isinf(total_steps):
            return 1.0
        progress = min(1.0, (step - warmup_steps) / max(1.0, total_steps - warmup_steps))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))

    schedule: Callable[[int], float] = factor
    return LambdaLR(optimizer, schedule)
