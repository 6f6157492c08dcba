"""The vision tower against transformers' own, weight for weight, and against a golden file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import SiglipVisionConfig
from transformers import SiglipVisionModel as TheirModel

from lightning_embodied.errors import ConfigError
from lightning_embodied.models.siglip import SiglipConfig, SiglipVisionModel

GOLDEN = Path(__file__).parents[1] / "fixtures" / "transformers_packing"
SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def test_same_tokens_pooled_vectors_and_gradients_as_transformers():
    torch.manual_seed(0)
    theirs = TheirModel(SiglipVisionConfig(**SIZES)).eval()
    ours = SiglipVisionModel(SiglipConfig(**SIZES))
    ours.vision_model.load_state_dict(theirs.state_dict())
    pictures = torch.rand(3, 3, 28, 28) * 2 - 1
    expected = theirs(pictures)
    tokens = ours(pictures)
    assert torch.allclose(tokens, expected.last_hidden_state, atol=1e-5)
    assert torch.allclose(ours.pool(tokens), expected.pooler_output, atol=1e-5)
    weights = torch.randn_like(tokens)
    (expected.last_hidden_state * weights).sum().backward()
    (tokens * weights).sum().backward()
    references = dict(theirs.named_parameters())
    for name, parameter in ours.vision_model.named_parameters():
        if name.startswith("head."):
            assert not parameter.requires_grad
        else:
            assert torch.allclose(parameter.grad, references[name].grad, rtol=1e-4, atol=1e-5), name


def test_golden_picture_features():
    weights = load_file(GOLDEN / "paligemma.safetensors")
    golden = np.load(GOLDEN / "paligemma.npz")
    sizes = {**json.loads((GOLDEN / "config.json").read_text())["paligemma"]["vision"], "vision_use_head": False}
    del sizes["hidden_act"]
    tower = SiglipVisionModel(SiglipConfig(**sizes, image_size=28, patch_size=14))
    prefix = "model.vision_tower."
    tower.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
    pictures = torch.from_numpy(np.stack([golden[f"{i}/pixel_values"] for i in range(4)]))
    projector = [weights[f"model.multi_modal_projector.linear.{name}"] for name in ("weight", "bias")]
    features = torch.nn.functional.linear(tower(pictures), *projector)
    expected = torch.from_numpy(np.stack([golden[f"{i}/image_features"] for i in range(4)]))
    assert torch.allclose(features, expected, atol=2e-5)


def test_no_pictures_give_no_tokens_and_zero_gradients():
    tower = SiglipVisionModel(SiglipConfig(**SIZES))
    tokens = tower(torch.zeros(0, 3, 28, 28))
    assert tokens.shape == (0, 4, 24)
    tokens.sum().backward()
    assert all(not p.grad.any() for p in tower.parameters() if p.requires_grad)


def test_pictures_of_another_size_are_refused():
    tower = SiglipVisionModel(SiglipConfig(**SIZES))
    with pytest.raises(ConfigError, match="size"):
        tower(torch.zeros(1, 3, 32, 32))
