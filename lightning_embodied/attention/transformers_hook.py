"""Hugging Face `transformers` models on packed tokens, through their public attention interface.

A language model gets one row of concatenated samples and is told where they begin; nothing is guessed from position
ids, as transformers' own packing does, which takes a gap that a missing camera leaves for a new sample. Weights load
unchanged, and no mask is ever built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_embodied.attention.blockwise import BlockLayout
from lightning_embodied.attention.varlen import varlen_attention
from lightning_embodied.errors import ConfigError, import_extra

TRANSFORMERS_ATTENTION = "lightning_embodied_varlen"
"""Name to give transformers as `attn_implementation`, once `register_transformers_attention` was called."""

_PICTURE_TOWERS = ("siglip_vision_model",)
_CANNOT = ("softcap", "s_aux", "position_bias", "head_mask")


class TokenPacking:
    """Where the samples of a packed row begin and who sees whom; handed to the model's `forward` as `packing=`.

    Args:
        cu_seqlens: int32 `[B + 1]`, from 0 to the number of tokens: sample `b` owns tokens `cu[b]:cu[b + 1]`.
        max_seqlen: Longest sample in tokens.
        causal: Whether a token sees only its sample's tokens up to itself, or all of them.
        prefix_lengths: Tokens of each sample's prefix, which see the whole prefix whatever `causal` says; the tokens
            after them see the prefix and, causally, themselves. PaliGemma: pictures and prompt. Needs `causal`.

    Raises:
        ConfigError: Prefixes without `causal`, another number of prefixes than samples, or one longer than its sample.
    """

    def __init__(
        self, cu_seqlens: Tensor, max_seqlen: int, *, causal: bool, prefix_lengths: Sequence[int] | None = None
    ) -> None:
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = max_seqlen
        self.causal = causal
        self._layout = None if prefix_lengths is None else self._blocks(prefix_lengths)

    def _blocks(self, prefix_lengths: Sequence[int]) -> BlockLayout:
        lengths = self.cu_seqlens.diff().tolist()
        fits = len(lengths) == len(prefix_lengths) and all(
            0 <= prefix <= length for prefix, length in zip(prefix_lengths, lengths, strict=True)
        )
        if not (self.causal and fits):
            raise ConfigError(
                "the prefixes do not fit the samples",
                where="TokenPacking(prefix_lengths=…)",
                found=f"prefixes {list(prefix_lengths)}, samples {lengths}, causal={self.causal}",
                expected="one prefix a sample, no longer than it, and causal=True for what follows it",
            )
        blocks = [[prefix, *[1] * (length - prefix)] for prefix, length in zip(prefix_lengths, lengths, strict=True)]
        return BlockLayout(blocks, self.cu_seqlens.device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention of `[T, Hq, D]` queries to `[T, Hkv, D]` keys under this packing's rule."""
        if self._layout is not None:
            return self._layout.attend(query, key, value, scale=scale)
        cu, longest = self.cu_seqlens, self.max_seqlen
        return varlen_attention(query, key, value, cu, cu, longest, longest, causal=self.causal, scale=scale)


def register_transformers_attention() -> str:
    """Makes `TRANSFORMERS_ATTENTION` known to transformers; may be called again.

    A language model is then called with one row: `model(input_ids=ids[None], position_ids=positions[None],
    packing=TokenPacking(…))`, without `attention_mask`. SigLIP's vision tower takes pictures as rows, as always; each
    is a sample of its own, so it needs no packing, inside PaliGemma as well.

    Returns:
        The name, for `from_pretrained(…, attn_implementation=name)` or `model.set_attn_implementation(name)`.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    transformers = import_extra("transformers", "models")
    transformers.AttentionInterface.register(TRANSFORMERS_ATTENTION, _attend)
    transformers.AttentionMaskInterface.register(TRANSFORMERS_ATTENTION, _no_mask)
    return TRANSFORMERS_ATTENTION


def _no_mask(*_: object, attention_mask: Tensor | None = None, **__: object) -> None:
    """What transformers asks for a mask: there is none, and padding it would have to hide is refused."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise _cannot("attention_mask", "padding", "none: packed rows hold no padding")


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: TokenPacking | None = None,
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """What transformers calls: `[rows, heads, tokens, D]` to `[rows, tokens, heads, D]`, and no attention weights."""
    name = type(module).__name__
    if packing is None and getattr(getattr(module, "config", None), "model_type", None) in _PICTURE_TOWERS:
        packing = _one_sample_a_row(query)
    elif packing is None:
        raise ConfigError(
            "a transformers model runs on packed attention without being told where samples begin",
            where=name,
            found="no packing",
            mend="call the model with packing=TokenPacking(cu_seqlens, max_seqlen, causal=…)",
        )
    elif query.shape[0] != 1:
        raise _cannot(name, f"{query.shape[0]} rows", "one row that holds all samples: input_ids[None]")
    _check_options(name, packing, attention_mask, dropout, options)
    if key.shape[2] != query.shape[2]:
        raise _cannot(name, f"{query.shape[2]} queries, {key.shape[2]} keys", "no cache of earlier tokens")
    if torch.is_autocast_enabled(query.device.type):  # as torch's own attention does; norms may have left float32
        query, key, value = (rows.to(torch.get_autocast_dtype(query.device.type)) for rows in (query, key, value))
    query_rows, key_rows, value_rows = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    attended = packing.attend(query_rows, key_rows, value_rows, scaling)
    return attended.view(query.shape[0], -1, *attended.shape[1:]), None


def _one_sample_a_row(query: Tensor) -> TokenPacking:
    rows, tokens = query.shape[0], query.shape[2]
    cu_seqlens = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * tokens
    return TokenPacking(cu_seqlens, tokens, causal=False)


def _check_options(
    name: str, packing: TokenPacking, attention_mask: Tensor | None, dropout: float, options: dict[str, Any]
) -> None:
    if attention_mask is not None:
        raise _cannot(name, f"an attention mask {list(attention_mask.shape)}", "none: packing says who sees whom")
    if dropout:
        raise _cannot(name, f"attention dropout {dropout}", "attention_dropout=0 in the model's config")
    window = options.get("sliding_window")
    if window is not None and window < packing.max_seqlen:
        raise _cannot(name, f"a sliding window of {window} tokens", f"samples within it (longest {packing.max_seqlen})")
    for option in _CANNOT:
        if options.get(option) is not None:
            raise _cannot(name, f"{option}={options[option]}"[:80], f"a model without {option}")


def _cannot(name: str, found: str, expected: str) -> ConfigError:
    return ConfigError("packed attention cannot compute this", where=name, found=found, expected=expected)
