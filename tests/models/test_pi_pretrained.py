"""Checkpoints of pi0 and pi0.5: full-size names and shapes, directories, shards, hub, what does not fit, round trip."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.models import Pi0Policy, Pi05Policy, PolicySpec, load_policy
from lightning_embodied.models.pi.sizes import PRESETS
from lightning_embodied.models.sizes import preset_sizes
from lightning_embodied.packing import SampleEncoder
from tests.models.conftest import make_trainer
from tests.models.pi_golden import CLASSES, Golden

ROOT = Path(__file__).parents[2]
MODEL = "model.paligemma_with_expert."
HEADS = [f"{MODEL}paligemma.lm_head.weight", f"{MODEL}gemma_expert.lm_head.weight"]
EMBEDDING = f"{MODEL}paligemma.model.language_model.embed_tokens.weight"


@pytest.fixture(scope="module", params=CLASSES)
def golden(request) -> Golden:
    return Golden(request.param)


@pytest.fixture
def copy(golden, tmp_path):
    """The fixture's checkpoint in a directory of its own: its path, and a function that rewrites its weights."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden.path / name, path / name)

    def rewrite(change):
        tensors = load_file(path / "model.safetensors")
        save_file(change(tensors) or tensors, path / "model.safetensors")
        return path

    return path, rewrite


def load(golden, path):
    return CLASSES[golden.name].from_pretrained(path)


def assert_same(policy, other):
    state, expected = policy.model.state_dict(), other.model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def test_full_size_has_exactly_the_published_names_and_shapes(golden):
    with torch.device("meta"):
        policy = CLASSES[golden.name]()
        policy.use_network()
    ours = {f"model.{name}": list(value.shape) for name, value in policy.model.state_dict().items()}
    theirs = json.loads((golden.path / "full_size_parameters.json").read_text())["state_dict"]
    heads = {name: theirs.pop(name) for name in golden.config["dropped_from_model_safetensors"]}
    assert sorted(heads) == sorted(HEADS)
    assert ours == theirs
    assert len(policy.model.state_dict()) == len(dict(policy.model.named_parameters()))


def test_the_published_sizes_are_read_from_both_projects_configurations(golden, copy):
    path, _ = copy
    lerobot = {"type": golden.name, "paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m",
               "max_action_dim": 32, "max_state_dim": 32, "image_resolution": [224, 224]}  # fmt: skip
    openpi = {"action_dim": 32, "action_horizon": 50, "paligemma_variant": "gemma_2b",
              "action_expert_variant": "gemma_300m", "precision": "bfloat16"}  # fmt: skip
    for config in (lerobot, openpi):
        (path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError) as error:  # the sizes are read, and the tiny weights do not fit them
            load(golden, path)
        assert "of another shape" in str(error.value)
        assert "[32]" in str(error.value)


def test_names_without_prefix_and_a_language_head_for_the_embedding(golden, copy):
    def as_openpi(tensors):
        renamed = {name.removeprefix("model."): value.to(torch.bfloat16) for name, value in tensors.items()}
        renamed[HEADS[0].removeprefix("model.")] = renamed.pop(EMBEDDING.removeprefix("model."))
        renamed[HEADS[1].removeprefix("model.")] = torch.zeros(200, 24)
        return renamed

    _, rewrite = copy
    policy = load(golden, rewrite(as_openpi))
    for name, value in golden.policy().state_dict().items():
        assert policy.state_dict().get(name, value).dtype == torch.float32
        if name.startswith("model."):
            assert torch.equal(policy.state_dict()[name], value.to(torch.bfloat16).float())


def test_the_embedding_goes_before_a_language_head(golden, copy):
    _, rewrite = copy
    path = rewrite(lambda tensors: {**tensors, HEADS[0]: torch.zeros(200, 32)})
    assert_same(load(golden, path), golden.policy())


def shard(path):
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + i % 3}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return path


def test_shards(golden, copy):
    path, _ = copy
    assert_same(load(golden, shard(path)), golden.policy())
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(golden, path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.action_in_proj.bias"), ["1 missing: action_in_proj.bias"]),
        (lambda t: t.update({"model.wings.weight": torch.zeros(2)}), ["1 unexpected: wings.weight"]),
        (lambda t: t.update({"model.action_in_proj.bias": torch.zeros(7)}), ["of another shape", "[7] for [24]"]),
        (lambda t: {name: t[name] for name in list(t)[:5]}, ["missing", ", …"]),
        (lambda t: t.pop(EMBEDDING), ["1 missing", "embed_tokens"]),
    ],
)
def test_weights_that_do_not_fit_are_told_in_one_error(golden, copy, change, words):
    path, rewrite = copy
    rewrite(lambda tensors: new if isinstance(new := change(tensors), dict) else tensors)
    with pytest.raises(CheckpointError) as error:
        load(golden, path)
    for word in (*words, str(path)):
        assert word in str(error.value)


def test_the_other_policy_is_refused(golden, copy):
    path, _ = copy
    other = Pi0Policy if golden.name == "pi05" else Pi05Policy
    with pytest.raises(CheckpointError, match="missing"):
        other.from_pretrained(path)
    (path / "config.json").write_text(json.dumps({**golden.config, "type": golden.name}))
    with pytest.raises(CheckpointError, match=f"found:    {golden.name}"):
        other.from_pretrained(path)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"min_period": 0.1}, "min_period"),
        ({"use_visual_memory": True}, "use_visual_memory"),
        ({"sizes": {"siglip": {}}}, "KeyError"),
        ({"sizes": None, "paligemma_variant": "gemma_9b", "action_expert_variant": "gemma_300m"}, "gemma_9b"),
    ],
)
def test_a_configuration_that_cannot_be_followed(golden, copy, change, word):
    path, _ = copy
    config = {key: value for key, value in {**golden.config, **change}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=word) as error:
        load(golden, path)
    assert "config.json" in str(error.value)


def test_files_that_are_not_there_or_damaged(golden, copy):
    path, _ = copy
    content = (path / "model.safetensors").read_bytes()
    for damaged in (content[:-100], content[:50], b""):
        (path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read"):
            load(golden, path)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load(golden, path)
    for text in ("{", "[]"):
        (path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load(golden, path)
    with pytest.raises(CheckpointError, match="no such path"):
        load(golden, path / "absent")


def test_a_hub_id_is_read_from_the_hubs_cache(golden, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden.path / name, snapshot / name)
    assert_same(load(golden, "someone/tiny"), golden.policy())
    with pytest.raises(CheckpointError, match="someone/absent"):
        load(golden, "someone/absent")


def test_saved_and_loaded_again(golden, tmp_path):
    policy = golden.policy(denoising_steps=7)
    for _ in range(2):  # into a new directory, and over an earlier checkpoint
        with torch.no_grad():
            policy.model.action_in_proj.bias += 1
        policy.save_pretrained(tmp_path / "saved")
        again = load(golden, tmp_path / "saved")
        assert_same(again, policy)
        assert again.network_sizes == policy.network_sizes
        assert again.denoising_steps == 7
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == ["config.json", "model.safetensors"]


def test_pictures_of_any_size_are_exported(tmp_path):
    sizes = {"vision": {"image_size": 60, "patch_size": 20}}
    policy = Pi05Policy(preset="tiny", sizes=sizes)
    policy.use_network()
    policy.save_pretrained(tmp_path)
    assert Pi05Policy.from_pretrained(tmp_path).network_sizes == policy.network_sizes


def test_a_place_that_cannot_be_written_is_told(golden, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        golden.policy().save_pretrained(tmp_path / "file")


def test_saved_under_the_names_that_lerobot_loads_strictly(golden, tmp_path):
    golden.policy().save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == {*load_file(golden.path / "model.safetensors"), *golden.config["dropped_from_model_safetensors"]}
    assert len(names) == golden.config["keys_written_by_save_pretrained"]["count"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["type"] == golden.name
    assert config["chunk_size"] == 10
    assert config["output_features"] == {"action": {"type": "ACTION", "shape": [5]}}
    assert config["input_features"]["observation.images.base"] == {"type": "VISUAL", "shape": [3, 40, 56]}


def test_loading_reads_each_policy_to_act_from_its_own_weights(golden):
    policy = golden.policy()
    observations = {
        **{camera: torch.zeros(2, 3, 40, 56, dtype=torch.uint8) for camera in policy.spec.cameras},
        "observation.state": torch.zeros(2, 4),
        "task": ["w1", "w2"],
    }
    actions = policy.predict_action_chunk(observations)
    assert actions.shape == (2, 10, 5)
    assert torch.isfinite(actions).all()


def test_pretrained_in_yaml_trains_and_its_checkpoint_needs_the_directory_no_more(golden, copy, tmp_path):
    path, _ = copy
    sizes = asdict(golden.policy().network_sizes)
    policy = CLASSES[golden.name](sizes=sizes, pretrained=str(path), learning_rate=1e-3)
    policy.spec = golden.spec()
    policy.configure_model()
    assert_same(policy, golden.policy())
    batch = golden.batch(policy, "mixed")
    trainer = make_trainer(max_steps=2)
    trainer.fit(policy, train_dataloaders=torch.utils.data.DataLoader([batch] * 2, batch_size=None))
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    resumed = CLASSES[golden.name](sizes=sizes, pretrained=str(path), learning_rate=0.0)
    resumed.spec = golden.spec()
    loader = torch.utils.data.DataLoader([batch] * 2, batch_size=None)
    make_trainer(max_steps=2).fit(resumed, train_dataloaders=loader, ckpt_path=tmp_path / "trained.ckpt")
    assert_same(resumed, policy)
    shutil.rmtree(path)
    for again in (load_policy(tmp_path / "trained.ckpt"), type(policy).load_from_checkpoint(tmp_path / "trained.ckpt")):
        assert_same(again, policy)
        assert again.pretrained is None


def test_sizes_by_name():
    sizes = preset_sizes(
        PRESETS, "tiny", {"vision": {"num_hidden_layers": 1}, "expert": {"width": 32}, "max_action_dim": 4}
    )
    assert (sizes.vision.num_hidden_layers, sizes.expert.width, sizes.max_action_dim) == (1, 32, 4)
    assert preset_sizes(PRESETS, "base", asdict(sizes)) == sizes
    assert preset_sizes(PRESETS, "base").language.mlp_width == 16_384


@pytest.mark.parametrize(
    ("preset", "sizes", "word"),
    [
        ("huge", {}, "huge"),
        ("tiny", {"wings": 2}, r"sizes\.wings"),
        ("tiny", {"expert": {"wings": 2}}, r"sizes\.expert\.wings"),
        ("tiny", {"expert": 3}, r"sizes\.expert"),
        ("tiny", {"expert": {"width": 0}}, "width"),
        ("tiny", {"expert": {"width": 2.5}}, "width"),
        ("tiny", {"expert": {"width": True}}, "width"),
        ("tiny", {"expert": {"depth": 2}}, r"language\.depth"),
        ("tiny", {"expert": {"width": 33}}, r"expert\.width"),
        ("tiny", {"vision": {"image_size": 65}}, r"vision\.image_size"),
        ("tiny", {"vision": {"num_attention_heads": 5}}, r"vision\.hidden_size"),
    ],
)
def test_impossible_sizes(preset, sizes, word):
    with pytest.raises(ConfigError, match=word):
        Pi05Policy(preset=preset, sizes=sizes)


@pytest.mark.parametrize(
    "arguments",
    [{"freeze": "wings"}, {"activation_checkpointing": ["wings"]}, {"denoising_steps": 0}],
)
def test_impossible_options(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        Pi05Policy(preset="tiny", **arguments)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"prompt": "instruction"}, "prompt"),
        ({"image_size": [56, 56]}, "image_size"),
        ({"tokenizer_json": None}, "tokenizer"),
    ],
)
def test_an_encoder_that_does_not_fit(golden, change, word):
    spec = golden.spec()
    encoder = {**spec.encoder, **change}
    if encoder["tokenizer_json"] is None:
        encoder["tokenizer_json"] = SampleEncoder().to_config()["tokenizer_json"]  # 1,000 words for 200 embeddings
    with pytest.raises(ConfigError, match=word):
        CLASSES[golden.name].from_pretrained(golden.path, spec=PolicySpec(**{**vars(spec), "encoder": encoder}))


def test_data_wider_than_the_policy(golden):
    sizes = asdict(golden.policy().network_sizes)
    for option in ("max_action_dim", *(["max_state_dim"] if golden.name == "pi0" else [])):
        policy = CLASSES[golden.name](sizes={**sizes, option: 2})
        policy.spec = golden.spec()
        with pytest.raises(ConfigError, match=option):
            policy.configure_model()


def documented(language):
    """The blocks of the documentation that name a policy."""
    text = (ROOT / "docs" / "policies.md").read_text()
    return [block for block in re.findall(rf"```{language}\n(.*?)```", text, re.S) if "Pi05Policy" in block]


def test_the_documented_lines(tmp_path, monkeypatch):
    (code,) = documented("python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    exec(code)  # noqa: S102
    assert_same(Pi05Policy.from_pretrained(tmp_path / "build" / "pi05"), Golden("pi05").policy())


def test_the_documented_yaml_has_arguments_that_exist_and_fit_each_other():
    (text,) = documented("yaml")
    config = yaml.safe_load(text)
    policy = Pi05Policy(**config["model"]["init_args"])
    arguments = config["data"]["init_args"]["collator"]["init_args"]["encoder"]["init_args"]
    encoder = SampleEncoder(**{**arguments, "tokenizer": None})
    assert encoder.tokens_per_image == policy.network_sizes.vision.tokens_per_image == 256
