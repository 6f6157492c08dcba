"""The directory: bit for bit what was quantised, readable without Lightning, and damage of every kind is found."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import lightning_embodied.configs
from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.models import FlowMatchingPolicy, Pi05Policy
from lightning_embodied.packing import SampleEncoder
from lightning_embodied.quantization import (
    FORMATS,
    Recipe,
    calibrate,
    dequantize,
    load_policy,
    quantize_policy,
    save_policy,
)
from lightning_embodied.quantization.manifest import MANIFEST, WEIGHTS, read_manifest, write_manifest
from tests.models.conftest import make_policy, make_samples, make_spec, observations_of
from tests.models.groot.policies import make_policy as make_groot
from tests.precision.networks import tiny_pi05

OBSERVATIONS = observations_of(make_samples(8)[3::4])
all_formats = pytest.mark.parametrize("weights", FORMATS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A quantised policy, the directory it was written to and what was quantised."""
    policy = make_policy()
    quantization = quantize_policy(policy)
    path = save_policy(policy, quantization, tmp_path_factory.mktemp("robot") / "policy", source={"step": 3})
    return policy, path, quantization


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved[1], tmp_path / "policy")


@all_formats
@pytest.mark.parametrize("safe_defaults", [True, False])
def test_what_is_loaded_is_what_was_quantised(weights, safe_defaults, tmp_path):
    policy = make_policy()
    original = policy.predict_action_chunk(OBSERVATIONS)
    save_policy(policy, quantize_policy(policy, Recipe(weights, safe_defaults=safe_defaults)), tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert type(loaded) is FlowMatchingPolicy
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert_same_state(loaded, policy)
    actions = loaded.predict_action_chunk(OBSERVATIONS)
    assert torch.equal(actions, policy.predict_action_chunk(OBSERVATIONS))
    assert 0 < float((actions - original).norm() / original.norm()) < 0.1


def assert_same_state(found, expected):
    found, expected = found.state_dict(), expected.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(bits(found[name]), bits(value)), name


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def test_writing_what_was_loaded_gives_the_same_file(saved, tmp_path):
    _, path, quantization = saved
    again = save_policy(load_policy(path), quantization, tmp_path / "again", source={"step": 3})
    for name in (WEIGHTS, MANIFEST):
        assert (again / name).read_bytes() == (path / name).read_bytes()


def test_the_weights_are_plain_safetensors(saved):
    policy, path, _ = saved
    tensors = load_file(path / WEIGHTS)
    name = "prefix.layers.0.mlp.down.weight"
    assert tensors[name].dtype == torch.float8_e4m3fn
    assert tensors[f"{name}_scale"].dtype == torch.float32
    weight = policy.prefix.layers[0].mlp.down.weight
    assert torch.equal(dequantize(tensors[name], tensors[f"{name}_scale"]), weight)
    assert tensors["token_embedding.weight"].dtype == torch.bfloat16
    assert tensors["action_normalizer.scale"].dtype == torch.float32


def test_what_safe_defaults_keep_can_be_int8(tmp_path):
    policy = make_policy()
    original = policy.predict_action_chunk(OBSERVATIONS)
    quantization = quantize_policy(policy, Recipe(kept="int8", exclude=["image_stem.*"]))
    path = save_policy(policy, quantization, tmp_path / "policy")
    tensors = load_file(path / WEIGHTS)
    assert tensors["prefix.layers.0.qkv.weight"].dtype == torch.float8_e4m3fn
    assert tensors["token_embedding.weight"].dtype == tensors["expert.layers.0.modulation.weight"].dtype == torch.int8
    assert quantization.errors["expert.layers.0.modulation"] < 0.01
    assert tensors["image_stem.layers.0.weight"].dtype == torch.bfloat16  # asked for
    matrices = sum(tensor.nbytes for tensor in tensors.values() if tensor.dim() > 1)
    assert (path / WEIGHTS).stat().st_size < 1.2 * matrices
    loaded = load_policy(path)
    assert_same_state(loaded, policy)
    actions = loaded.predict_action_chunk(OBSERVATIONS)
    assert 0 < float((actions - original).norm() / original.norm()) < 0.1


def test_a_quickstart_policy_comes_to_less_than_three_tenths(tmp_path):
    config = yaml.safe_load((Path(lightning_embodied.configs.__file__).parent / "quickstart.yaml").read_text())
    policy = FlowMatchingPolicy(**config["model"]["init_args"])
    policy.spec = make_spec(encoder=SampleEncoder(image_size=(64, 64), patch_size=16).to_config())
    policy.configure_model()
    before = 4 * sum(parameter.numel() for parameter in policy.parameters())
    path = save_policy(policy, quantize_policy(policy, Recipe(kept="int8")), tmp_path / "policy")
    assert sum(file.stat().st_size for file in path.iterdir()) <= 0.3 * before


def test_the_manifest_says_what_a_robot_needs(saved):
    policy, path, quantization = saved
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["version"] == 2
    assert manifest["recipe"]["weights"] == "fp8_block"
    assert manifest["spec"] == json.loads(json.dumps(policy.spec.to_dict()))
    assert manifest["normalizers"]["action"]["centre"] == policy.action_normalizer.centre.tolist()
    assert manifest["normalizers"]["state"]["mode"] == "quantile"
    assert manifest["source"] == {"step": 3}
    assert manifest["layers"].keys() == quantization.errors.keys()
    assert all(0.01 < layer["relative_error"] < 0.05 for layer in manifest["layers"].values())
    assert "embeds" in manifest["kept_layers"]["token_embedding"]
    assert manifest["files"][WEIGHTS]["bytes"] == (path / WEIGHTS).stat().st_size


_ROBOT = """
import sys, importlib.abc
class Absent(importlib.abc.MetaPathFinder):
    names = ("lightning", "pytorch_lightning", "lightning_fabric", "jsonargparse", "transformers", "torchao", "pyarrow",
             "av", "rich", "jinja2", "gymnasium", "ray", "wandb", "torchmetrics")
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
for name in Absent.names:
    sys.modules[name] = None
sys.meta_path.insert(0, Absent())
import pickle
from safetensors.torch import load_file, save_file
from lightning_embodied.quantization import load_policy
def refused(*args, **kwargs):
    raise AssertionError("something was unpickled")
pickle.load = pickle.loads = refused
policy = load_policy(sys.argv[1])
observations = {**load_file(sys.argv[2]), "task": sys.argv[4:]}
save_file({"actions": policy.predict_action_chunk(observations)}, sys.argv[3])
assert not any(sys.modules.get(name) for name in Absent.names)
print(type(policy).__mro__[-2].__name__, policy.device)
"""


def test_a_robot_needs_no_lightning_and_unpickles_nothing(saved, tmp_path):
    policy, path, _ = saved
    save_file({k: v for k, v in OBSERVATIONS.items() if k != "task"}, tmp_path / "observations.safetensors")
    paths = [str(path), str(tmp_path / "observations.safetensors"), str(tmp_path / "actions.safetensors")]
    subprocess.run(
        [sys.executable, "-c", _ROBOT, *paths, *OBSERVATIONS["task"]],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    actions = load_file(tmp_path / "actions.safetensors")["actions"]
    assert torch.allclose(actions, policy.predict_action_chunk(OBSERVATIONS), atol=1e-6)


def test_half_precision_on_the_robot(saved):
    policy, path, _ = saved
    loaded = load_policy(path, dtype=torch.bfloat16)
    assert loaded.token_embedding.weight.dtype == torch.bfloat16
    assert loaded.prefix.layers[0].mlp.down.codes.dtype == torch.float8_e4m3fn
    assert loaded.action_normalizer.scale.dtype == torch.float32
    expected = policy.predict_action_chunk(OBSERVATIONS)
    assert float((loaded.predict_action_chunk(OBSERVATIONS) - expected).norm() / expected.norm()) < 0.05


def test_pi05_with_adapters_that_were_merged(tmp_path):
    policy, _ = tiny_pi05(4)
    adapted = Pi05Policy(**{**policy.hparams, "lora": {"target_modules": ["*.q_proj"], "rank": 2}})
    adapted.spec = policy.spec
    adapted.configure_model()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    before = adapted.predict_action_chunk(OBSERVATIONS)
    quantization = quantize_policy(adapted, Recipe("int8_row"))
    assert any(name.endswith("q_proj") for name in quantization.errors)
    assert not any("vision_tower" in name for name in quantization.errors)
    save_policy(adapted, quantization, tmp_path / "pi05")
    loaded = load_policy(tmp_path / "pi05")
    assert_same_state(loaded, adapted)
    actions = loaded.predict_action_chunk(OBSERVATIONS)
    assert torch.equal(actions, adapted.predict_action_chunk(OBSERVATIONS))
    assert float((actions - before).norm() / before.norm()) < 0.05


def test_groot_whose_words_are_tied(tmp_path):
    policy = make_groot()
    quantization = quantize_policy(policy, Recipe("fp8_row"))
    language = "model.backbone.eagle_model.language_model"
    assert f"{language}.lm_head" not in quantization.errors
    save_policy(policy, quantization, tmp_path / "groot")
    assert len(read_manifest(tmp_path / "groot")["tied"]) == 1
    loaded = load_policy(tmp_path / "groot")
    assert_same_state(loaded, policy)
    words = loaded.get_submodule(language).lm_head.weight
    assert words is next(p for n, p in loaded.named_parameters() if n.endswith("embed_tokens.weight"))
    actions = loaded.predict_action_chunk(OBSERVATIONS)
    assert torch.equal(actions, policy.predict_action_chunk(OBSERVATIONS))


def test_calibrated_activations_are_kept(tmp_path):
    policy = make_policy()
    quantization = quantize_policy(policy, Recipe("fp8_row"))
    before = policy.predict_action_chunk(OBSERVATIONS)
    calibrated = calibrate(policy, quantization, lambda: policy.predict_action_chunk(OBSERVATIONS))
    assert calibrated.activations.keys() == calibrated.errors.keys()
    assert all(scale > 0 for scale in calibrated.activations.values())
    actions = policy.predict_action_chunk(OBSERVATIONS)
    assert 0 < float((actions - before).norm() / before.norm()) < 0.1
    loaded = load_policy(save_policy(policy, calibrated, tmp_path / "policy"))
    assert_same_state(loaded, policy)
    assert torch.equal(loaded.predict_action_chunk(OBSERVATIONS), actions)


def test_what_cannot_be_quantised():
    policy = make_policy()
    quantization = quantize_policy(policy, Recipe("int8_row"))
    with pytest.raises(ConfigError, match="calibrated for FP8 weights only"):
        calibrate(policy, quantization, lambda: None)
    with pytest.raises(ConfigError, match="quantised already"):
        quantize_policy(policy)
    with pytest.raises(ConfigError, match="no such weight format"):
        Recipe("int4")
    with pytest.raises(ConfigError, match="bfloat16, float32"):
        Recipe(kept="float64")
    diverged = make_policy()
    with torch.no_grad():
        diverged.prefix.layers[1].qkv.weight[0, 0] = torch.nan
    with pytest.raises(ConfigError, match=r"prefix\.layers\.1\.qkv\.weight"):
        quantize_policy(diverged)


def test_nothing_is_overwritten_unasked(saved, tmp_path):
    policy, _, quantization = saved
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("dear")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="something else"):
            save_policy(policy, quantization, tmp_path / "notes", overwrite=overwrite)
    path = save_policy(policy, quantization, tmp_path / "policy")
    (path / "stray").touch()
    with pytest.raises(ConfigError, match="already"):
        save_policy(policy, quantization, path)
    save_policy(policy, quantization, path, overwrite=True)
    assert sorted(file.name for file in path.iterdir()) == [MANIFEST, WEIGHTS]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["notes", "policy"]


def test_a_failed_write_leaves_what_was_there(saved, tmp_path, monkeypatch):
    policy, _, quantization = saved
    path = save_policy(policy, quantization, tmp_path / "policy")
    before = (path / WEIGHTS).read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_embodied.quantization.saving.save_file", full)
    with pytest.raises(ConfigError, match="No space left"):
        save_policy(policy, quantization, path, overwrite=True)
    with pytest.raises(ConfigError, match="No space left"):
        save_policy(policy, quantization, tmp_path / "other")
    assert (path / WEIGHTS).read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["policy"]


def rewrite(folder, change):
    """Changes a manifest and gives it the hash that belongs to it."""
    content = read_manifest(folder)
    change(content)
    write_manifest(folder, {key: value for key, value in content.items() if key not in ("format", "version")})


def edit(folder, old, new):
    text = (folder / MANIFEST).read_text()
    assert old in text
    (folder / MANIFEST).write_text(text.replace(old, new, 1))


def flip_bit(folder):
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-7] ^= 1
    (folder / WEIGHTS).write_bytes(content)


def reshape(folder):
    tensors = load_file(folder / WEIGHTS)
    tensors["token_embedding.weight"] = tensors["token_embedding.weight"][:-1].contiguous()
    save_file(tensors, folder / WEIGHTS)
    text = (folder / WEIGHTS).read_bytes()
    content = json.loads((folder / MANIFEST).read_text())
    content["files"][WEIGHTS] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    write_manifest(folder, {k: v for k, v in content.items() if k not in ("format", "version", "sha256")})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_bit, "not the one that was written"),
        (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:1000]), "not the one that was written"),
        (lambda f: (f / WEIGHTS).unlink(), "is missing"),
        (lambda f: (f / MANIFEST).unlink(), "no quantised policy"),
        (shutil.rmtree, "no such directory"),
        (lambda f: (f / MANIFEST).write_text("{"), "damaged"),
        (lambda f: (f / MANIFEST).write_text("[]"), "something else"),
        (lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe"), "damaged"),
        (lambda f: edit(f, '"version": 2', '"version": 3'), "another version"),
        (lambda f: edit(f, '"mode": "quantile"', '"mode": "min_max"'), "changed after it was written"),
        (reshape, "token_embedding.weight"),
        (lambda f: rewrite(f, lambda c: c.pop("layers")), "no dict 'layers'"),
        (lambda f: rewrite(f, lambda c: c["tensors"]["token_embedding.weight"].update(dtype="float16")), "describes"),
        (lambda f: rewrite(f, lambda c: c["tensors"].popitem()), "describes"),
        (lambda f: rewrite(f, lambda c: c["layers"].popitem()), "does not fit"),
        (lambda f: rewrite(f, lambda c: c["layers"]["expert.layers.0.qkv"].update(format="int4")), "does not fit"),
        (lambda f: rewrite(f, lambda c: c["policy"].update(class_path="torch.nn.Linear")), "names no policy class"),
        (lambda f: rewrite(f, lambda c: c["policy"].update(class_path="nowhere.Policy")), "cannot be imported"),
        (lambda f: rewrite(f, lambda c: c["policy"]["init_args"].update(width=16)), "does not fit"),
        (lambda f: rewrite(f, lambda c: c["policy"]["init_args"].update(wings=2)), "no longer takes"),
        (lambda f: rewrite(f, lambda c: c["spec"].pop("fps")), "spec is damaged"),
    ],
)
def test_damage_is_one_clear_error(copied, damage, message):
    load_policy(copied)
    damage(copied)
    with pytest.raises(CheckpointError, match=message):
        load_policy(copied)
