"""Lets methods besides `forward` use sharded parameters, and says which unit is to blame when a module cannot.

Lightning calls `training_step`, not `forward`; FSDP gathers parameters around registered methods only. After a call
without gradients the root's parameters are freed again: torch keeps them for a backward pass that does not come, and
whoever writes to `module.parameters()` in between (averaged weights, say) would write to copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lightning_embodied.errors import ConfigError


def register_forward_methods(root: nn.Module, names: Sequence[str]) -> None:
    """Registers methods of a sharded root.

    Args:
        root: Sharded by `fully_shard`.
        names: Names of its methods.

    Raises:
        ConfigError: There is no such method.
    """
    calls = _Calls(root)
    for name in names:
        if not callable(getattr(root, name, None)):
            raise ConfigError(
                "the module has no such method", where="forward_methods", found=name, expected="a method's name"
            )
        register_fsdp_forward_method(root, name)
        setattr(root, name, calls.guard(getattr(root, name)))


class _Calls:
    """Registered methods may call each other; only the outermost frees and explains."""

    def __init__(self, root: nn.Module) -> None:
        self.root, self.depth = root, 0

    def guard(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self.depth += 1
            try:
                return method(*args, **kwargs)
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" in str(error):
                    raise _unit_not_called(self.root, error) from error
                raise
            finally:
                self.depth -= 1
                if not self.depth and not torch.is_grad_enabled():
                    cast(FSDPModule, self.root).reshard()

        return guarded


def _unit_not_called(root: nn.Module, error: RuntimeError) -> Exception:
    units = [
        type(module).__name__ for module in root.modules() if isinstance(module, FSDPModule) and module is not root
    ]
    return ConfigError(
        "sharded parameters were used without calling the `forward` of their unit, so nothing gathered them",
        where=", ".join(dict.fromkeys(units)) or type(root).__name__,
        found=str(error).splitlines()[0],
        expected="units that are called as modules: `layer(x)`, not `layer.attention.q_proj(x)`",
        mend="name units whose parts are called from outside in `joint_units`, and methods in `forward_methods`",
    )
