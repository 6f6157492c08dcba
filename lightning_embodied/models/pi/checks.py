"""Refuses, before anything is built, arguments and encoders that a pi0 or pi0.5 could not work with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_embodied.errors import ConfigError
from lightning_embodied.models.spec import PolicySpec

if TYPE_CHECKING:
    from lightning_embodied.models.pi.policy import PiPolicy

PARTS = ("nothing", "vision", "prefix")
TOWERS = ("vision", "language", "expert")


def check_options(policy: PiPolicy) -> None:
    """Checks the arguments of the class.

    Raises:
        ConfigError: A number is below 1, or there is no such part or tower.
    """
    name = type(policy).__name__
    for option in ("noise_samples_per_observation", "denoising_steps"):
        if getattr(policy, option) < 1:
            raise ConfigError("too small", where=f"{name}({option}=…)", found=getattr(policy, option), expected=">= 1")
    if policy.freeze_parts not in PARTS:
        raise ConfigError(
            "there is no such part to freeze",
            where=f"{name}(freeze=…)",
            found=policy.freeze_parts,
            expected=", ".join(PARTS),
        )
    for tower in policy.activation_checkpointing:
        if tower not in TOWERS:
            raise ConfigError(
                "there is no such tower",
                where=f"{name}(activation_checkpointing=…)",
                found=tower,
                expected=f"a list of {', '.join(TOWERS)}",
            )


def check_encoder(policy: PiPolicy, spec: PolicySpec) -> None:
    """Checks that samples are encoded as the network reads them.

    Raises:
        ConfigError: Prompt, picture or patch size, vocabulary, or width of states or actions do not fit.
    """
    encoder, sizes = policy.encoder, policy.network_sizes
    prompts = ("pi05", "pi0") if policy.adaptive else ("pi0",)
    if encoder.prompt not in prompts:
        raise ConfigError(
            "the encoder writes another prompt than the policy reads",
            where="SampleEncoder: prompt",
            found=encoder.prompt,
            expected=" or ".join(prompts),
            mend=f"set `prompt: {prompts[0]}` of the encoder",
        )
    wanted = (sizes.vision.image_size,) * 2, sizes.vision.patch_size
    if (encoder.image_size, encoder.patch_size) != wanted:
        raise ConfigError(
            "the encoder makes other patches than the policy reads",
            where="SampleEncoder: image_size, patch_size",
            found=f"{list(encoder.image_size)}, {encoder.patch_size}",
            expected=f"{list(wanted[0])}, {wanted[1]}",
            mend="set these in the encoder, or `sizes: {vision: {image_size: …, patch_size: …}}` of the policy",
        )
    if encoder.words > sizes.vocab_size:
        raise ConfigError(
            "the tokenizer has more tokens than the policy has embeddings",
            where="SampleEncoder: tokenizer",
            found=f"{encoder.words} tokens",
            expected=f"at most {sizes.vocab_size} (sizes: vocab_size)",
            mend="pretrained policies need PaliGemma's tokenizer: `tokenizer: google/paligemma-3b-pt-224`",
        )
    _check_width("actions", policy.action_normalizer.dim, "max_action_dim", sizes.max_action_dim)
    if not policy.adaptive:
        _check_width("states", policy.state_normalizer.dim, "max_state_dim", sizes.max_state_dim)


def _check_width(what: str, found: int, option: str, limit: int) -> None:
    if found > limit:
        raise ConfigError(
            f"the {what} of the data are wider than the policy's",
            where=f"sizes: {option}",
            found=f"{found} dimensions",
            expected=f"at most {limit}",
            mend=f"raise it: `sizes: {{{option}: {found}}}`; pretrained weights then no longer fit",
        )
