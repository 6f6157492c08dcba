"""Loads a quantised policy: torch and safetensors, no Lightning, nothing pickled.

The layers are built without weights, so that a policy needs the memory of its file and not that of its training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_embodied.errors import CheckpointError, EmbodiedError
from lightning_embodied.models import PolicyModule, PolicySpec
from lightning_embodied.models.checkpoint import create_policy
from lightning_embodied.quantization.formats import FORMATS
from lightning_embodied.quantization.layers import QUANTIZED, empty_layer, quantized_layers
from lightning_embodied.quantization.manifest import MANIFEST, WEIGHTS, read_manifest


def load_policy(
    path: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> PolicyModule:
    """Loads a policy that `save_policy` or `lightning-embodied quantize` wrote, ready to act.

    Args:
        path: The directory.
        device: Where it shall act.
        dtype: What everything that is not in eight bits is held and computed in: float32 on a CPU, bfloat16 on a GPU
            that is short of memory. States and actions are scaled in float32 in any case.

    Returns:
        The policy in evaluation mode; it does not train.

    Raises:
        CheckpointError: A file is missing, damaged or not the one that was written, the format is of another version,
            or the weights do not fit the policy's class.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    tensors = _read_tensors(folder / WEIGHTS, manifest["tensors"])
    policy = create_policy(manifest["policy"], folder / MANIFEST)
    policy.spec = PolicySpec.from_dict(manifest["spec"])
    try:
        with _without_weights():
            policy.configure_model()
            _prepare_layers(policy, manifest)
        _fill(policy, tensors, manifest["tied"], dtype)
    except (RuntimeError, KeyError, AttributeError, EmbodiedError) as error:
        raise CheckpointError(
            "the quantised policy does not fit its class",
            where=folder,
            found=" ".join(str(error).splitlines()[:3]),
            mend=f"use the version of {type(policy).__name__} that it was quantised with",
        ) from error
    return policy.to(device).requires_grad_(False).eval()


def stored_name(name: str) -> str:
    """Name in the file of an entry of the state: codes are stored as the weight they stand for."""
    return f"{name.removesuffix('codes')}weight" if name.endswith(".codes") else name


def _read_tensors(path: Path, stated: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError("the weights cannot be read", where=path, found=error) from error
    found = {name: description(tensor) for name, tensor in tensors.items()}
    for name in sorted(stated.keys() | found.keys()):
        if stated.get(name) != found.get(name):
            raise CheckpointError(
                "the weights are not those that the manifest describes",
                where=f"{path}: {name}",
                found=found.get(name, "no such tensor"),
                expected=stated.get(name, "no such tensor"),
            )
    return tensors


def description(tensor: Tensor) -> dict[str, Any]:
    """Dtype and shape of a tensor, as a manifest has them."""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _prepare_layers(policy: PolicyModule, manifest: Mapping[str, Any]) -> None:
    for name, entry in manifest["layers"].items():
        layer = policy.get_submodule(name)
        if type(layer) not in QUANTIZED:
            raise CheckpointError("a layer is of another class now", where=name, found=type(layer).__name__)
        empty_layer(layer, FORMATS[entry["format"]], input_scale=entry["input_scale"] is not None)


def _fill(policy: PolicyModule, tensors: dict[str, Tensor], tied: Mapping[str, str], dtype: torch.dtype) -> None:
    state = policy.state_dict()
    parameters = {name for name, _ in policy.named_parameters(remove_duplicate=False)}
    values = {}
    for name in state:
        value = tensors.pop(stored_name(name)) if name not in tied else None
        if value is not None:
            values[name] = value.to(dtype) if name in parameters else value
    values |= {name: values[original] for name, original in tied.items()}
    if tensors:
        raise CheckpointError("the file holds weights that the policy has no place for", found=", ".join(tensors))
    policy.load_state_dict(values, assign=True)
    for name, original in tied.items():
        parent, _, leaf = name.rpartition(".")
        setattr(policy.get_submodule(parent), leaf, policy.get_parameter(original))
    for layer in quantized_layers(policy).values():
        layer.like = torch.empty(0, dtype=dtype)


@contextmanager
def _without_weights() -> Iterator[None]:
    """Parameters made in this context have a shape and no values; buffers, which may be computed, are whole."""

    def emptied(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]  # it may return one
    try:
        yield
    finally:
        handle.remove()
