"""LeRobotPolicyModule on a stand-in with LeRobot's interface; on LeRobot itself in `make crosscheck`."""

import csv
import shutil
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_embodied.callbacks import GoodputMonitor
from lightning_embodied.data import LeRobotDataModule
from lightning_embodied.errors import ConfigError, MissingExtraError
from lightning_embodied.models import FlowMatchingPolicy, LeRobotPolicyModule, load_policy
from tests.models import lerobot_standin as lerobot
from tests.models.conftest import make_trainer

ROOT = Path(__file__).parents[1] / "fixtures" / "lerobot_v30_chunks" / "dataset"
CAMERA, STATE = "observation.images.top", "observation.state"


@pytest.fixture(autouse=True)
def standin(monkeypatch):
    lerobot.install(monkeypatch)


def data(**options):
    return LeRobotDataModule(str(ROOT), **{"batch_size": 8, "cameras": [CAMERA], "seed": 3, **options})


class Keep(Callback):
    def __init__(self):
        self.batches, self.gradients = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.batches.append(batch)

    def on_before_zero_grad(self, trainer, module, optimizer):
        self.gradients.append([p.grad.clone() for p in module.parameters() if p.grad is not None])


def fit(module, keep=None, **options):
    options = {"max_steps": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0, **options}
    trainer = make_trainer(callbacks=[keep or Keep()], **options)
    trainer.fit(module, datamodule=data())
    return trainer


def observations(batch, module):
    """The last of the observations that a batch holds."""
    last = (slice(None), -1) if module.lerobot_config.n_obs_steps > 1 else slice(None)
    return {key: batch[key] if key == "task" else batch[key][last] for key in module.observation_keys}


@pytest.mark.parametrize(
    ("policy_type", "action", "history"), [("chunk", [0, 1, 2, 3, 4, 5], None), ("history", [-1, 0, 1, 2, 3, 4], 2)]
)
def test_a_sample_holds_the_frames_that_the_policy_reads(policy_type, action, history):
    keep = Keep()
    fit(LeRobotPolicyModule(policy_type), keep)
    batch = keep.batches[0]
    assert batch["action"].shape == (8, len(action), 3)
    assert batch["action_is_pad"].shape == (8, len(action))
    assert batch[STATE].shape == ((8, 4) if history is None else (8, history, 4))
    assert batch[CAMERA].dtype == torch.uint8
    assert len(batch["task"]) == 8
    wanted = data(action_horizon=6)
    wanted.setup()
    alone = wanted.train_dataset
    frame, episode = int(batch["frame_index"][0]), int(batch["episode_index"][0])
    start = next(i for i in range(len(alone)) if alone.numeric("episode_index")[i, 0] == episode)
    length = alone.episode_lengths[alone.episodes.index(episode)]
    frames = [start + min(max(frame + i, 0), length - 1) for i in action]
    expected = torch.from_numpy(alone.numeric("action")[frames].astype("float32"))
    assert torch.equal(batch["action"][0], expected)


def test_a_step_is_lerobots_own_step():
    """Its script: preset's optimizer over `get_optim_params`, gradients clipped at the preset's norm."""
    keep, module = Keep(), LeRobotPolicyModule("chunk", {"width": 5})
    torch.manual_seed(0)
    trainer = fit(module, keep, max_steps=1)
    policy, config = module.policy, module.lerobot_config
    torch.manual_seed(0)
    own = lerobot.ChunkPolicy(config)
    stats = {
        key: {name: torch.tensor(getattr(value, name), dtype=torch.float32) for name in ("mean", "std", "min", "max")}
        for key, value in trainer.datamodule.stats.items()
    }
    stats[CAMERA] = {"mean": torch.tensor([0.485, 0.456, 0.406])[:, None, None]}
    stats[CAMERA]["std"] = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    before, _ = lerobot.make_pre_post_processors(config, dataset_stats=stats)
    optimizer = config.get_optimizer_preset().build(own.get_optim_params())
    batch = dict(keep.batches[0])
    batch[CAMERA] = batch[CAMERA].to(torch.float32) / 255.0
    loss, _ = own(before(batch))
    loss.backward()
    assert torch.nn.utils.clip_grad_norm_(own.parameters(), 0.05) > 0.05
    optimizer.step()
    for ours, theirs in zip(policy.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(float(loss))


def test_the_trainers_clipping_comes_first_and_the_schedule_is_lerobots():
    keep, module = Keep(), LeRobotPolicyModule("history")
    trainer = fit(module, keep, max_steps=3, gradient_clip_val=1e-4)
    norm = torch.stack([gradient.norm() for gradient in keep.gradients[-1]]).norm()
    assert float(norm) == pytest.approx(1e-4, rel=1e-3)
    (schedule,) = trainer.lr_scheduler_configs
    assert schedule.scheduler.get_last_lr()[0] == pytest.approx(1e-2 * (1 - 3 / 4))


def test_what_the_policy_reports_is_logged_beside_the_goodput(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    options = {"max_steps": 2, "limit_val_batches": 1, "val_check_interval": 1, "log_every_n_steps": 1}
    trainer = make_trainer(callbacks=[GoodputMonitor()], **options)
    trainer.loggers = [logger]
    trainer.fit(LeRobotPolicyModule("chunk"), datamodule=data())
    with open(tmp_path / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["train/l1_loss"]) == pytest.approx(float(rows[0]["train/loss"]))
    assert float(rows[0]["samples_per_batch"]) == 8
    assert any(float(row["val/loss"] or 0) > 0 for row in rows)
    assert "train/note" not in rows[0]


@pytest.mark.parametrize("policy_type", ["chunk", "history"])
def test_a_checkpoint_alone_acts_as_the_policy_does(tmp_path, policy_type):
    keep, module = Keep(), LeRobotPolicyModule(policy_type, {"width": 5})
    trainer = fit(module, keep)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = load_policy(tmp_path / "a.ckpt")
    assert isinstance(loaded, LeRobotPolicyModule)
    assert loaded.lerobot_config == module.lerobot_config
    seen = observations(keep.batches[0], module)
    chunks = []
    for policy in (module.train(), module, loaded):
        torch.manual_seed(1)
        chunks.append(policy.predict_action_chunk(seen))
    assert module.policy.training
    assert not loaded.policy.training
    assert chunks[0].shape == (8, 4, 3)
    assert all(torch.equal(chunk, chunks[0]) for chunk in chunks)
    actions = module.spec.stats["action"]
    assert (chunks[0].mean((0, 1)) - torch.tensor(actions.mean)).abs().max() < 3 * float(actions.std.max())
    loaded.check_environment(module.spec.features)
    with pytest.raises(ConfigError, match="knows no such observation"):
        loaded.predict_action_chunk({**seen, "observation.images.wrong": seen[CAMERA]})


def test_a_run_resumes(tmp_path):
    first = fit(LeRobotPolicyModule("chunk"))
    first.save_checkpoint(tmp_path / "a.ckpt")
    keep, module = Keep(), LeRobotPolicyModule("chunk")
    make_trainer(max_steps=4, callbacks=[keep]).fit(module, datamodule=data(), ckpt_path=tmp_path / "a.ckpt")
    whole, reference = Keep(), LeRobotPolicyModule("chunk")
    fit(reference, whole, max_steps=4)
    assert torch.equal(keep.batches[0]["frame_index"], whole.batches[2]["frame_index"])


def test_pretrained_weights_and_configuration_and_back_to_lerobot(tmp_path):
    module = LeRobotPolicyModule("chunk", {"width": 5})
    trainer = fit(module)
    module.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "policy_preprocessor.json").is_file()
    again = LeRobotPolicyModule(pretrained_path=str(tmp_path / "saved"), config={"n_action_steps": 2})
    again.spec = module.spec
    again.configure_model()
    assert again.lerobot_config.width == 5
    assert again.policy.training
    for ours, theirs in zip(again.policy.parameters(), module.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    tuned = LeRobotPolicyModule(pretrained_path=str(tmp_path / "saved"))
    trainer = fit(tuned)
    trainer.save_checkpoint(tmp_path / "b.ckpt")
    shutil.rmtree(tmp_path / "saved")
    loaded = load_policy(tmp_path / "b.ckpt")
    for ours, theirs in zip(loaded.policy.parameters(), tuned.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "which policy is not said"),
        ({"policy_type": "akt"}, "chunk, history"),
        ({"policy_type": "chunk", "config": {"chunksize": 3}}, "chunksize"),
    ],
)
def test_wrong_options_are_named(options, word):
    with pytest.raises(ConfigError, match=word):
        fit(LeRobotPolicyModule(**options))


def test_batches_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="cannot be filled by tokens"):
        make_trainer(max_steps=1).fit(LeRobotPolicyModule("chunk"), datamodule=data(token_budget=100))
    with pytest.raises(ConfigError, match="reads packed batches"):
        make_trainer(max_steps=1).fit(FlowMatchingPolicy(), datamodule=data())


def test_without_lerobot_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lerobot"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lerobot", None)
    with pytest.raises(MissingExtraError, match=r"lightning-embodied\[lerobot\]"):
        fit(LeRobotPolicyModule("chunk"))
