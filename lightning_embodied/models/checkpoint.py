"""Loads a policy from a checkpoint alone: no dataset, no YAML, and no pickled code.

`torch.load(weights_only=True)` reads tensors and plain values only; the class is imported by the name the checkpoint
gives, and must be a `PolicyModule`.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_embodied.errors import CheckpointError, EmbodiedError
from lightning_embodied.models.module import PolicyModule
from lightning_embodied.models.spec import PolicySpec

_ENTRIES = {
    "state_dict": "this is not a Lightning checkpoint",
    "policy_spec": "the checkpoint holds no policy spec",
    "policy_class": "the checkpoint does not name its policy class",
}
"""What a policy is made of, and what is wrong without it."""


def load_policy(checkpoint: str | Path, map_location: str | torch.device = "cpu") -> PolicyModule:
    """Loads a trained policy, ready to act.

    Args:
        checkpoint: A checkpoint file, or a run directory, of which the newest checkpoint is taken.
        map_location: Device to load onto.

    Returns:
        The policy in evaluation mode (`.train()` to train it on). It holds averaged weights where the run kept
        an average (`EMAWeightAveraging`).

    Raises:
        CheckpointError: There is none, it is damaged or not a policy's, or its class cannot be imported or has
            changed.
    """
    path = find_checkpoint(checkpoint)
    if path.is_dir():
        raise CheckpointError(
            "the checkpoint is sharded: every rank wrote a part of it",
            where=path,
            mend=f"make one file of it: `lightning-embodied consolidate --checkpoint {path} --output policy.ckpt`",
        )
    content = _read(path, map_location)
    policy = create_policy(content["policy_class"], path)
    policy.spec = PolicySpec.from_dict(content["policy_spec"])
    try:
        policy.configure_model()
        policy.load_state_dict(content["state_dict"])
    except (RuntimeError, EmbodiedError) as error:
        raise CheckpointError(
            "the checkpoint does not fit its policy class",
            where=path,
            found=getattr(error, "found", None) or str(error).splitlines()[0],
            mend=f"use the version of {type(policy).__name__} that it was trained with",
        ) from error
    return policy.to(map_location).eval()


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint file itself, or the newest one of a run directory (`checkpoints/*.ckpt` or `*.ckpt`).

    Raises:
        CheckpointError: There is none.
    """
    path = Path(path)
    if path.is_file():
        return path
    found = [*path.glob("checkpoints/*.ckpt"), *path.glob("*.ckpt")] if path.is_dir() else []
    if not found:
        raise CheckpointError(
            "there is no checkpoint",
            where=path,
            found="a directory without checkpoints/*.ckpt" if path.is_dir() else "no such file or directory",
            expected="a .ckpt file or the directory of a run",
            mend="train one with `lightning-embodied fit`",
        )
    return max(found, key=lambda file: (file.stat().st_mtime_ns, file.name == "last.ckpt"))


def _read(path: Path, map_location: str | torch.device) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise _unreadable(path, error, "something that is not tensors and plain values, or no checkpoint") from error
    except (RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        raise _unreadable(path, error, "a damaged or truncated file") from error
    if not isinstance(content, Mapping):
        raise _unreadable(path, None, f"a {type(content).__name__} instead of a checkpoint")
    for key, problem in _ENTRIES.items():
        if key not in content:
            raise CheckpointError(
                problem,
                where=path,
                found=f"keys {', '.join(sorted(map(str, content)))[:200]}",
                expected=key,
                mend="take a checkpoint that a PolicyModule wrote during `fit`",
            )
    return content


def _unreadable(path: Path, error: Exception | None, found: str) -> CheckpointError:
    detail = f" ({str(error).splitlines()[0][:160]})" if error is not None and str(error) else ""
    return CheckpointError(
        "the checkpoint cannot be read",
        where=path,
        found=found + detail,
        mend="take another checkpoint of the run; this one may have been cut short while it was written",
    )


def create_policy(entry: Mapping[str, Any], path: Path) -> PolicyModule:
    """An unbuilt policy.

    Args:
        entry: Its class and arguments, as `PolicyModule.on_save_checkpoint` writes them.
        path: The file they are from, for error messages.

    Raises:
        CheckpointError: There is no such class, it is no policy's, or it takes other arguments.
    """
    class_path, arguments = str(entry["class_path"]), dict(entry["init_args"])
    module_name, _, name = class_path.rpartition(".")
    try:
        policy_class = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CheckpointError(
            "the checkpoint's policy class cannot be imported",
            where=path,
            found=f"{class_path}: {error}",
            mend="run from a place where that module can be imported; a class of a script (`__main__`) must move "
            "into a module",
        ) from error
    if not (isinstance(policy_class, type) and issubclass(policy_class, PolicyModule)):
        raise CheckpointError("the checkpoint names no policy class", where=path, found=class_path)
    try:
        return policy_class(**arguments)
    except TypeError as error:
        raise CheckpointError(
            "the policy class no longer takes the checkpoint's arguments",
            where=path,
            found=str(error),
            mend=f"use the version of {class_path} that it was trained with",
        ) from error
