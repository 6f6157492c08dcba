"""transformers' models run packed against golden files of every sample run alone, from the same weights."""

import json
import re
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma2Model,
    GemmaConfig,
    GemmaModel,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Qwen3Config,
    Qwen3Model,
    SiglipTextConfig,
    SiglipTextModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from lightning_embodied.attention import TokenPacking, register_transformers_attention
from lightning_embodied.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "fixtures" / "transformers_packing"
CONFIG = json.loads((GOLDEN / "config.json").read_text())
MODELS = {"qwen3": (Qwen3Model, Qwen3Config), "gemma": (GemmaModel, GemmaConfig)}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size")  # fmt: skip
ATOL = 2e-5


def language_config(name):
    entry = CONFIG[name]
    other = {key: entry[key] for key in ("rms_norm_eps", "rope_theta", "hidden_activation") if key in entry}
    return {**{key: entry[key] for key in SIZES}, **other}


def load(model_class, config, name, folder, **options):
    """As a user does: a directory with config.json and the golden file's weights."""
    folder = folder / name
    folder.mkdir()
    config.save_pretrained(folder)
    save_file(load_file(GOLDEN / f"{name}.safetensors"), folder / "model.safetensors", metadata={"format": "pt"})
    options = {"attn_implementation": register_transformers_attention(), **options}
    model, report = model_class.from_pretrained(folder, output_loading_info=True, **options)
    assert not report["unexpected_keys"]
    assert set(report["missing_keys"]) <= {"lm_head.weight"}
    return model.eval()


@pytest.fixture(scope="module", params=MODELS)
def language(request, tmp_path_factory):
    model_class, config_class = MODELS[request.param]
    model = load(
        model_class, config_class(**language_config(request.param)), request.param, tmp_path_factory.mktemp("m")
    )
    return model, np.load(GOLDEN / f"{request.param}.npz"), CONFIG[request.param]


def samples_of(golden, key):
    return [torch.from_numpy(golden[f"{i}/{key}"]) for i in range(sum(k.endswith("/input_ids") for k in golden))]


def packed(ids, causal, first=0, **options):
    """Keyword arguments of a forward over one row, and the cumulative lengths."""
    lengths = [len(sample) for sample in ids]
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {
        "input_ids": torch.cat(ids)[None],
        "position_ids": torch.cat([torch.arange(length) + first for length in lengths])[None],
        "packing": TokenPacking(cu, max(lengths), causal=causal, **options),
    }


def assert_samples_equal(row, expected, tolerance=ATOL):
    for found, value in zip(row.split([len(part) for part in expected]), expected, strict=True):
        assert torch.allclose(found, value, atol=tolerance)


@pytest.mark.parametrize(("causal", "key"), [(True, "last_hidden_state"), (False, "bidirectional_last_hidden_state")])
def test_a_packed_row_equals_every_sample_alone(language, causal, key):
    model, golden, _ = language
    output = model(**packed(samples_of(golden, "input_ids"), causal), output_hidden_states=True)
    assert_samples_equal(output.last_hidden_state[0], samples_of(golden, key))
    if causal:
        for layer in (0, 1):
            assert_samples_equal(output.hidden_states[layer][0], samples_of(golden, f"hidden_states_{layer}"))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(language, checkpointing):
    model, golden, config = language
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    output = model(**packed(samples_of(golden, "input_ids"), True)).last_hidden_state[0]
    total = (output * torch.cat(samples_of(golden, "loss_weight"))).sum()
    total.backward()
    model.gradient_checkpointing_disable()
    model.eval()
    assert float(total.detach()) == pytest.approx(float(golden["sum_of_weighted_outputs"][0]), rel=1e-5)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    norms = torch.stack([gradients[name].norm() for name in config["gradient_norm_names"]])
    assert torch.allclose(norms, torch.from_numpy(golden["gradient_norms"]), rtol=1e-4)
    for name in ("q_proj", "k_proj"):
        key = f"layers.0.self_attn.{name}.weight"
        assert torch.allclose(gradients[key], torch.from_numpy(golden[f"gradient/{key}"]), rtol=1e-4, atol=ATOL)


def test_samples_do_not_see_each_other(language):
    model, golden, _ = language
    ids = samples_of(golden, "input_ids")
    before = model(**packed(ids, True)).last_hidden_state[0].split([len(sample) for sample in ids])
    ids[2] = ids[2].flip(0)
    after = model(**packed(ids, True)).last_hidden_state[0].split([len(sample) for sample in ids])
    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(one, other) == (index != 2)


def test_position_ids_with_a_gap_are_no_new_sample(language):
    model, golden, _ = language
    ids = samples_of(golden, "input_ids")[2]
    inputs = packed([ids], True)
    inputs["position_ids"] = inputs["position_ids"] + 7 * (inputs["position_ids"] > 5)
    found = model(**inputs).last_hidden_state
    model.set_attn_implementation("eager")
    mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
    expected = model(ids[None], position_ids=inputs["position_ids"], attention_mask=mask).last_hidden_state
    model.set_attn_implementation(register_transformers_attention())
    assert torch.allclose(found, expected, atol=ATOL)


def test_half_precision_by_autocast(language):
    model, golden, _ = language
    ids = samples_of(golden, "input_ids")
    with torch.autocast("cpu", torch.bfloat16):
        found = model(**packed(ids, True)).last_hidden_state
    assert (found - model(**packed(ids, True)).last_hidden_state).abs().max() < 0.2


@pytest.fixture(scope="module")
def paligemma(tmp_path_factory):
    entry = CONFIG["paligemma"]
    text = {"model_type": "gemma", **{key: entry[key] for key in SIZES}}
    sides = {key: entry[key] for key in ("image_size", "patch_size")}
    vision = {"model_type": "siglip_vision_model", **entry["vision"], **sides, "projection_dim": entry["hidden_size"],
              "vision_use_head": False}  # fmt: skip
    config = PaliGemmaConfig(text_config=text, vision_config=vision, image_token_id=entry["image_token_id"],
                             projection_dim=entry["hidden_size"])  # fmt: skip
    model = load(PaliGemmaForConditionalGeneration, config, "paligemma", tmp_path_factory.mktemp("m"))
    return model, np.load(GOLDEN / "paligemma.npz")


def paligemma_inputs(golden):
    prefixes = [int((types == 0).sum()) for types in samples_of(golden, "token_type_ids")]
    inputs = packed(samples_of(golden, "input_ids"), True, first=1, prefix_lengths=prefixes)
    return {**inputs, "pixel_values": torch.stack(samples_of(golden, "pixel_values"))}


def test_paligemma_sees_its_prefix_whole_and_its_suffix_causally(paligemma):
    model, golden = paligemma
    output = model.model(**paligemma_inputs(golden))
    assert_samples_equal(output.last_hidden_state[0], samples_of(golden, "last_hidden_state"))
    features = model.get_image_features(torch.stack(samples_of(golden, "pixel_values"))).pooler_output
    assert torch.allclose(features, torch.stack(samples_of(golden, "image_features")), atol=ATOL)


def test_paligemma_gradients_equal_those_of_separate_eager_passes(paligemma):
    model, golden = paligemma
    inputs = paligemma_inputs(golden)
    model.zero_grad()
    packed_output = model.model(**inputs).last_hidden_state[0]
    weights = torch.randn(packed_output.shape, generator=torch.Generator().manual_seed(0))
    (packed_output * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.set_attn_implementation("eager")
    ids, types = samples_of(golden, "input_ids"), samples_of(golden, "token_type_ids")
    parts = weights.split([len(sample) for sample in ids])
    for sample, kind, picture, part in zip(ids, types, samples_of(golden, "pixel_values"), parts, strict=True):
        alone = model.model(sample[None], pixel_values=picture[None], token_type_ids=kind[None],
                            attention_mask=torch.ones_like(sample)[None])  # fmt: skip
        (alone.last_hidden_state[0] * part).sum().backward()
    model.set_attn_implementation(register_transformers_attention())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(found[name], parameter.grad, rtol=1e-4, atol=1e-4), name
    assert any("vision_tower" in name for name in found)


def test_siglip_alone():
    torch.manual_seed(0)
    sizes = {**CONFIG["paligemma"]["vision"], "image_size": 28, "patch_size": 14}
    model = SiglipVisionModel(SiglipVisionConfig(**sizes)).eval()
    pictures = torch.randn(3, 3, 28, 28)
    expected = model(pictures).last_hidden_state
    model.set_attn_implementation(register_transformers_attention())
    assert torch.allclose(model(pictures).last_hidden_state, expected, atol=ATOL)


def tiny(config_class, **changes):
    sizes = {key: CONFIG["qwen3"][key] for key in SIZES}
    return config_class(**{**sizes, **changes}, attn_implementation=register_transformers_attention())


IDS = [torch.arange(5), torch.arange(3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packing": None}, "without being told where samples begin"),
        ({"attention_mask": torch.arange(8)[None]}, "padding"),
        ({"attention_mask": torch.zeros(1, 1, 8, 8)}, "attention mask"),
        ({"input_ids": torch.zeros(2, 4, dtype=torch.long), "position_ids": torch.zeros(2, 4).long()}, "2 rows"),
        ({"packing": TokenPacking(torch.tensor([0, 5], dtype=torch.int32), 5, causal=True)}, "cover the tokens"),
    ],
)
def test_what_it_cannot_do_is_said(change, message):
    model = Qwen3Model(tiny(Qwen3Config)).eval()
    with pytest.raises(ConfigError, match=message):
        model(**{**packed(IDS, True), **change})


def test_dropout_soft_caps_and_windows_are_refused():
    dropout = Qwen3Model(tiny(Qwen3Config, attention_dropout=0.1))
    with pytest.raises(ConfigError, match="dropout"):
        dropout.train()(**packed(IDS, True))
    mask = torch.ones(1, 8, dtype=torch.long)  # hides nothing
    assert dropout.eval()(**packed(IDS, True), attention_mask=mask).last_hidden_state.isfinite().all()
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    capped = Gemma2Model(tiny(Gemma2Config, **heads, attn_logit_softcapping=50.0, sliding_window=4096)).eval()
    with pytest.raises(ConfigError, match="softcap"):
        capped(**packed(IDS, True))
    window = {**heads, "attn_logit_softcapping": None, "sliding_window": 4}
    with pytest.raises(ConfigError, match="sliding window of 4"):
        Gemma2Model(tiny(Gemma2Config, **window)).eval()(**packed(IDS, True))
    longer = Gemma2Model(tiny(Gemma2Config, **{**window, "sliding_window": 5})).eval()
    assert longer(**packed(IDS, True)).last_hidden_state.isfinite().all()


def test_a_cache_and_padded_text_are_refused():
    model = Qwen3Model(tiny(Qwen3Config)).eval()
    first = model(**packed(IDS[:1], True), use_cache=True)
    cache = first.get("cache", first.get("past_key_values"))
    with pytest.raises(ConfigError, match="cache"):
        model(**packed(IDS[:1], True), past_key_values=cache)
    sizes = {key: CONFIG["paligemma"]["vision"][key] for key in ("hidden_size", "intermediate_size")}
    text = SiglipTextModel(SiglipTextConfig(vocab_size=10, num_hidden_layers=1, num_attention_heads=2, **sizes))
    text.set_attn_implementation(register_transformers_attention())
    with pytest.raises(ConfigError, match="without being told"):
        text.eval()(torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize(("prefixes", "causal"), [([4, 2], False), ([4], True), ([6, 2], True)])
def test_prefixes_must_fit(prefixes, causal):
    with pytest.raises(ConfigError, match="prefixes"):
        packed(IDS, causal, prefix_lengths=prefixes)


def test_the_documented_example():
    text = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "TokenPacking" in block)
    variables = {}
    exec(code, variables)  # noqa: S102
    model, samples = variables["model"].eval(), (variables["first"], variables["second"])
    model.set_attn_implementation("eager")
    expected = [model(sample[None]).last_hidden_state[0] for sample in samples]
    assert torch.allclose(variables["features"], torch.cat(expected), atol=ATOL)
