"""Points optimizers at the sharded parameters: one built before sharding would train tensors that nothing reads.

Sharding replaces every parameter. An optimizer that still holds the old ones steps without effect and without error
(LightningCLI's `optimizer:` section builds such), so its groups are re-bound by name.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_embodied.errors import ConfigError


class ParameterNames:
    """The names that a module's parameters had; make it before the parameters are replaced.

    It does not keep the parameters alive.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        names = {param: name for name, param in module.named_parameters()}
        self._names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary(names)

    def rebind(self, optimizers: Iterable[Optimizer], module: nn.Module) -> None:
        """Replaces, in place, the parameters in the optimizers' groups by those of today's module.

        Args:
            optimizers: Some may be bound to today's parameters already.
            module: The module, sharded.

        Raises:
            ConfigError: An optimizer holds a tensor that was never a parameter of the module, or has stepped already.
        """
        current = dict(module.named_parameters())
        alive = {id(param) for param in current.values()}
        for optimizer in optimizers:
            stale = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in alive]
            if not stale:
                continue
            unknown = [tuple(param.shape) for param in stale if self._names.get(param) not in current]
            if unknown:
                raise ConfigError(
                    "the optimizer trains tensors that are not parameters of the model",
                    where=type(optimizer).__name__,
                    found=f"{len(unknown)} tensors, shapes {', '.join(map(str, unknown[:4]))}",
                    mend="build it from `self.parameters()` in `configure_optimizers`",
                )
            if optimizer.state:
                raise ConfigError(
                    "the optimizer has stepped before the model was sharded",
                    where=type(optimizer).__name__,
                    found=f"state of {len(optimizer.state)} parameters",
                    mend="build it anew in `configure_optimizers`; to go on with its state, resume from a checkpoint",
                )
            for group in optimizer.param_groups:
                group["params"] = [p if id(p) in alive else current[self._names[p]] for p in group["params"]]
