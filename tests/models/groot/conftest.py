"""The golden files of N1.5's action head and backbone, and tiny networks with their weights."""

import json
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lightning_embodied.models.groot.action_head import ActionHead, ActionHeadSizes
from lightning_embodied.models.groot.backbone import EagleBackbone
from lightning_embodied.models.groot.qwen3 import Qwen3Sizes, Rows
from lightning_embodied.models.groot.transformer import TransformerSizes
from lightning_embodied.models.siglip import SiglipConfig

FIXTURES = Path(__file__).parents[2] / "fixtures"
HEAD, BACKBONE = FIXTURES / "groot_n15", FIXTURES / "groot_n15_backbone"
TINY_HEAD = ActionHeadSizes(
    hidden_size=24,
    max_state_dim=7,
    max_action_dim=6,
    max_num_embodiments=3,
    max_seq_len=16,
    num_target_vision_tokens=5,
    diffusion_model=TransformerSizes(4, 4, 8),
    vl_self_attention=TransformerSizes(2, 4, 12),
)
TINY_VISION = SiglipConfig(24, 40, 2, 2, 28, 14, vision_use_head=False)
TINY_LANGUAGE = Qwen3Sizes(120, 48, 64, 2, 4, 2, 16)


def golden(folder):
    return {name: torch.from_numpy(value) for name, value in np.load(folder / "golden.npz").items()}


def config(folder):
    return json.loads((folder / "config.json").read_text())


def rows_of(lengths):
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return Rows(torch.cat([torch.arange(length) for length in lengths]), cu_seqlens, max(lengths))


@pytest.fixture
def head():
    made = ActionHead(TINY_HEAD).eval()
    made.load_state_dict(load_file(HEAD / "action_head.safetensors"))
    return made


@pytest.fixture
def backbone():
    made = EagleBackbone(TINY_VISION, TINY_LANGUAGE)
    weights = load_file(BACKBONE / "backbone.safetensors")
    told = made.load_state_dict({name.removeprefix("backbone."): w for name, w in weights.items()}, strict=False)
    assert told.missing_keys == ["eagle_model.language_model.lm_head.weight"]  # tied
    assert not told.unexpected_keys
    return made
