"""Policies in eight bits for robots: quantisers, which layers, and a directory that torch and safetensors read.

Names are imported when they are first used, so that a robot needs nothing of what quantising needs.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_embodied.quantization.choice import LayerChoice, choose_layers, planned_bytes
    from lightning_embodied.quantization.formats import (
        FORMATS,
        WeightFormat,
        dequantize,
        format_of,
        quantize,
        relative_error,
    )
    from lightning_embodied.quantization.loading import load_policy
    from lightning_embodied.quantization.manifest import MANIFEST
    from lightning_embodied.quantization.onnx_export import DenoisingStep, example_observation, export_denoising_step
    from lightning_embodied.quantization.quantizing import Quantization, Recipe, calibrate, quantize_policy
    from lightning_embodied.quantization.saving import save_policy

__all__ = [
    "FORMATS",
    "MANIFEST",
    "DenoisingStep",
    "LayerChoice",
    "Quantization",
    "Recipe",
    "WeightFormat",
    "calibrate",
    "choose_layers",
    "dequantize",
    "example_observation",
    "export_denoising_step",
    "format_of",
    "load_policy",
    "planned_bytes",
    "quantize",
    "quantize_policy",
    "relative_error",
    "save_policy",
]

_MODULES = {
    "choice": ("LayerChoice", "choose_layers", "planned_bytes"),
    "formats": ("FORMATS", "WeightFormat", "dequantize", "format_of", "quantize", "relative_error"),
    "loading": ("load_policy",),
    "manifest": ("MANIFEST",),
    "onnx_export": ("DenoisingStep", "example_observation", "export_denoising_step"),
    "quantizing": ("Quantization", "Recipe", "calibrate", "quantize_policy"),
    "saving": ("save_policy",),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            value: object = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
