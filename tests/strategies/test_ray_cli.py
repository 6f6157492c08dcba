"""From YAML: the strategy is the only line that changes, also for a run that loses a worker."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
RAY = {"class_path": "lightning_embodied.strategies.RayDDPStrategy", "init_args": {"address": "local"}}
TRAINER = {
    "accelerator": "cpu",
    "devices": 2,
    "max_steps": 4,
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 1,
}


def losses(path, column="train_loss"):
    with next(path.rglob("metrics.csv")).open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]


def run(directory, command, config):
    directory.mkdir()
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    ended = subprocess.run(
        [sys.executable, *command, "--config", str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_lightning_embodied_fit_survives_a_lost_worker(tmp_path):
    config = yaml.safe_load((ROOT / "configs/tabletop.yaml").read_text())
    config["model"]["init_args"] |= {"width": 16, "expert_width": 16, "depth": 1, "heads": 1}
    data = config["data"]["init_args"]
    data |= {"root": str(ROOT / "tests/fixtures/lerobot_v30_image/dataset"), "batch_size": 4, "val_episodes": 0}
    data["collator"]["init_args"]["encoder"]["init_args"]["state_keys"] = ["observation.state"]
    checkpoint = {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 1, "save_top_k": -1}}
    once = {"marker": str(tmp_path / "marker"), "what": "kill", "step": 3}
    mishap = {"class_path": "tests.strategies.ray_models.Mishap", "init_args": once}
    for name, strategy, callbacks in (("ddp", "ddp", [checkpoint]), ("ray", RAY, [checkpoint, mishap])):
        trainer = {
            **TRAINER,
            "devices": 2,
            "max_steps": 4,
            "strategy": strategy,
            "default_root_dir": str(tmp_path / name / "run"),
        }
        whole = {**config, "trainer": {**trainer, "callbacks": callbacks}, "wandb": "offline"}
        run(tmp_path / name, ["-m", "lightning_embodied", "fit"], whole)
    assert (tmp_path / "marker").is_file()
    ddp, ray = (losses(tmp_path / name, "train/loss") for name in ("ddp", "ray"))
    assert len(ray) == len(ddp) == 4
    assert ray == pytest.approx(ddp, abs=1e-6)
    saved = [torch.load(next((tmp_path / name).rglob("*step=4.ckpt")), weights_only=False) for name in ("ddp", "ray")]
    served, served_on_ray = (checkpoint["LeRobotDataModule"] for checkpoint in saved)
    assert served_on_ray == served
    attempts = [path.name.split("-")[-1] for path in (tmp_path / "ray").rglob("offline-run-*") if path.is_dir()]
    assert len(attempts) == 2
    assert len(set(attempts)) == 1
