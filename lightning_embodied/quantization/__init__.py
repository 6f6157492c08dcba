"""Policies in eight bits for robots: quantisers, which layers, and a directory that torch and safetensors read.

Names are imported when they are first used, so that a robot needs nothing of what quantising needs.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_embodied.quantization.formats import (
        FORMATS,
        WeightFormat,
        dequantize,
        format_of,
        quantize,
        relative_error,
    )

__all__ = ["FORMATS", "WeightFormat", "dequantize", "format_of", "quantize", "relative_error"]

_MODULES = {"formats": ("FORMATS", "WeightFormat", "dequantize", "format_of", "quantize", "relative_error")}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            value: object = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
