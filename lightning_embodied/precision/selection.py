"""Which linear layers multiply in FP8, and why the others do not.

Safe defaults keep what is small and sensitive in a policy: what reads actions, states and flow time, what writes
actions, the modulations of adaptive norms, embeddings and language-model heads; in training also the two projections
that attention's values go through, and an action expert's first block. docs/fp8.md has what they are worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from lightning_embodied.errors import ConfigError

_KEPT = {
    "reads actions or states": (
        "action_in*",
        "actions_in*",
        "action_encoder*",
        "state_in*",
        "state_proj*",
        "state_enc*",
    ),
    "reads the flow time": ("time", "time_*", "*time_mlp*", "timestep*", "t_embed*", "temb*"),
    "modulates a norm": ("*norm*", "*modulation*", "*adaln*", "*ada_ln*", "film*"),
    "embeds": ("*embedder", "*embedding", "*embeddings", "*embed_tokens*", "patch_embed*", "pos_embed*"),
    "writes actions": ("final_layer*",),
    "is an adapter": ("lora_*",),
}
"""Patterns of any part of a layer's name, or of the whole if they have a dot."""

_KEPT_LAST = {
    "writes actions or tokens": (
        "*head",
        "action_out*",
        "actions_out*",
        "action_decoder",
        "embed_out",
        "proj_out*",
        "velocity*",
    ),
}
"""Patterns of the last part of a layer's name that is no number: a head's own layers, not a network called head."""

SAFE_DEFAULT = "(safe default)"
"""Ends the reasons that `safe_defaults: false` would let go of."""

KEPT_IN_TRAINING = {
    "carries attention's values": ("v_proj", "o_proj", "out_proj", "to_v", "to_out", "attention_out", "*attn.proj"),
    "first block of an action expert": (
        "expert.*layers.0.*",
        "*.expert.*layers.0.*",
        "*gemma_expert.*layers.0.*",
        "*lm_expert.*layers.0.*",
        "*action_expert.*layers.0.*",
        "*action_head.model.*blocks.0.*",
    ),
}
"""More that stays when a model trains: half of the gradient's error there comes through these few layers."""

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class LayerVerdict:
    """What became of a linear layer.

    Attributes:
        name: Its name in the model.
        fp8: Whether it multiplies in FP8.
        reason: Why, or why not.
        in_features: Width of its input.
        out_features: Width of its output.
    """

    name: str
    fp8: bool
    reason: str
    in_features: int
    out_features: int

    @property
    def weights(self) -> int:
        """Number of its weights, to which its share of the work is proportional."""
        return self.in_features * self.out_features


@dataclass(frozen=True)
class Selection:
    """Rules for the choice.

    Attributes:
        include: Patterns of full names; others stay in high precision.
        exclude: Patterns of full names that stay; stronger than `include`.
        safe_defaults: Whether sensitive layers stay even if included.
        multiple: What in and out features must be multiples of.
        kept: More that stays by default: for each reason patterns of any part of a layer's name, or of the whole if
            they have a dot.
        where: Whose options these are, for error messages.
    """

    include: Sequence[str]
    exclude: Sequence[str]
    safe_defaults: bool
    multiple: int = 1
    kept: Mapping[str, Sequence[str]] = field(default_factory=dict)
    where: str = "FP8Precision"

    def verdict(self, names: Sequence[str], layer: nn.Linear, kind: type[nn.Module]) -> LayerVerdict:
        """Decides on a layer.

        Args:
            names: All names it has in the model; one that must stay keeps the layer.
            layer: The layer.
            kind: Its class, wrappers of sharding looked through.
        """
        reason = self.reason_to_stay(names)
        sizes = layer.in_features, layer.out_features
        if kind is not nn.Linear:
            reason = f"{kind.__name__} is a class of its own"
        elif reason is None and any(size % self.multiple for size in sizes):
            reason = f"{sizes[0]} to {sizes[1]} features: FP8 kernels take multiples of {self.multiple}"
        return LayerVerdict(names[0], reason is None, reason or "included", *sizes)

    def reason_to_stay(self, names: Iterable[str]) -> str | None:
        """Why a layer stays in high precision by its names, any of them; None if nothing keeps it there."""
        return next((reason for name in names if (reason := self._reason_to_stay(name))), None)

    def _reason_to_stay(self, name: str) -> str | None:
        if pattern := _first_match(self.exclude, name):
            return f"excluded by {pattern!r}"
        if not _first_match(self.include, name):
            return "not included"
        return _reason_by_default(name, {**_KEPT, **self.kept}) if self.safe_defaults else None

    def check_patterns(self, names: Iterable[str]) -> None:
        """Raises `ConfigError` if a pattern matches no linear layer; names it."""
        names = list(names)
        for option, patterns in (("include", self.include), ("exclude", self.exclude)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ConfigError(
                        "a pattern matches no linear layer",
                        where=f"{self.where}.{option}",
                        found=pattern,
                        expected="full names such as " + ", ".join(names[:: max(1, len(names) // 4)][:4])
                        if names
                        else "a model with linear layers",
                    )


def plain_name(name: str) -> str:
    """A module's name without what `torch.compile`, activation checkpointing and sharding add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _reason_by_default(name: str, kept: Mapping[str, Sequence[str]]) -> str | None:
    name = name.lower()
    parts = name.split(".")
    last = next((part for part in reversed(parts) if not part.isdigit()), "")
    for reason, patterns in kept.items():
        if any(fnmatchcase(part, pattern) for pattern in patterns for part in ([name] if "." in pattern else parts)):
            return f"{reason} {SAFE_DEFAULT}"
    for reason, patterns in _KEPT_LAST.items():
        if _first_match(patterns, last):
            return f"{reason} {SAFE_DEFAULT}"
    return None


def _first_match(patterns: Sequence[str], name: str) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
