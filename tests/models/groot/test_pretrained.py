"""Checkpoint directories: NVIDIA's load as they are, whole or in shards, ours come back, broken ones say why."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_embodied.errors import CheckpointError
from lightning_embodied.models import GrootN15Policy, load_policy
from lightning_embodied.models.groot import GrootSizes
from lightning_embodied.models.groot.directory import GrootDirectory, config_of
from tests.models.conftest import make_samples, make_spec, make_trainer, observations_of
from tests.models.groot.conftest import TINY_HEAD, TINY_LANGUAGE, TINY_VISION
from tests.models.groot.policies import (
    GrootData,
    golden_config,
    golden_weights,
    make_arguments,
    make_encoder,
    make_policy,
    write_golden,
)

EMBEDDING = "backbone.eagle_model.language_model.model.embed_tokens.weight"
LANGUAGE_HEAD = "backbone.eagle_model.language_model.lm_head.weight"
PROBE = "backbone.eagle_model.vision_model.vision_model.head.probe"


def read(path, **arguments):
    return GrootN15Policy.from_pretrained(path, **{"embodiment_id": 1, **arguments})


def assert_golden(policy):
    state = policy.model.state_dict()
    for name, value in golden_weights().items():
        assert torch.equal(state[name], value), name
    language = policy.model.backbone.eagle_model.language_model
    assert language.lm_head.weight is language.model.embed_tokens.weight


@pytest.mark.parametrize("shards", [1, 3])
def test_nvidias_directory(shards, tmp_path):
    policy = read(write_golden(tmp_path / "n15", shards=shards), embodiment_id=2)
    assert policy.network_sizes == GrootSizes(TINY_VISION, TINY_LANGUAGE, TINY_HEAD)
    assert (policy.denoising_steps, policy.embodiment_id) == (4, 2)
    assert_golden(policy)
    assert not any(p.requires_grad for p in policy.model.backbone.eagle_model.language_model.parameters())


def test_a_tied_language_head_may_be_stored_instead_and_halves_become_float32(tmp_path):
    weights = golden_weights()
    weights[LANGUAGE_HEAD] = weights.pop(EMBEDDING)
    assert_golden(read(write_golden(tmp_path / "a", weights)))
    both = {**golden_weights(), LANGUAGE_HEAD: weights[LANGUAGE_HEAD].clone()}
    assert_golden(read(write_golden(tmp_path / "b", both)))
    halves = {name: value.bfloat16() for name, value in golden_weights().items()}
    policy = read(write_golden(tmp_path / "c", halves))
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert torch.equal(policy.model.get_parameter(EMBEDDING), halves[EMBEDDING].float())


def test_our_directory_comes_back(tmp_path):
    policy = make_policy()
    policy.save_pretrained(tmp_path / "ours")
    spec = make_spec(encoder=make_encoder().to_config())
    again = read(tmp_path / "ours", spec=spec).eval()
    assert again.network_sizes == policy.network_sizes
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["action_horizon"] == spec.action_horizon
    observations = observations_of(make_samples(8)[3::4])
    assert torch.equal(again.predict_action_chunk(observations), policy.predict_action_chunk(observations))
    assert set(load_file(tmp_path / "ours" / "model.safetensors")) == set(policy.model.state_dict()) - {LANGUAGE_HEAD}


def test_adapters_are_merged_on_export(tmp_path):
    lora = {"target_modules": ["*.to_q", "*.q_proj"], "rank": 2}
    policy = make_policy(lora=lora)
    policy.save_pretrained(tmp_path / "merged")
    spec = make_spec(encoder=make_encoder().to_config())
    merged = read(tmp_path / "merged", spec=spec).eval()
    observations = observations_of(make_samples(8)[3::4])
    expected = policy.predict_action_chunk(observations)
    assert torch.allclose(merged.predict_action_chunk(observations), expected, atol=1e-5)


def test_published_sizes_are_described_in_nvidias_words_alone():
    config = config_of(GrootSizes(), 4, 16)
    assert "sizes" not in config
    assert config["backbone_cfg"]["select_layer"] == 12
    assert config["action_head_cfg"]["backbone_embedding_dim"] == 2048
    assert config["action_head_cfg"]["input_embedding_dim"] == 1536


def test_the_pooling_head_is_there_if_the_checkpoint_has_it(tmp_path):
    sizes = make_arguments()["sizes"]
    policy = make_policy(sizes={**sizes, "vision": {**sizes["vision"], "vision_use_head": True}})
    policy.save_pretrained(tmp_path / "headed")
    again = read(tmp_path / "headed")
    assert again.network_sizes.vision.vision_use_head
    assert not again.model.get_parameter(PROBE).requires_grad


def test_pretrained_in_yaml_trains_and_its_checkpoint_needs_the_directory_no_more(tmp_path):
    make_policy().save_pretrained(tmp_path / "start")
    policy = GrootN15Policy(**make_arguments(pretrained=str(tmp_path / "start"), learning_rate=0.01))
    trainer = make_trainer(max_steps=2, limit_val_batches=0)
    trainer.fit(policy, datamodule=GrootData(make_samples(8), 4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    start = make_policy().model.state_dict()
    frozen = "backbone.eagle_model.language_model.model.norm.weight"
    assert torch.equal(policy.model.state_dict()[frozen], start[frozen])
    observations = observations_of(make_samples(8)[3::4])
    expected = policy.eval().predict_action_chunk(observations)
    resumed = GrootN15Policy(**make_arguments(pretrained=str(tmp_path / "start")))
    again = make_trainer(max_steps=2, limit_val_batches=0)
    again.fit(resumed, datamodule=GrootData(make_samples(8), 4), ckpt_path=tmp_path / "a.ckpt")
    assert torch.equal(resumed.eval().predict_action_chunk(observations), expected)
    (tmp_path / "start" / "config.json").unlink()
    for loaded in (load_policy(tmp_path / "a.ckpt"), GrootN15Policy.load_from_checkpoint(tmp_path / "a.ckpt").eval()):
        assert torch.equal(loaded.predict_action_chunk(observations), expected)
        assert loaded.pretrained is None


def changed_config(*path, value):
    configuration = golden_config()
    entry = configuration
    for key in path[:-1]:
        entry = entry[key]
    entry[path[-1]] = value
    return configuration


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        (changed_config("model_type", value="gr00t_n1_7"), "model_type"),
        (changed_config("backbone_cfg", "project_to_dim", value=1536), "backbone_cfg.project_to_dim"),
        (changed_config("action_head_cfg", "use_vlln", value=False), "action_head_cfg.use_vlln"),
        (changed_config("action_head_cfg", "diffusion_model_cfg", "norm_type", value="layer_norm"), "norm_type"),
        (changed_config("action_head_cfg", "hidden_size", value="wide"), "hidden_size"),
        (changed_config("action_head_cfg", "vl_self_attention_cfg", value={}), "num_layers"),
        (changed_config("action_head_cfg", value=[]), "cannot be followed"),
        (changed_config("sizes", "language", "num_hidden_layers", value=3), "missing"),
        (changed_config("sizes", "language", "num_hidden_layers", value=1), "unexpected"),
        (changed_config("action_head_cfg", "max_state_dim", value=9), "another shape"),
        (changed_config("sizes", "language", "hidden_size", value=64), "hidden_size"),
    ],
)
def test_configurations_that_cannot_be_followed(configuration, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        read(write_golden(tmp_path / "n15", configuration=configuration))


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (lambda folder: (folder / "model-00002-of-00003.safetensors").unlink(), "cannot be read"),
        (lambda folder: (folder / "model-00002-of-00003.safetensors").write_bytes(b"abc"), "cannot be read"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "no weights"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), "no JSON object"),
    ],
)
def test_broken_directories(breaks, message, tmp_path):
    folder = write_golden(tmp_path / "n15", shards=3)
    breaks(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        read(folder)
    assert str(folder) in str(error.value)


def test_weights_that_do_not_fit_are_named(tmp_path):
    weights = golden_weights()
    del weights["action_head.vlln.weight"]
    weights["action_head.vlln.scale"] = torch.ones(3)
    with pytest.raises(CheckpointError) as error:
        read(write_golden(tmp_path / "n15", weights))
    assert "1 missing: action_head.vlln.weight; 1 unexpected: action_head.vlln.scale" in str(error.value)


def test_neither_a_path_nor_a_hub_id(tmp_path):
    with pytest.raises(CheckpointError, match="no such path"):
        read(tmp_path / "nothing")


def test_the_reader_names_what_is_stored(tmp_path):
    assert set(GrootDirectory(write_golden(tmp_path / "n15", shards=2)).stored()) == set(golden_weights())


def test_an_interrupted_export_does_not_open(tmp_path):
    policy = make_policy()
    policy.save_pretrained(tmp_path / "ours")
    save_file({"a": torch.zeros(1)}, tmp_path / "ours" / "model.safetensors.unfinished")
    policy.save_pretrained(tmp_path / "ours")
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["config.json", "model.safetensors"]
