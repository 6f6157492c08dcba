"""Tiny GR00T policies, samples in their encoding, and a checkpoint directory made of the golden weights."""

import json

import torch
from safetensors.torch import load_file, save_file

from lightning_embodied.models import GrootN15Policy
from lightning_embodied.packing import SampleEncoder, VarlenPackingCollator
from tests.models.conftest import TinyDataModule, make_spec
from tests.models.groot.conftest import BACKBONE, HEAD, config

SIZES = {
    "vision": {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 2, "image_size": 16, "patch_size": 8},
    "language": {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
                 "head_dim": 16},
    "head": {
        "hidden_size": 24, "max_num_embodiments": 3, "max_seq_len": 8, "max_action_dim": 6, "max_state_dim": 7,
        "diffusion_model": {"num_attention_heads": 2},
        "vl_self_attention": {"num_attention_heads": 2, "attention_head_dim": 12},
    },
}  # fmt: skip


def make_encoder(**arguments) -> SampleEncoder:
    return SampleEncoder(**{"image_size": (16, 16), "patch_size": 8, "prompt": "eagle", **arguments})


def make_collator() -> VarlenPackingCollator:
    return VarlenPackingCollator(make_encoder())


class GrootData(TinyDataModule):
    """The synthetic samples, encoded for GR00T."""

    def __init__(self, samples, batch_size):
        super().__init__(samples, batch_size)
        self.collator = make_collator()


def make_arguments(**changes) -> dict:
    return {"preset": "tiny", "sizes": SIZES, "embodiment_id": 1, **changes}


def make_policy(**arguments) -> GrootN15Policy:
    """A tiny policy in evaluation mode, all weights random."""
    torch.manual_seed(0)
    policy = GrootN15Policy(**make_arguments(**arguments))
    policy.spec = make_spec(encoder=make_encoder().to_config())
    policy.configure_model()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return policy.eval()


def golden_config() -> dict:
    """`config.json` in NVIDIA's words for the network of the golden files."""
    entry = config(BACKBONE)
    vision = {name: value for name, value in entry["vision_config"].items() if name not in ("model_type", "hidden_act")}
    language = {
        name: value
        for name, value in entry["text_config"].items()
        if name not in ("architectures", "tie_word_embeddings")
    }
    return {
        "model_type": "gr00t_n1_5",
        "action_head_cfg": config(HEAD)["action_head_cfg"],
        "backbone_cfg": {"select_layer": entry["select_layer"], "project_to_dim": None, "tune_llm": False},
        "sizes": {"vision": vision, "language": {**language, "num_hidden_layers": entry["select_layer"]}},
    }


def golden_weights() -> dict:
    head = load_file(HEAD / "action_head.safetensors")
    return {**load_file(BACKBONE / "backbone.safetensors"), **{f"action_head.{name}": w for name, w in head.items()}}


def write_golden(folder, weights=None, configuration=None, shards=1):
    """A checkpoint directory, whole or in shards."""
    weights = weights or golden_weights()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(configuration or golden_config()))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = sorted(weights)
    places = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: weights[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder
