"""The `config.json` of LeRobot's and openpi's pi0 and pi0.5 checkpoints, read and written.

LeRobot and openpi name the published towers (`gemma_2b`, `gemma_300m`) and know no others, so other sizes are spelled
out under `sizes`, by the names of those projects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lightning_embodied.errors import ConfigError
from lightning_embodied.models.pi.sizes import GEMMA_2B, GEMMA_300M, GemmaSizes, PiSizes
from lightning_embodied.models.siglip import SiglipConfig
from lightning_embodied.models.spec import PolicySpec

VARIANTS = {"gemma_2b": GEMMA_2B, "gemma_300m": GEMMA_300M}
_GEMMA = {"heads": "num_heads", "kv_heads": "num_kv_heads", "mlp_width": "mlp_dim"} | {
    name: name for name in ("width", "depth", "head_dim")
}
_VISION = {"num_hidden_layers": "layers", "num_attention_heads": "heads"} | {
    name: name for name in ("hidden_size", "intermediate_size", "patch_size", "image_size")
}
_FIXED = {"min_period": 4e-3, "max_period": 4.0, "use_visual_memory": False, "use_proprioceptive_memory": False}
"""Options of LeRobot that change the network and have one value here."""
_NORMALIZATION = {"quantile": "QUANTILES", "mean_std": "MEAN_STD", "min_max": "MIN_MAX"}
"""Our scalings by LeRobot's names; `lerobot_` before ours says that LeRobot's own formula is used."""


def sizes_of(config: Mapping[str, Any], lerobot_type: str) -> PiSizes:
    """Sizes that a configuration describes.

    Args:
        config: Content of `config.json`.
        lerobot_type: The policy expected, `pi0` or `pi05`; openpi does not say which it is.

    Raises:
        ConfigError: It is of another policy, an option has a value that cannot be followed, or a tower is unknown.
        KeyError: A size is missing.
    """
    for name, value in {"type": lerobot_type, **_FIXED}.items():
        if config.get(name, value) != value:
            raise ConfigError("this cannot be followed", where=name, found=config[name], expected=value)
    if "sizes" in config:
        return _spelled_out(config["sizes"])
    names = [str(config[f"{tower}_variant"]) for tower in ("paligemma", "action_expert")]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ConfigError("unknown tower", found=", ".join(unknown), expected=", ".join(VARIANTS))
    image_size = config.get("image_resolution", [SiglipConfig.image_size])[0]
    width = config.get("action_dim", PiSizes.max_action_dim)  # openpi's name, for states as well
    return PiSizes(
        vision=replace(PiSizes.vision, image_size=int(image_size)),
        language=VARIANTS[names[0]],
        expert=VARIANTS[names[1]],
        max_action_dim=int(config.get("max_action_dim", width)),
        max_state_dim=int(config.get("max_state_dim", width)),
    )


def denoising_steps_of(config: Mapping[str, Any]) -> int:
    """Euler steps that the checkpoint acts with; 10 if it does not say."""
    return int({"num_inference_steps": 10, **config.get("sizes", {}), **config}["num_inference_steps"])


def config_of(
    lerobot_type: str, sizes: PiSizes, denoising_steps: int, spec: PolicySpec | None, scalings: tuple[str, str]
) -> dict[str, Any]:
    """What `config.json` says of a policy.

    Args:
        lerobot_type: `pi0` or `pi05`.
        sizes: Of the network.
        denoising_steps: Euler steps to act with.
        spec: Features and horizon, if they are known.
        scalings: Normalisation of states and of actions.
    """
    state, action = (_NORMALIZATION[name.removeprefix("lerobot_")] for name in scalings)
    towers = {size: name for name, size in VARIANTS.items()}
    config: dict[str, Any] = {
        "type": lerobot_type,
        "max_state_dim": sizes.max_state_dim,
        "max_action_dim": sizes.max_action_dim,
        "num_inference_steps": denoising_steps,
        "image_resolution": [sizes.vision.image_size] * 2,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": state, "ACTION": action},
    }
    if spec is not None:
        config |= {"chunk_size": spec.action_horizon, "n_action_steps": spec.action_horizon, **_features(spec)}
    language, expert = towers.get(sizes.language), towers.get(sizes.expert)
    published = {**asdict(sizes.vision), "image_size": SiglipConfig.image_size} == asdict(PiSizes.vision)
    if language and expert and published and sizes.vocab_size == PiSizes.vocab_size:
        return config | {"paligemma_variant": language, "action_expert_variant": expert}
    return config | {"sizes": _spell_out(sizes)}


def _features(spec: PolicySpec) -> dict[str, Any]:
    """LeRobot's description of what goes in and comes out; several state vectors count as one."""
    inputs = {
        key: {"type": "VISUAL", "shape": [feature.shape[2], *feature.shape[:2]]}
        for key, feature in spec.features.items()
        if feature.is_visual
    }
    state = sum(math.prod(spec.features[key].shape) for key in spec.state_keys)
    if state:
        inputs["observation.state"] = {"type": "STATE", "shape": [state]}
    action = {"type": "ACTION", "shape": list(spec.features[spec.action_key].shape)}
    return {"input_features": inputs, "output_features": {"action": action}}


def _spell_out(sizes: PiSizes) -> dict[str, Any]:
    return {
        "paligemma": {**_renamed(sizes.language, _GEMMA), "vocab_size": sizes.vocab_size},
        "action_expert": _renamed(sizes.expert, _GEMMA),
        "siglip": _renamed(sizes.vision, _VISION),
        "max_action_dim": sizes.max_action_dim,
        "max_state_dim": sizes.max_state_dim,
    }


def _renamed(sizes: GemmaSizes | SiglipConfig, names: Mapping[str, str]) -> dict[str, int]:
    return {theirs: getattr(sizes, ours) for ours, theirs in names.items()}


def _spelled_out(values: Mapping[str, Any]) -> PiSizes:
    def tower(name: str, names: Mapping[str, str]) -> dict[str, int]:
        return {ours: int(values[name][theirs]) for ours, theirs in names.items()}

    return PiSizes(
        vision=SiglipConfig(**tower("siglip", _VISION), vision_use_head=False),
        language=GemmaSizes(**tower("paligemma", _GEMMA)),
        expert=GemmaSizes(**tower("action_expert", _GEMMA)),
        vocab_size=int(values["paligemma"]["vocab_size"]),
        max_action_dim=int(values["max_action_dim"]),
        max_state_dim=int(values["max_state_dim"]),
    )
