"""A checkpoint in closed loop: found, hashed, fitted to the environment, next to a twin with fresh weights."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import standin
import torch

from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.evaluation import EvaluationConfig, EvaluationResult, evaluate
from lightning_embodied.evaluation.actors import untrained_twin
from lightning_embodied.features import STATISTICS, Feature, FeatureStats
from lightning_embodied.models import FlowMatchingPolicy, PolicySpec
from lightning_embodied.packing import SampleEncoder

CONFIG = EvaluationConfig(
    env_id=standin.ENV_ID,
    tasks=("walk", "stroll"),
    episodes_per_task=2,
    horizon=8,
    asynchronous=False,
    policies=("checkpoint", "untrained", "expert"),
)


def policy_for(features, **options):
    stats = {
        key: FeatureStats(
            **{name: np.full(2, {"min": -1, "q01": -1, "std": 1}.get(name, 1.0)) for name in STATISTICS}, count=9
        )
        for key in ("observation.state", "action")
    }
    policy = FlowMatchingPolicy(width=32, expert_width=32, depth=1, heads=2, head_dim=16, denoising_steps=2, **options)
    policy.spec = PolicySpec(
        features=features,
        stats=stats,
        encoder=SampleEncoder(image_size=(16, 16), patch_size=8).to_config(),
        action_horizon=4,
        fps=10,
        tasks=["walk left"],
        robot_type="point",
        dataset_fingerprint="0",
    )
    torch.manual_seed(0)
    policy.configure_model()
    with torch.no_grad():
        for parameter in policy.parameters():  # fresh output layers are zero, and zero actions tell nothing apart
            parameter.add_(0.1 * torch.randn_like(parameter))
    return policy.eval()


def save_run(folder, policy):
    (folder / "checkpoints").mkdir(parents=True)
    checkpoint = {"state_dict": policy.state_dict(), "pytorch-lightning_version": "2.6.6", "epoch": 0, "global_step": 1}
    policy.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, folder / "checkpoints" / "last.ckpt")
    return folder


@pytest.fixture(scope="module")
def policy():
    return policy_for(standin.ReachEnv().features)


def test_a_run_directory_is_evaluated_in_place(tmp_path, policy):
    run = save_run(tmp_path / "run", policy)
    result = evaluate(run, CONFIG)
    assert EvaluationResult.load(run / "evaluation" / "results.json") == result
    assert result.checkpoint["sha256"] == hashlib.sha256((run / "checkpoints" / "last.ckpt").read_bytes()).hexdigest()
    assert result.settings["execute_steps"] == 2  # half of the policy's four
    assert result.policies == ["checkpoint", "untrained", "expert"]
    assert {policy: len(result.select(policy)) for policy in result.policies} == dict.fromkeys(result.policies, 4)
    from_file = evaluate(run / "checkpoints" / "last.ckpt", CONFIG, output_dir=tmp_path / "elsewhere")
    assert from_file.episodes == result.episodes == evaluate(policy, CONFIG).episodes


@pytest.mark.parametrize("sampling_seed", [0, None])
def test_slots_do_not_change_a_bit_of_a_real_policy(policy, sampling_seed):
    own = policy_for(standin.ReachEnv().features, sampling_seed=sampling_seed)
    predict, traces = own.predict_action_chunk, []

    def traced(observations, *, generator=None):
        chunk = predict(observations, generator=generator)
        rows = zip(observations["observation.state"], observations["task"], chunk, strict=True)
        traces[-1] += [(state.numpy().tobytes(), task, actions.numpy().tobytes()) for state, task, actions in rows]
        return chunk

    own.predict_action_chunk = traced
    for slots in (1, 3, 8):
        traces.append([])
        evaluate(own, replace(CONFIG, batched=False, policies=("checkpoint",), episodes_per_task=4, slots=slots))
    assert len(traces[0]) == 8 * 4
    assert len(set(traces[0])) > 8  # more than the starts of the eight episodes
    assert sorted(traces[0]) == sorted(traces[1]) == sorted(traces[2])


def test_the_twin_has_other_weights_and_the_same_shape(policy):
    twin, again, other = untrained_twin(policy, 0), untrained_twin(policy, 0), untrained_twin(policy, 1)
    weights = [torch.cat([p.flatten() for p in module.parameters()]) for module in (policy, twin, again, other)]
    assert weights[0].shape == weights[1].shape
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[3])
    assert twin.spec == policy.spec
    assert not twin.training


def test_a_checkpoint_of_another_robot_is_refused_by_feature(tmp_path):
    features = standin.ReachEnv().features
    run = save_run(tmp_path, policy_for({**features, "observation.images.wrist": Feature("video", (16, 16, 3))}))
    with pytest.raises(CheckpointError, match=r"another feature set[\s\S]*wrist"):
        evaluate(run, CONFIG)
    assert not (run / "evaluation").exists()


def test_what_a_policy_cannot_do_is_said_at_once(policy):
    with pytest.raises(ConfigError, match="execute_steps"):
        evaluate(policy, replace(CONFIG, execute_steps=5))
    with pytest.raises(ConfigError, match="untrained twin"):
        evaluate(standin.NoisyWalker(), replace(CONFIG, policies=("untrained",)))
