"""Delayed scaling's memory: the largest values of the last steps, for all layers, equal on all ranks.

Scales of a step follow from the steps before it (arXiv:2209.05433), so the cast needs no pass over the tensor first.
What a step has seen is reduced over ranks and pushed into the history once, after the optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_embodied.errors import CheckpointError
from lightning_embodied.precision.linear import DelayedAmax

_VERSION = 1


class DelayedScaling:
    """Histories of the largest values of the converted layers.

    Args:
        length: Number of steps remembered.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._layers: dict[str, DelayedAmax] = {}
        self._history: dict[str, Tensor] = {}

    def watch(self, layers: Mapping[str, DelayedAmax]) -> None:
        """Takes over the memory of all layers, which start from their history if they have one.

        Args:
            layers: By name.
        """
        self._layers = dict(layers)
        for name, layer in self._layers.items():
            history = self._history.setdefault(name, torch.zeros(3, self._length))
            layer.used.copy_(history.amax(1))

    def update(self) -> None:
        """Ends a step: what its layers have seen becomes the youngest entry of their histories.

        Layers that have seen nothing, and values that are not finite, leave the history as it is.
        """
        if not self._layers:
            return
        layers = list(self._layers.values())
        seen = torch.stack([layer.seen for layer in layers])
        seen = torch.where(seen.isfinite(), seen, 0.0)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(seen, dist.ReduceOp.MAX)
        history = torch.stack([self._history[name].to(seen.device) for name in self._layers])
        history = torch.where(seen[..., None] > 0, torch.cat((seen[..., None], history[..., :-1]), dim=-1), history)
        self._history.update(zip(self._layers, history, strict=True))
        torch._foreach_copy_([layer.used for layer in layers], list(history.amax(-1)))
        torch._foreach_zero_([layer.seen for layer in layers])

    def to(self, device: torch.device) -> None:
        """Moves the layers' values, once it is known where the model computes."""
        for layer in self._layers.values():
            layer.used, layer.seen = layer.used.to(device), layer.seen.to(device)

    def state_dict(self) -> dict[str, Any]:
        """The histories by layer, float32 `[3, length]` on the CPU, youngest first."""
        return {"version": _VERSION, "amax_history": {name: self._history[name].cpu().clone() for name in self._layers}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over histories; layers without one stay cold, histories of another length are cut or filled.

        Args:
            state: What `state_dict` returned.

        Raises:
            CheckpointError: It is of another version, or a history has another shape.
        """
        if state.get("version") != _VERSION:
            raise CheckpointError(
                "the checkpoint's FP8 scaling state is of another version",
                where="FP8Precision",
                found=state.get("version"),
                expected=_VERSION,
                mend="resume with the release that wrote it, or load the weights alone: scales are found again",
            )
        for name, history in state["amax_history"].items():
            if history.dim() != 2 or history.shape[0] != 3:
                raise CheckpointError(
                    "an FP8 scaling history has the wrong shape",
                    where=f"FP8Precision: {name}",
                    found=list(history.shape),
                    expected="[3, steps]",
                )
            kept = history[:, : self._length].float()
            padding = torch.zeros(3, self._length - kept.shape[1])
            self._history[name] = torch.cat((kept.cpu(), padding), dim=1)
        self.watch(self._layers)
