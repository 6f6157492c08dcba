"""Exact attention over variable-length samples without padding."""

from lightning_embodied.attention.backends import AttentionBackend, attention_backends, choose_backend, force_backend
from lightning_embodied.attention.blockwise import BlockLayout, PrefixSuffixLayout
from lightning_embodied.attention.transformers_hook import (
    TRANSFORMERS_ATTENTION,
    TokenPacking,
    register_transformers_attention,
)
from lightning_embodied.attention.varlen import varlen_attention

__all__ = [
    "TRANSFORMERS_ATTENTION",
    "AttentionBackend",
    "BlockLayout",
    "PrefixSuffixLayout",
    "TokenPacking",
    "attention_backends",
    "choose_backend",
    "force_backend",
    "register_transformers_attention",
    "varlen_attention",
]
