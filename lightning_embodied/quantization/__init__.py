"""Policies in eight bits for robots: quantisers, which layers, and a directory that torch and safetensors read.

Names are imported when they are first used, so that a robot needs nothing of what quantising needs.
"""

from typing import TYPE_CHECKING

from lightning_embodied.lazy import on_first_use

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

__getattr__ = on_first_use(
    __name__,
    {
        "DenoisingStep": "onnx_export",
        "FORMATS": "formats",
        "LayerChoice": "choice",
        "MANIFEST": "manifest",
        "Quantization": "quantizing",
        "Recipe": "quantizing",
        "WeightFormat": "formats",
        "calibrate": "quantizing",
        "choose_layers": "choice",
        "dequantize": "formats",
        "example_observation": "onnx_export",
        "export_denoising_step": "onnx_export",
        "format_of": "formats",
        "load_policy": "loading",
        "planned_bytes": "choice",
        "quantize": "formats",
        "quantize_policy": "quantizing",
        "relative_error": "formats",
        "save_policy": "saving",
    },
)
