"""Which layers are quantised, and what that makes of the size of a policy."""

import pytest
import torch
from torch import nn

from lightning_embodied.errors import ConfigError
from lightning_embodied.quantization import FORMATS, choose_layers, planned_bytes
from lightning_embodied.quantization.choice import summary
from tests.models.conftest import make_policy


def qwen_vl_3b():
    """Qwen2.5-VL-3B as published, without its weights."""
    transformers = pytest.importorskip("transformers")
    text = {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    with torch.device("meta"):
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    model.tie_weights()
    return model


def test_qwen_vl_3b_shrinks_as_much_as_the_recipe_says():
    """36.6 % off the 16-bit model with the vision tower and embeddings left alone."""
    model = qwen_vl_3b()
    assert sum(parameter.numel() for parameter in model.parameters()) == 3_754_622_976  # as published
    choices = choose_layers(model)
    before = planned_bytes(model, choices, None, torch.bfloat16)
    after = planned_bytes(model, choices, FORMATS["fp8_block"], torch.bfloat16)
    assert before == 2 * 3_754_622_976
    assert 100 * (1 - after / before) == pytest.approx(36.6, abs=1)
    chosen = {name for name, choice in choices.items() if choice.quantized}
    assert len(chosen) == 36 * 7
    assert all(name.startswith("model.language_model.layers.") for name in chosen)
    assert "pictures" in choices["model.visual.blocks.3.mlp.up_proj"].reason


def test_a_policy_keeps_what_is_sensitive():
    choices = choose_layers(make_policy())
    kept = {name: choice.reason for name, choice in choices.items() if not choice.quantized}
    for name, reason in {
        "token_embedding": "embeds",
        "image_stem.layers.0": "sees pictures",
        "state_in.0": "reads actions or states",
        "expert.action_in": "reads actions or states",
        "expert.action_out": "writes actions",
        "expert.time.linear_in": "flow time",
        "expert.layers.0.modulation": "modulates a norm",
    }.items():
        assert reason in kept[name]
    everything = choose_layers(make_policy(), safe_defaults=False)
    assert all(choice.quantized for choice in everything.values())
    assert len(everything) == len(choices)
    text = summary(choices, {name: "fp8_row" for name, choice in choices.items() if choice.quantized})
    assert f"{len(choices) - len(kept)} of {len(choices)} layers" in text
    assert "1 kept, embeds (safe default): token_embedding" in text


def test_patterns_choose():
    chosen = {
        n for n, c in choose_layers(make_policy(), include=["*.mlp.*"], exclude=["expert.*"]).items() if c.quantized
    }
    assert chosen
    assert all(name.startswith("prefix.") and ".mlp." in name for name in chosen)
    for option in ("include", "exclude"):
        with pytest.raises(ConfigError, match=rf"quantize\.{option}"):
            choose_layers(make_policy(), **{option: ["*.wings"]})
    with pytest.raises(ConfigError, match="no layer is left"):
        choose_layers(make_policy(), exclude=["*"])


def test_tied_weights_and_own_classes_stay():
    class Own(nn.Linear):
        pass

    module = nn.ModuleDict({"table": nn.Embedding(8, 16), "words": nn.Linear(16, 8, bias=False), "own": Own(16, 16)})
    module["words"].weight = module["table"].weight
    module["plain"] = nn.Linear(16, 16)
    choices = choose_layers(module, safe_defaults=False)
    assert [name for name, choice in choices.items() if choice.quantized] == ["plain"]
    assert "shares its weight" in choices["words"].reason
    assert "Own is a class of its own" in choices["own"].reason


def test_convolutions_are_kept_by_default():
    module = nn.ModuleDict({"mixer": nn.Conv2d(3, 4, 2), "linear": nn.Linear(4, 4)})
    assert "Conv2d (safe default)" in choose_layers(module)["mixer"].reason
    assert choose_layers(module, safe_defaults=False)["mixer"].quantized


@pytest.mark.parametrize("kind", FORMATS.values(), ids=lambda kind: kind.name)
def test_planned_size_is_the_size(kind):
    module = nn.Sequential(nn.Linear(300, 130), nn.Linear(130, 7, bias=False))
    choices = choose_layers(module)
    rows = {"block": 2 * 3 + 1 * 2, "row": 137, "tensor": 2}[kind.shared]
    expected = 300 * 130 + 130 * 7 + 4 * rows + 2 * 130
    assert planned_bytes(module, choices, kind, torch.bfloat16) == expected
    assert planned_bytes(module, choices, None, torch.float32) == 4 * (300 * 130 + 130 * 7 + 130)
