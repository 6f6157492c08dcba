"""Exact attention over variable-length samples without padding."""

from lightning_embodied.attention.backends import AttentionBackend, attention_backends, choose_backend, force_backend
from lightning_embodied.attention.blockwise import BlockLayout, PrefixSuffixLayout
from lightning_embodied.attention.varlen import varlen_attention

__all__ = [
    "AttentionBackend",
    "BlockLayout",
    "PrefixSuffixLayout",
    "attention_backends",
    "choose_backend",
    "force_backend",
    "varlen_attention",
]
