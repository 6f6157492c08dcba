"""GR00T through the command line on a LeRobot dataset, and on two ranks without looking for unused parameters."""

from pathlib import Path

import pytest
import torch

from lightning_embodied.cli import main
from lightning_embodied.data import LeRobotDataset
from lightning_embodied.models import GrootN15Policy, load_policy
from lightning_embodied.models.groot.sizes import PRESETS
from tests.models.conftest import CAMERAS, make_samples, make_trainer
from tests.models.groot.policies import GrootData, make_arguments
from tests.strategies.ranks import run_ranks

DATASET = Path(__file__).parents[2] / "fixtures" / "lerobot_v30_image" / "dataset"


def fit(run, **changes):
    options = {
        "data.root": DATASET,
        "data.batch_size": 4,
        "data.val_episodes": 0,
        "trainer.max_steps": 2,
        "trainer.accelerator": "cpu",
        "trainer.default_root_dir": run,
        "wandb": "disabled",
        **changes,
    }
    arguments = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    assert main(["fit", "--config", "configs/groot.yaml", *arguments]) == 0
    return load_policy(run)


@pytest.mark.parametrize("prompt", ["eagle", "pi0"])
def test_trains_from_yaml_and_its_checkpoint_acts(prompt, tmp_path):
    policy = fit(tmp_path / "run", **{"data.collator.init_args.encoder.init_args.prompt": prompt})
    assert type(policy) is GrootN15Policy
    assert not policy.training
    sample = LeRobotDataset(str(DATASET))[0]
    observations = {key: sample[key][None] for key in policy.observation_keys if key != "task"}
    actions = policy.predict_action_chunk({**observations, "task": [sample["task"]]})
    assert actions.shape == (1, 8, *sample["action"].shape)
    camera = policy.spec.cameras[0]
    changed = {**observations, camera: 255 - observations[camera]}
    assert not torch.allclose(policy.predict_action_chunk({**changed, "task": [sample["task"]]}), actions)


def test_adapters_and_a_pretrained_directory_from_the_command_line(tmp_path):
    start = fit(tmp_path / "start")
    start.save_pretrained(tmp_path / "weights")
    adapters = '{"target_modules": ["model.action_head.model.*.to_q"], "rank": 2}'
    options = {"model.init_args.pretrained": tmp_path / "weights", "model.init_args.lora": adapters}
    adapted = fit(tmp_path / "adapted", **options)
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    blocks = PRESETS["tiny"].head.diffusion_model.num_layers
    assert len(trained) == 2 * blocks
    assert all(".attn1.to_q.lora_" in name for name in trained)
    for name, value in start.model.state_dict().items():
        assert torch.equal(adapted.model.state_dict()[name], value), name


def train_rank(rank):
    torch.manual_seed(0)
    samples = make_samples(12)
    if rank:  # this one never sees a picture
        samples = [{key: value for key, value in sample.items() if key not in CAMERAS} for sample in samples]
    policy = GrootN15Policy(**make_arguments(learning_rate=0.01))
    trainer = make_trainer(max_steps=3, strategy="ddp", devices=2, limit_val_batches=0)
    trainer.fit(policy, datamodule=GrootData(samples, 4))
    return policy.state_dict()


@pytest.mark.slow
def test_two_ranks_train_without_looking_for_unused_parameters(tmp_path):
    first, second = run_ranks(2, train_rank, tmp_path)
    assert all(torch.equal(first[key], second[key]) for key in first)
