"""Checkpoints: a real Trainer writes them, a fresh process acts from them, and broken ones say what is wrong."""

import os
import subprocess
import sys

import pytest
import torch

from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.features import Feature
from lightning_embodied.models import FlowMatchingPolicy, PolicyModule, PolicySpec, find_checkpoint, load_policy
from lightning_embodied.packing import SampleEncoder, VarlenPackingCollator
from tests.models.conftest import (
    CAMERAS,
    HORIZON,
    TinyDataModule,
    make_samples,
    make_spec,
    make_trainer,
    observations_of,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run directory with a checkpoint, its policy, observations and what it does with them."""
    run = tmp_path_factory.mktemp("run")
    policy = FlowMatchingPolicy(width=32, expert_width=24, depth=2, heads=2, head_dim=8, learning_rate=0.01)
    trainer = make_trainer(max_steps=3, limit_val_batches=0)
    trainer.fit(policy, datamodule=TinyDataModule(make_samples(8), 4))
    trainer.save_checkpoint(run / "checkpoints" / "step=3.ckpt")
    observations = observations_of(make_samples(8)[3::4])
    return run, policy, observations, policy.predict_action_chunk(observations)


@pytest.mark.slow
def test_a_fresh_process_acts_the_same(trained, tmp_path):
    run, _, observations, expected = trained
    torch.save(observations, tmp_path / "observations.pt")
    code = (
        "import sys, torch; from lightning_embodied.models import load_policy\n"
        "policy = load_policy(sys.argv[1]); assert not policy.training\n"
        "actions = policy.predict_action_chunk(torch.load(sys.argv[2])); torch.save(actions, sys.argv[3])"
    )
    paths = [str(run), str(tmp_path / "observations.pt"), str(tmp_path / "actions.pt")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, *paths], check=True, cwd=tmp_path, env=environment)
    assert torch.allclose(torch.load(tmp_path / "actions.pt"), expected, atol=1e-6)


def test_everything_comes_back(trained):
    run, policy, _, _ = trained
    loaded = load_policy(run)
    assert loaded.hparams == policy.hparams
    assert loaded.spec.to_dict() == policy.spec.to_dict()
    assert loaded.width == 32
    assert loaded.observation_keys == (*CAMERAS, "observation.state", "task")
    for name, value in policy.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_lightnings_own_loader_works_too(trained):
    run, _, observations, expected = trained
    loaded = FlowMatchingPolicy.load_from_checkpoint(find_checkpoint(run))
    assert torch.allclose(loaded.predict_action_chunk(observations), expected, atol=1e-6)


def test_a_loaded_policy_trains_on(trained):
    run, _, _, _ = trained
    policy = load_policy(run).train()
    before = policy.expert.action_out.weight.detach().clone()
    make_trainer(max_steps=1, limit_val_batches=0).fit(policy, datamodule=TinyDataModule(make_samples(4), 4))
    assert not torch.equal(policy.expert.action_out.weight, before)


class Elsewhere(TinyDataModule):
    """Other data: as the policy's but for what is changed, and with statistics of their own."""

    def __init__(self, features=None, action_horizon=HORIZON, **encoder):
        super().__init__(make_samples(4), 4)
        self.features = {**self.features, **(features or {})}
        self.action_horizon = action_horizon
        self.collator = VarlenPackingCollator(SampleEncoder(**{"image_size": (16, 16), "patch_size": 8, **encoder}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": 16}, "patch_size"),
        ({"resize": "bilinear"}, "resize"),
        ({"state_keys": ()}, "state_keys"),
        ({"action_horizon": 9}, "action_horizon"),
        ({"features": {"action": Feature("float32", (2,))}}, r"action\n.*\[2\]"),
        ({"features": {"observation.images.top": Feature("video", (16, 16, 3))}}, r"observation\.images\.top"),
    ],
)
def test_a_loaded_policy_refuses_data_that_it_would_misread(trained, changes, words):
    policy = load_policy(trained[0])
    with pytest.raises(ConfigError, match=words):
        make_trainer(max_steps=1).fit(policy.train(), datamodule=Elsewhere(**changes))


def test_a_resumed_run_refuses_data_that_its_policy_would_misread(trained):
    policy = FlowMatchingPolicy(width=32, expert_width=24, depth=2, heads=2, head_dim=8)
    with pytest.raises(ConfigError, match="resize"):
        make_trainer(max_steps=9).fit(
            policy, datamodule=Elsewhere(resize="bilinear"), ckpt_path=find_checkpoint(trained[0])
        )


def test_a_resumed_run_says_which_weights_do_not_fit(trained):
    policy = FlowMatchingPolicy(width=16, expert_width=24, depth=2, heads=2, head_dim=8)
    with pytest.raises(CheckpointError, match=r"token_embedding\.weight|image_positions"):
        make_trainer(max_steps=9).fit(
            policy, datamodule=TinyDataModule(make_samples(8), 4), ckpt_path=find_checkpoint(trained[0])
        )


def test_the_newest_checkpoint_is_taken(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for age, name in enumerate(["last.ckpt", "b.ckpt", "a.ckpt"]):
        (folder / name).touch()
        os.utime(folder / name, (1000 - age, 1000 - age))
    assert find_checkpoint(tmp_path).name == "last.ckpt"
    os.utime(folder / "a.ckpt", (2000, 2000))
    assert find_checkpoint(tmp_path).name == "a.ckpt"


def rewritten(run, tmp_path, change):
    content = torch.load(find_checkpoint(run), weights_only=True)
    change(content)
    torch.save(content, tmp_path / "changed.ckpt")
    return tmp_path / "changed.ckpt"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("policy_spec"), "no policy spec"),
        (lambda c: c.pop("policy_class"), "does not name its policy class"),
        (lambda c: c.pop("state_dict"), "not a Lightning checkpoint"),
        (lambda c: c["policy_spec"].pop("fps"), "spec is damaged"),
        (lambda c: c["policy_class"].update(class_path="nowhere.Policy"), "cannot be imported"),
        (lambda c: c["policy_class"].update(class_path="torch.nn.Linear"), "names no policy class"),
        (lambda c: c["policy_class"]["init_args"].update(wings=2), "no longer takes"),
        (lambda c: c["policy_class"]["init_args"].update(width=16), "does not fit"),
        (lambda c: c["state_dict"].popitem(), "does not fit"),
        (lambda c: c["policy_spec"]["encoder"].pop("tokenizer_json"), "does not fit"),
        (lambda c: c["policy_spec"]["encoder"].update(wings=2), "does not fit"),
    ],
)
def test_changed_checkpoints(trained, tmp_path, change, message):
    path = rewritten(trained[0], tmp_path, change)
    with pytest.raises(CheckpointError, match=message) as error:
        load_policy(path)
    assert str(path) in str(error.value) or "spec" in message


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_truncated_file(trained, tmp_path, share):
    content = find_checkpoint(trained[0]).read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_policy(tmp_path / "cut.ckpt")


class Unsafe:
    pass


@pytest.mark.parametrize("content", [[1, 2], {"a": Unsafe()}, torch.zeros(3)])
def test_not_a_checkpoint(tmp_path, content):
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError):
        load_policy(tmp_path / "other.ckpt")


def test_text_file_and_nothing(tmp_path):
    (tmp_path / "text.ckpt").write_text("hello")
    for path in (tmp_path / "text.ckpt", tmp_path / "absent.ckpt", tmp_path):
        if path == tmp_path:
            (tmp_path / "text.ckpt").unlink()
        with pytest.raises(CheckpointError):
            load_policy(path)


def test_environment_with_other_features(trained):
    _, policy, _, _ = trained
    features = dict(policy.spec.features)
    policy.check_environment({**features, "observation.extra": Feature("float32", (2,))})
    policy.check_environment({**features, CAMERAS[0]: Feature("image", (96, 96, 3))})
    lacking = {key: value for key, value in features.items() if key != CAMERAS[1]}
    for changed in (lacking, {**features, CAMERAS[1]: Feature("float32", (4,))}):
        with pytest.raises(CheckpointError, match=CAMERAS[1]):
            policy.check_environment(changed)
    with pytest.raises(CheckpointError, match="action"):
        policy.check_environment({**features, "action": Feature("float32", (9,))})


def test_spec_round_trip_and_unknown_feature():
    spec = make_spec()
    assert PolicySpec.from_dict(spec.to_dict()).to_dict() == spec.to_dict()
    with pytest.raises(ConfigError, match=r"observation\.nothing"):
        spec.stats_of(("observation.nothing",))
    with pytest.raises(ConfigError, match="features"):
        PolicySpec.from_datamodule(object())


class OddArgument(PolicyModule):
    def __init__(self, thing: object) -> None:
        super().__init__()


def test_arguments_that_no_checkpoint_could_hold_are_refused_before_training():
    with pytest.raises(ConfigError, match="thing"):
        make_trainer(max_steps=1).fit(OddArgument(object()), datamodule=TinyDataModule(make_samples(4), 4))
