"""What comes back from the workers, so that after `fit` the driver's Trainer looks as if it had trained itself.

Lightning's own launchers bring back weights, `callback_metrics` and one path; here also progress, all metrics, the
callbacks' and the DataModule's state, and the predictions of every rank.
"""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_embodied.strategies.lightning_compat import load_metrics, load_progress, metrics, progress

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_PLAIN = (bool, int, float, complex, str, bytes, Path, Tensor, type(None))


@dataclass
class RankResult:
    """What one rank sends.

    Args:
        returned: What the entry point returned; of ranks other than 0 only predictions.
        stopped: Where the run was saved before it stopped early; None when it ended by itself.
        trainer: State of rank 0's Trainer; empty from the others.
    """

    returned: Any = None
    stopped: str | None = None
    trainer: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Pickles it with all tensors on the CPU."""
        data: bytes = cloudpickle.dumps(move_data_to_device(vars(self), torch.device("cpu")))
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> RankResult:
        """Reads what a worker of ours pickled."""
        return cls(**pickle.loads(data))  # noqa: S301 - from our own worker


def collect(trainer: Trainer, *, wants_weights: bool, callbacks: list[Callback]) -> dict[str, Any]:
    """State of a Trainer after an entry point has run. Collective: a sharded state is gathered by all ranks.

    Args:
        trainer: Of this rank.
        wants_weights: Whether to include the module's weights.
        callbacks: The user's, in the driver's order.
    """
    fitted = trainer.state.fn == TrainerFn.FITTING
    weights = _whole(trainer.lightning_module.state_dict()) if fitted and wants_weights else None
    datamodule = getattr(trainer, "datamodule", None)
    return {
        "state": trainer.state,
        "weights": weights,
        "metrics": metrics(trainer),
        "progress": progress(trainer),
        "callbacks": [(_plain_attributes(callback), _own_state(callback)) for callback in callbacks],
        "datamodule": _own_state(datamodule) if datamodule is not None else None,
    }


def restore(trainer: Trainer, collected: dict[str, Any], datamodule: LightningDataModule | None) -> None:
    """Gives the driver's Trainer the state that `collect` took on rank 0.

    Args:
        trainer: The driver's.
        collected: What rank 0 sent.
        datamodule: That of the call.
    """
    trainer.state = collected["state"]
    if collected["weights"] is not None:
        trainer.lightning_module.load_state_dict(collected["weights"], strict=False)  # configure_model may have added
    load_progress(trainer, collected["progress"])
    load_metrics(trainer, collected["metrics"])
    for callback, (attributes, state) in zip(trainer.callbacks, collected["callbacks"], strict=True):  # type: ignore[attr-defined]
        vars(callback).update(attributes)
        _load_own_state(callback, state)
    if datamodule is not None:
        trainer.datamodule = datamodule  # type: ignore[attr-defined]  # where Lightning keeps it after a run
        datamodule.trainer = trainer
        _load_own_state(datamodule, collected["datamodule"])


def merge_predictions(shares: list[Any]) -> Any:
    """One list of predictions from those of every rank, in the order in which the batches were dealt out.

    Args:
        shares: By rank: a list of batches, or a list of such lists where there are several dataloaders.
    """
    if any(share is None for share in shares):
        return None
    if all(share and isinstance(share[0], list) for share in shares):
        return [_interleave(list(loader)) for loader in zip(*shares, strict=True)]
    return _interleave(shares)


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    """Gathers what is sharded, one tensor at a time."""
    return {key: value.full_tensor().cpu() if isinstance(value, DTensor) else value for key, value in state.items()}


def _interleave(shares: list[list[Any]]) -> list[Any]:
    longest = max(map(len, shares))
    return [share[place] for place in range(longest) for share in shares if place < len(share)]


def _plain_attributes(callback: Callback) -> dict[str, Any]:
    """What a callback counted or noted; not what refers to other objects of the worker."""
    return {name: value for name, value in vars(callback).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return type(value) in (list, tuple, set, frozenset) and all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _own_state(stateful: Callback | LightningDataModule) -> dict[str, Any] | None:
    """The state of an object whose class says how to save and load it."""
    base = Callback if isinstance(stateful, Callback) else LightningDataModule
    kind = type(stateful)
    if kind.state_dict is base.state_dict or kind.load_state_dict is base.load_state_dict:
        return None
    return stateful.state_dict()


def _load_own_state(stateful: Callback | LightningDataModule, state: dict[str, Any] | None) -> None:
    if state is None:
        return
    try:
        stateful.load_state_dict(state)
    except Exception as error:  # training is done and saved: its result must not be lost over this
        warnings.warn(f"the state of {type(stateful).__name__} stays in the workers: {error}", stacklevel=2)
