"""Refuses, before anything is built, arguments and encoders that a GR00T N1.5 could not work with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_embodied.errors import ConfigError
from lightning_embodied.models.spec import PolicySpec

if TYPE_CHECKING:
    from lightning_embodied.models.groot.policy import GrootN15Policy

_PARTS = ("vision", "language", "head")
_PROMPTS = ("eagle", "pi0")
"""Those without a state token: the head reads the state. `pi0` is the bare instruction, for training from scratch."""


def check_options(policy: GrootN15Policy) -> None:
    """Checks the arguments of the class.

    Raises:
        ConfigError: A number is below 1, there is no such part, or the head has no such robot.
    """
    for option in ("noise_samples_per_observation", "denoising_steps"):
        if getattr(policy, option) < 1:
            raise _wrong(option, "too small", getattr(policy, option), ">= 1")
    for part in policy.activation_checkpointing:
        if part not in _PARTS:
            raise _wrong("activation_checkpointing", "there is no such part", part, f"a list of {', '.join(_PARTS)}")
    given, limit = policy.embodiment_id, policy.network_sizes.head.max_num_embodiments
    numbers = given if isinstance(given, Sequence) else [given]
    if not numbers or any(not 0 <= number < limit for number in numbers):
        expected = f"numbers from 0 to {limit - 1} (sizes: head.max_num_embodiments)"
        raise _wrong("embodiment_id", "the action head knows no such robot", given, expected)


def _wrong(option: str, problem: str, found: object, expected: str) -> ConfigError:
    return ConfigError(problem, where=f"GrootN15Policy({option}=…)", found=found, expected=expected)


def check_encoder(policy: GrootN15Policy, spec: PolicySpec) -> None:
    """Checks that samples are encoded as the network reads them.

    Raises:
        ConfigError: Prompt, picture or patch size, vocabulary, horizon, or width of states or actions do not fit.
    """
    encoder, sizes = policy.encoder, policy.network_sizes
    if encoder.prompt not in _PROMPTS:
        raise ConfigError(
            "the encoder writes another prompt than the policy reads",
            where="SampleEncoder: prompt",
            found=encoder.prompt,
            expected=" or ".join(_PROMPTS),
            mend="set `prompt: eagle` of the encoder",
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
    if encoder.words > sizes.language.vocab_size:
        raise ConfigError(
            "the tokenizer has more tokens than the policy has embeddings",
            where="SampleEncoder: tokenizer",
            found=f"{encoder.words} tokens",
            expected=f"at most {sizes.language.vocab_size} (sizes: language.vocab_size)",
            mend="pretrained weights need Eagle's tokenizer, which is Qwen's with a few tokens more",
        )
    limits = (
        ("action chunks", spec.action_horizon, "head.max_seq_len", sizes.head.max_seq_len),
        ("actions", policy.action_normalizer.dim, "head.max_action_dim", sizes.head.max_action_dim),
        ("states", policy.state_normalizer.dim, "head.max_state_dim", sizes.head.max_state_dim),
    )
    for what, found, option, limit in limits:
        if found > limit:
            raise ConfigError(
                f"the {what} of the data are longer than the policy's",
                where=f"sizes: {option}",
                found=found,
                expected=f"at most {limit}",
                mend="raise it; pretrained weights then no longer fit",
            )
