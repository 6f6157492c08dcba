"""Parameters that DDP would wait for in vain, found before training and named.

`find_unused_parameters=True` hides them behind a walk through the graph in every step. Trainable parameters that the
loss does not reach are a mistake or belong to a frozen part, so they are named once, and the mend is `requires_grad`.
"""

from __future__ import annotations

from torch import nn

from lightning_embodied.errors import ConfigError

_NAMED = 8


class UnusedParametersError(ConfigError):
    """Trainable parameters take no part in the loss."""


def unused_parameters(module: nn.Module) -> list[str]:
    """Names of trainable parameters without a gradient after a backward pass.

    Args:
        module: After a backward pass, its gradients not yet set to none.
    """
    return [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]


def unused_error(names: list[str]) -> UnusedParametersError:
    """What to raise about such parameters.

    Args:
        names: Theirs, at least one.
    """
    shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return UnusedParametersError(
        "trainable parameters take no part in the loss, and all ranks would wait for their gradients",
        found=shown,
        expected="a gradient for every parameter with requires_grad",
        mend="set requires_grad to False for what is frozen, or let the loss use it; if they take part in some steps "
        "only, set the strategy's find_unused_parameters: true",
    )
