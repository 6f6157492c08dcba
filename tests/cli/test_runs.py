"""Run directories: the newest run has the name, none is lost, resuming goes on in place."""

import csv
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_embodied.cli import main
from lightning_embodied.cli.metrics_log import RunMetricsLogger
from lightning_embodied.cli.runs import RunDirectory
from lightning_embodied.errors import ConfigError


class Logging(BoringModel):
    """A model that logs, and can be told to fail or to be stopped at a step."""

    def __init__(self, stop_at: int | None = None, fail_in_setup: bool = False):
        super().__init__()
        self.stop_at, self.fail_in_setup = stop_at, fail_in_setup

    def setup(self, stage):
        if self.fail_in_setup:
            raise ConfigError("this cannot be set up")

    def training_step(self, batch, batch_idx):
        if self.global_step == self.stop_at:
            raise KeyboardInterrupt
        out = super().training_step(batch, batch_idx)
        self.log("train/loss", out["loss"])
        return out


@pytest.fixture
def fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*flags, max_steps=4, model=None, **changes):
        config = {
            "model": {"class_path": f"{Logging.__module__}.Logging", "init_args": model or {}},
            "data": {"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"},
            "trainer": {
                "max_steps": max_steps,
                "accelerator": "cpu",
                "default_root_dir": "runs/a",
                "log_every_n_steps": 1,
                "limit_val_batches": 0,
            },
            "wandb": "disabled",
            **changes,
        }
        Path("config.yaml").write_text(yaml.safe_dump(config))
        return main(["fit", "--config", "config.yaml", *flags])

    return run


def rows(path):
    with Path(path).open() as file:
        return list(csv.DictReader(file))


def steps(path):
    return [int(row["step"]) for row in rows(path)]


def test_a_run_has_the_documented_layout(fit):
    assert fit() == 0
    assert steps("runs/a/metrics.csv") == [0, 1, 2, 3]
    assert yaml.safe_load(Path("runs/a/config.yaml").read_text())["trainer"]["max_steps"] == 4
    assert Path("runs/a/checkpoints/last.ckpt").is_file()
    assert not list(Path("runs/a").glob(".*"))


def test_the_saved_config_repeats_the_run(fit):
    fit()
    first = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert main(["fit", "--config", "runs/a/config.yaml"]) == 0
    again = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize("options", [{}, {"save_last": "link"}, {"save_weights_only": True}, {"save_top_k": -1}])
def test_the_last_step_is_saved_whatever_the_interval(fit, options):
    checkpoints = {
        "class_path": "ModelCheckpoint",
        "init_args": {"every_n_train_steps": 3, "save_last": True, **options},
    }
    trainer = {"max_steps": 5, "accelerator": "cpu", "default_root_dir": "runs/a", "callbacks": [checkpoints]}
    assert fit(trainer=trainer) == 0
    last = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 5
    assert [path.name for path in Path("runs/a/checkpoints").glob("*step=3.ckpt")] == ["epoch=0-step=3.ckpt"]
    step = torch.load("runs/a/checkpoints/epoch=0-step=3.ckpt", weights_only=True)
    assert step["global_step"] == 3


def test_a_second_fit_moves_the_first_aside_whole(fit, capsys):
    fit()
    first = {path.relative_to("runs/a") for path in Path("runs/a").rglob("*")}
    fit(max_steps=2)
    assert {path.relative_to("runs/a-1") for path in Path("runs/a-1").rglob("*")} == first
    assert steps("runs/a-1/metrics.csv") == [0, 1, 2, 3]
    assert steps("runs/a/metrics.csv") == [0, 1]
    assert "runs/a-1" in capsys.readouterr().out
    fit(max_steps=1)
    assert steps("runs/a-2/metrics.csv") == [0, 1]


def test_resuming_goes_on_in_place(fit):
    fit()
    assert fit("--ckpt_path=last", max_steps=6) == 0
    assert steps("runs/a/metrics.csv") == [0, 1, 2, 3, 4, 5]
    assert not Path("runs/a-1").exists()
    assert yaml.safe_load(Path("runs/a/config-1.yaml").read_text())["trainer"]["max_steps"] == 4
    assert yaml.safe_load(Path("runs/a/config.yaml").read_text())["trainer"]["max_steps"] == 6


def test_ctrl_c_keeps_a_checkpoint_and_can_be_resumed(fit, capsys):
    assert fit(model={"stop_at": 3}) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert steps("runs/a/metrics.csv") == [0, 1, 2]
    assert fit("--ckpt_path=last", max_steps=5) == 0
    after = steps("runs/a/metrics.csv")  # Lightning counts the batch it was stopped in
    assert after[:3] == [0, 1, 2]
    assert after == sorted(set(after))
    assert len(after) == 5


def test_a_run_that_never_trained_gives_the_name_back(fit, capsys):
    fit()
    assert fit(model={"fail_in_setup": True}) == 2
    assert "this cannot be set up" in capsys.readouterr().err
    assert steps("runs/a/metrics.csv") == [0, 1, 2, 3]
    assert not Path("runs/a-1").exists()


def test_validate_leaves_the_run_alone(fit):
    fit()
    before = Path("runs/a/config.yaml").read_text(), Path("runs/a/metrics.csv").read_text()
    assert main(["validate", "--config", "config.yaml", "--trainer.limit_val_batches=1"]) == 0
    assert (Path("runs/a/config.yaml").read_text(), Path("runs/a/metrics.csv").read_text()) == before
    assert not Path("runs/a-1").exists()


def test_wandb_and_a_logger_of_ones_own_exclude_each_other(fit, capsys):
    assert fit("--wandb=offline", trainer={"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "."}}}) == 2
    assert "both trainer.logger and wandb" in capsys.readouterr().err


def test_wandb_offline_writes_into_the_run_directory(fit):
    pytest.importorskip("wandb")
    assert fit("--wandb=offline") == 0
    assert list(Path("runs/a/wandb").glob("offline-run-*"))
    assert steps("runs/a/metrics.csv") == [0, 1, 2, 3]


def test_the_working_directory_is_never_moved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("metrics.csv").write_text("step\n1\n")
    with pytest.raises(ConfigError, match="working directory"):
        RunDirectory(".").claim(resume=False)


def test_two_runs_cannot_train_in_one_directory(tmp_path):
    first, second = RunDirectory(tmp_path / "a"), RunDirectory(tmp_path / "a")
    first.claim(resume=False)
    with pytest.raises(ConfigError, match="another process is training"):
        second.claim(resume=False)
    first.release()
    second.claim(resume=False)


def test_metrics_survive_new_columns_and_a_cut_last_row(tmp_path):
    logger = RunMetricsLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, step=0)
    logger.log_metrics({"a": 2.0, "b": 0.1}, step=1)
    logger.log_metrics({"b": 3.0}, step=2)
    expected = [
        {"step": "0", "a": "1.0", "b": ""},
        {"step": "1", "a": "2.0", "b": "0.1"},
        {"step": "2", "a": "", "b": "3.0"},
    ]
    assert rows(tmp_path / "metrics.csv") == expected
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("3,1")
    again = RunMetricsLogger(tmp_path)
    again.log_metrics({"a": 5.0}, step=3)
    assert rows(tmp_path / "metrics.csv") == [*expected, {"step": "3", "a": "5.0", "b": ""}]
