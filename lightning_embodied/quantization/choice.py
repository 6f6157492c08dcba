"""Which layers are stored in eight bits, and why the others are not: FP8 training's rules and the vision tower.

The recipe leaves the vision tower and the embeddings of a vision-language model alone; what
reads or writes actions is sensitive and small, and stays as in training. docs/quantization.md has what each is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_embodied.errors import ConfigError
from lightning_embodied.precision.selection import SAFE_DEFAULT, Selection, plain_name
from lightning_embodied.quantization.formats import WeightFormat
from lightning_embodied.quantization.layers import QUANTIZED

_VISION = {
    "sees pictures": ("vision*", "visual*", "*_vision*", "image_*", "*_image", "vit", "vit_*", "siglip*", "dino*"),
}


@dataclass(frozen=True)
class LayerChoice:
    """What becomes of a layer.

    Attributes:
        name: Its name in the model.
        quantized: Whether its weight is stored in eight bits.
        reason: Why, or why not.
        shape: Of its weight.
    """

    name: str
    quantized: bool
    reason: str
    shape: tuple[int, ...]

    @property
    def kept_by_default(self) -> bool:
        """Whether it stays because of a safe default, and of nothing that somebody asked for."""
        return self.reason.endswith(SAFE_DEFAULT)


def choose_layers(
    module: nn.Module, *, include: Sequence[str] = ("*",), exclude: Sequence[str] = (), safe_defaults: bool = True
) -> dict[str, LayerChoice]:
    """Decides on every linear layer, embedding and two-dimensional convolution of a module.

    Args:
        module: The model; it may be on the meta device.
        include: Patterns of the full names of the layers to quantise.
        exclude: Patterns of layers that stay in high precision; stronger than `include`.
        safe_defaults: Also keep the vision tower, embeddings, convolutions, what reads actions, states or flow time,
            what writes actions or tokens, and what modulates norms.

    Raises:
        ConfigError: A pattern matches no such layer, or nothing is left to quantise.
    """
    layers: dict[int, tuple[list[str], nn.Module]] = {}
    owners: dict[int, set[int]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(layer))
        if isinstance(layer, nn.Linear | nn.Embedding | nn.Conv2d):
            layers.setdefault(id(layer), ([], layer))[0].append(plain_name(name))
    rules = Selection(tuple(include), tuple(exclude), safe_defaults, kept=_VISION, where="quantize")
    rules.check_patterns(name for names, _ in layers.values() for name in names)
    choices = {}
    for names, layer in layers.values():
        reason = _reason_to_stay(rules, names, layer, shared=len(owners[id(layer.weight)]) > 1)
        shape = tuple(layer.get_parameter("weight").shape)
        choices[names[0]] = LayerChoice(names[0], reason is None, reason or "included", shape)
    if not any(choice.quantized for choice in choices.values()):
        raise ConfigError(
            "no layer is left to quantise",
            where=type(module).__name__,
            found="; ".join(sorted({choice.reason for choice in choices.values()})) or "no layers with weights",
            mend="change include, exclude or safe_defaults",
        )
    return choices


def planned_bytes(
    module: nn.Module, choices: Mapping[str, LayerChoice], kind: WeightFormat | None, kept: torch.dtype
) -> int:
    """Bytes that the weights take, from shapes alone; weights that are tied count once.

    Args:
        module: The model; it may be on the meta device.
        choices: What `choose_layers` returned for it.
        kind: Format of the chosen layers; None for none, as before quantising.
        kept: Dtype of everything else.
    """
    total = sum(parameter.numel() * kept.itemsize for parameter in module.parameters())
    for choice in choices.values():
        if choice.quantized and kind is not None:
            rows, columns = choice.shape[0], torch.Size(choice.shape[1:]).numel()
            scales = torch.Size(kind.scale_shape(rows, columns)).numel()
            total += rows * columns * (kind.dtype.itemsize - kept.itemsize) + scales * torch.float32.itemsize
    return total


def summary(choices: Mapping[str, LayerChoice], formats: Mapping[str, str]) -> str:
    """What is stored in eight bits, and for each reason to stay how many layers, with the first names.

    Args:
        choices: What `choose_layers` returned.
        formats: Name of the format of each layer that has one.
    """
    numbers = {name: torch.Size(choice.shape).numel() for name, choice in choices.items()}
    lines = []
    for kind in dict.fromkeys(formats.values()):
        chosen = [name for name in choices if formats.get(name) == kind]
        share = sum(numbers[name] for name in chosen) / max(1, sum(numbers.values()))
        lines.append(f"{kind}: {len(chosen)} of {len(choices)} layers, {share:.1%} of their weights")
    kept: dict[str, list[str]] = {}
    for choice in choices.values():
        if not choice.quantized:
            how = f"in {formats[choice.name]}" if choice.name in formats else "kept"
            kept.setdefault(f"{how}, {choice.reason}", []).append(choice.name)
    for reason, names in kept.items():
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        lines.append(f"  {len(names)} {reason}: {shown}")
    return "\n".join(lines)


def _reason_to_stay(rules: Selection, names: Sequence[str], layer: nn.Module, *, shared: bool) -> str | None:
    if type(layer) not in QUANTIZED:
        return f"{type(layer).__name__} is a class of its own"
    if shared:
        return "shares its weight with another layer"
    reason = rules.reason_to_stay(names)
    if reason is None and rules.safe_defaults and type(layer) is not nn.Linear:
        return f"{type(layer).__name__} {SAFE_DEFAULT}"
    return reason
