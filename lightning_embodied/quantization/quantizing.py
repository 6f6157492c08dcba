"""Quantises a policy in place: chosen layers in eight bits, everything else rounded to what the file will hold.

What is in memory afterwards is what a robot loads, to the bit, so whatever is measured on it holds for the robot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_embodied.errors import ConfigError
from lightning_embodied.models import PolicyModule
from lightning_embodied.quantization.choice import LayerChoice, choose_layers
from lightning_embodied.quantization.formats import FORMATS, FormatName, WeightFormat, format_of, relative_error
from lightning_embodied.quantization.layers import QuantizedLinear, quantize_layer, quantized_layers

KeptDtype = Literal["bfloat16", "float32", "int8"]

DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.bfloat16}
"""What is in no eight-bit format is stored in."""


@dataclass(frozen=True)
class Recipe:
    """How a policy is quantised; plain values.

    Args:
        weights: Format of the weights: E4M3 with one scale for each 128 x 128 block, each row or each tensor, or int8
            with one scale for each row, which is more accurate, and as fast where there are no FP8 cores.
        kept: Dtype in which everything else is stored. `int8` stores what only safe defaults keep in `int8_row`, five
            times as accurate as FP8, and the rest in bfloat16: for policies so small that most of them is kept.
        include: Patterns of the full names of the layers to quantise: `*.mlp.*`.
        exclude: Patterns of layers that stay as they are; stronger than `include`.
        safe_defaults: Also keep the vision tower, embeddings, convolutions, what reads actions, states or flow time,
            what writes actions or tokens, and what modulates norms.
    """

    weights: FormatName = "fp8_block"
    kept: KeptDtype = "bfloat16"
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    safe_defaults: bool = True

    def __post_init__(self) -> None:
        format_of(self.weights)
        if self.kept not in DTYPES:
            raise ConfigError("no such dtype", where="kept", found=self.kept, expected=", ".join(DTYPES))


@dataclass(frozen=True)
class Quantization:
    """What quantising did to a policy.

    Attributes:
        recipe: As asked for.
        layers: What became of each layer, by name.
        formats: The format of each quantised layer, those that only `kept` quantises included.
        errors: For each quantised layer the norm of what changed over the norm of its weight.
        activations: Scales of the inputs of the layers that were calibrated.
    """

    recipe: Recipe
    layers: dict[str, LayerChoice]
    formats: dict[str, FormatName]
    errors: dict[str, float]
    activations: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
def quantize_policy(policy: PolicyModule, recipe: Recipe | None = None) -> Quantization:
    """Quantises a trained policy, in place; adapters are merged first.

    Args:
        policy: In float32, built.
        recipe: How.

    Returns:
        What was done.

    Raises:
        ConfigError: A pattern matches nothing, nothing is left to quantise, a weight is not finite, or the policy is
            quantised already.
    """
    recipe = recipe or Recipe()
    if quantized_layers(policy):
        raise ConfigError("the policy is quantised already", mend="quantise the checkpoint that it was made from")
    policy.eval()
    policy.merge_lora()
    choices = choose_layers(policy, include=recipe.include, exclude=recipe.exclude, safe_defaults=recipe.safe_defaults)
    formats, errors = _formats(choices, recipe), {}
    for name, kind in formats.items():
        layer = policy.get_submodule(name)
        try:
            errors[name] = relative_error(layer.get_parameter("weight"), kind)
            quantize_layer(layer, kind)
        except ConfigError as error:
            raise ConfigError(error.problem, where=f"{name}.weight", found=error.found, mend=error.mend) from error
    for parameter in policy.parameters():
        parameter.copy_(parameter.to(DTYPES[recipe.kept]))
    policy.requires_grad_(False)
    return Quantization(recipe, choices, {name: kind.name for name, kind in formats.items()}, errors)


def calibrate(policy: PolicyModule, quantization: Quantization, run: Callable[[], object]) -> Quantization:
    """Lets the quantised linear layers cast their inputs to E4M3 from now on, with scales from calibration.

    Args:
        policy: Quantised in one of the FP8 formats.
        quantization: What `quantize_policy` returned.
        run: Acts with the policy on representative observations, a few batches of them.

    Returns:
        The same with the scales.

    Raises:
        ConfigError: The weights are int8, which no kernel multiplies with E4M3, or an input is not finite.
    """
    if quantization.recipe.weights == "int8_row":
        raise ConfigError(
            "activations are calibrated for FP8 weights only",
            where="weights",
            found="int8_row",
            mend="choose an fp8 format, or leave calibration out",
        )
    layers = {
        name: layer
        for name, layer in quantized_layers(policy).items()
        if isinstance(layer, QuantizedLinear) and layer.codes.dtype != torch.int8
    }
    with _observed(layers) as amax:
        run()
    scales = {}
    for name, largest in amax.items():
        if not torch.isfinite(largest):
            raise ConfigError("an activation is not finite in calibration", where=name, found=float(largest))
        scale = (largest.float() / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-12)
        layers[name].input_scale = scale.detach().clone()
        scales[name] = float(scale)
    return replace(quantization, activations=scales)


def _formats(choices: Mapping[str, LayerChoice], recipe: Recipe) -> dict[str, WeightFormat]:
    """The format of each layer that gets one."""
    formats = {name: FORMATS[recipe.weights] for name, choice in choices.items() if choice.quantized}
    if recipe.kept == "int8":
        kind = FORMATS["int8_row"]
        for name, choice in choices.items():
            columns = torch.Size(choice.shape[1:]).numel()
            pays = columns * kind.dtype.itemsize + torch.float32.itemsize < columns * torch.bfloat16.itemsize
            if choice.kept_by_default and pays:
                formats[name] = kind
    return formats


@contextmanager
def _observed(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Largest magnitude of each layer's input within this context."""
    amax: dict[str, Tensor] = {}

    def observer(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def observe(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if inputs[0].numel():
                largest = inputs[0].detach().abs().amax()
                amax[name] = torch.maximum(amax.get(name, largest), largest)

        return observe

    handles = [layer.register_forward_pre_hook(observer(name)) for name, layer in layers.items()]
    try:
        yield amax
    finally:
        for handle in handles:
            handle.remove()
