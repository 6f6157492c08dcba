"""Checkpoint directories of GR00T N1.5 as NVIDIA publishes them, read and described.

NVIDIA's `config.json` holds the action head's sizes and, of the backbone, only how many layers are kept; the rest is
in code. Sizes of another backbone are spelled out under `sizes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from lightning_embodied.errors import ConfigError
from lightning_embodied.models.directory import CheckpointDirectory
from lightning_embodied.models.groot.action_head import ActionHeadSizes
from lightning_embodied.models.groot.qwen3 import Qwen3Sizes
from lightning_embodied.models.groot.sizes import GrootSizes
from lightning_embodied.models.groot.transformer import TransformerSizes
from lightning_embodied.models.siglip import SiglipConfig
from lightning_embodied.models.sizes import changed_sizes

_POOLING_HEAD = "backbone.eagle_model.vision_model.vision_model.head."
_LANGUAGE = "backbone.eagle_model.language_model."
_EMBEDDING, _LANGUAGE_HEAD = f"{_LANGUAGE}model.embed_tokens.weight", f"{_LANGUAGE}lm_head.weight"
_MODEL_TYPE = "gr00t_n1_5"
_FIXED_HEAD = {"add_pos_embed": True, "use_vlln": True}
_FIXED_TRANSFORMER = {"final_dropout": True, "positional_embeddings": None}
_FIXED_DIT = {**_FIXED_TRANSFORMER, "interleave_self_attention": True, "norm_type": "ada_norm"}
_FIXED_BACKBONE = {"project_to_dim": None, "reproject_vision": False}
"""Options of NVIDIA's code that change the network and have one value here."""

_TRANSFORMER = ("num_layers", "num_attention_heads", "attention_head_dim", "dropout")
_HEAD = ("hidden_size", "max_state_dim", "max_num_embodiments", "max_seq_len", "num_target_vision_tokens",
         "num_timestep_buckets", "noise_beta_alpha", "noise_beta_beta", "noise_s")  # fmt: skip


class GrootDirectory(CheckpointDirectory):
    """A checkpoint of GR00T N1.5 that is there to be read; see `CheckpointDirectory`."""

    def read_arguments(self) -> dict[str, Any]:
        """Sizes and denoising steps."""
        sizes = _sizes_of(self.config)
        pooled = any(name.startswith(_POOLING_HEAD) for name in self.stored())
        sizes = replace(sizes, vision=replace(sizes.vision, vision_use_head=pooled))
        steps = int(self.config["action_head_cfg"].get("num_inference_timesteps", 4))
        return {"sizes": asdict(sizes), "denoising_steps": steps}

    def places(self, stored: Iterable[str]) -> dict[str, str]:
        """Which stored tensor is which parameter; embedding and language head are one, stored under either name."""
        places = super().places(stored)
        if _LANGUAGE_HEAD in places:
            places.setdefault(_EMBEDDING, places[_LANGUAGE_HEAD])
        return places


def config_of(sizes: GrootSizes, denoising_steps: int, horizon: int | None) -> dict[str, Any]:
    """What `config.json` says of a policy, in NVIDIA's words.

    Args:
        sizes: Of the network.
        denoising_steps: Euler steps to act with.
        horizon: Actions per chunk, if it is known.
    """
    head, published = sizes.head, GrootSizes()
    dit = {**asdict(head.diffusion_model), **_FIXED_DIT, "output_dim": head.hidden_size,
           "cross_attention_dim": head.vl_self_attention.width}  # fmt: skip
    horizons = {} if horizon is None else {"action_horizon": horizon}
    config: dict[str, Any] = {
        "model_type": _MODEL_TYPE,
        "architectures": ["GR00T_N1_5"],
        "action_dim": head.max_action_dim,
        "hidden_size": sizes.language.hidden_size,
        "compute_dtype": "float32",
        **horizons,
        "backbone_cfg": {**_FIXED_BACKBONE, "select_layer": sizes.language.num_hidden_layers},
        "action_head_cfg": {
            **{name: getattr(head, name) for name in _HEAD},
            **_FIXED_HEAD,
            **horizons,
            "action_dim": head.max_action_dim,
            "max_action_dim": head.max_action_dim,
            "input_embedding_dim": head.diffusion_model.width,
            "backbone_embedding_dim": head.vl_self_attention.width,
            "num_inference_timesteps": denoising_steps,
            "diffusion_model_cfg": dit,
            "vl_self_attention_cfg": {**asdict(head.vl_self_attention), **_FIXED_TRANSFORMER},
        },
    }
    layers = sizes.language.num_hidden_layers
    if (
        replace(sizes.vision, vision_use_head=True) != published.vision
        or replace(published.language, num_hidden_layers=layers) != sizes.language
    ):
        config["sizes"] = {"vision": asdict(sizes.vision), "language": asdict(sizes.language)}
    return config


def _sizes_of(config: Mapping[str, Any]) -> GrootSizes:
    backbone, head = config["backbone_cfg"], config["action_head_cfg"]
    dit, attention = head["diffusion_model_cfg"], head["vl_self_attention_cfg"]
    _check(config, {"model_type": _MODEL_TYPE}, "")
    _check(backbone, _FIXED_BACKBONE, "backbone_cfg.")
    _check(head, _FIXED_HEAD, "action_head_cfg.")
    _check(dit, _FIXED_DIT, "action_head_cfg.diffusion_model_cfg.")
    _check(attention, _FIXED_TRANSFORMER, "action_head_cfg.vl_self_attention_cfg.")
    spelled_out = config.get("sizes", {})
    language = replace(Qwen3Sizes(), num_hidden_layers=int(backbone["select_layer"]))
    values = {name: head[name] for name in _HEAD if name in head}
    return GrootSizes(
        vision=changed_sizes(SiglipConfig(), spelled_out.get("vision", {}), "sizes.vision"),
        language=changed_sizes(language, spelled_out.get("language", {}), "sizes.language"),
        head=replace(
            changed_sizes(ActionHeadSizes(), values, "action_head_cfg"),
            max_action_dim=int(head["action_dim"]),
            diffusion_model=_transformer_of(dit),
            vl_self_attention=_transformer_of(attention),
        ),
    )


def _transformer_of(config: Mapping[str, Any]) -> TransformerSizes:
    return TransformerSizes(**{name: config[name] for name in _TRANSFORMER})


def _check(config: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise ConfigError("this cannot be followed", where=where + name, found=config[name], expected=value)
