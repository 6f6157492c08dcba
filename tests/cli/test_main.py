"""Every way a command can end: the message on stderr, the exit code, and no traceback unless asked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_embodied.cli import main
from lightning_embodied.cli.commands import COMMANDS, LIGHTNING_COMMANDS
from lightning_embodied.data import LeRobotDataset, compute_stats
from lightning_embodied.errors import ConfigError
from lightning_embodied.features import FeatureStats

FIXTURES = Path(__file__).parents[1] / "fixtures"

BORING = {
    "model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"},
    "data": {"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"},
    "wandb": "disabled",
}


@pytest.fixture
def config(tmp_path):
    def write(**changes):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({**BORING, **changes}))
        return str(path)

    return write


def test_help_lists_every_command_in_a_line_and_an_example(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in [*LIGHTNING_COMMANDS, *COMMANDS]:
        assert sum(line.split()[:1] == [name] for line in out.splitlines()) == 1
    assert "example:" in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_explains_every_option(name, capsys):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"lightning-embodied {name}" in out
    assert "--config" in out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lightning-embodied ")


def test_help_imports_neither_torch_nor_lightning():
    code = (
        "import sys; from lightning_embodied.cli import main; main(['--help']);"
        "assert not {'torch', 'lightning', 'jsonargparse'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_unknown_command_names_the_closest(capsys):
    assert main(["fitt"]) == 2
    assert "did you mean 'fit'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "whole"), [(["collect", "--roo", "x"], "root"), (["fit", "--trainer.max_step=1"], "trainer.max_steps")]
)
def test_half_an_option_is_not_guessed(args, whole, capsys):
    assert main(args) == 2
    assert whole in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer": {"max_epoch": 3}}, ["unknown key 'trainer.max_epoch'", "did you mean 'trainer.max_epochs'?"]),
        ({"trainr": {"max_epochs": 3}}, ["unknown key 'trainr.max_epochs'", "did you mean 'trainer.max_epochs'?"]),
        ({"trainer": {"max_epochs": "three"}}, ["trainer.max_epochs", "three", "int or null"]),
        ({"trainer": {"precision": "bf16-mixd"}}, ["trainer.precision", "did you mean 'bf16-mixed'?"]),
        ({"wandb": "onlin"}, ["wandb", "onlin", "did you mean 'online'?"]),
        (
            {"trainer": {"callbacks": [{"class_path": "ModelCheckpont"}]}},
            ["no class 'ModelCheckpont'", "did you mean 'ModelCheckpoint'"],
        ),
        (
            {"trainer": {"callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"monitr": "x"}}]}},
            ["unknown key 'monitr'", "ModelCheckpoint", "did you mean 'monitor'?"],
        ),
        (
            {"model": {"class_path": "lightning.pytorch.demos.boring_classes.DemoModel", "init_args": {"out_dm": 3}}},
            ["unknown key 'out_dm'", "DemoModel", "did you mean 'out_dim'?"],
        ),
        (
            {
                "model": {
                    "class_path": "lightning.pytorch.demos.boring_classes.DemoModel",
                    "init_args": {"out_dim": "x"},
                }
            },
            ["model.out_dim", "x", "int"],
        ),
        ({"model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModl"}}, ["BoringModl", "BoringModel"]),
        (
            {"model": {"class_path": "FlowMatchingPolicy", "init_args": {"lora": {"target_modules": ["*"], "rnk": 2}}}},
            ["unknown key 'rnk'", "model.lora", "did you mean 'rank'?"],
        ),
        (
            {"model": {"class_path": "FlowMatchingPolicy", "init_args": {"lora": {"rank": 2}}}},
            ["the key 'target_modules' is missing", "model.lora"],
        ),
        (
            {"model": {"class_path": "FlowMatchingPolicy", "init_args": {"noise_samples_per_observation": 0}}},
            ["noise_samples_per_observation", "0"],
        ),
        (
            {
                "data": {
                    "class_path": "LeRobotDataModule",
                    "init_args": {
                        "root": "nowhere",
                        "collator": {
                            "class_path": "VarlenPackingCollator",
                            "init_args": {"encoder": {"class_path": "SampleEncoder", "init_args": {"patch_size": 5}}},
                        },
                    },
                }
            },
            ["pictures do not divide into patches", "patches of 5"],
        ),
    ],
)
def test_mistakes_in_a_yaml_name_the_key_and_the_closest(changes, said, config, capsys):
    assert main(["fit", "--config", config(**changes)]) == 2
    err = capsys.readouterr().err
    for words in said:
        assert words in err
    assert "Traceback" not in err
    assert len(err.splitlines()) < 10


def test_unknown_flag_names_the_closest(config, capsys):
    assert main(["fit", "--config", config(), "--trainer.max_stepz=3"]) == 2
    assert "did you mean 'trainer.max_steps'?" in capsys.readouterr().err


def test_broken_yaml_is_one_message(tmp_path, capsys):
    path = tmp_path / "broken.yaml"
    path.write_text("a: [b\nc: d")
    assert main(["fit", "--config", str(path)]) == 2
    assert "line 2" in capsys.readouterr().err


def test_missing_config_names_the_closest_shipped_one(capsys):
    assert main(["fit", "--config", "configs/quickstrat.yaml"]) == 2
    assert "did you mean 'configs/quickstart.yaml'?" in capsys.readouterr().err


def test_debug_lets_the_error_through(monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEBUG", "")  # main sets it; monkeypatch takes it back
    with pytest.raises(ConfigError):
        main(["fitt", "--debug"])


def test_ctrl_c_is_one_line_and_130(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_embodied.cli.entry.run_command", interrupted)
    assert main(["doctor"]) == 130
    err = capsys.readouterr().err
    assert "stopped by Ctrl-C" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"]])
def test_a_reader_that_stops_reading_is_no_error(arguments):
    command = [sys.executable, "-m", "lightning_embodied", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 141


def test_module_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "lightning_embodied", "--version"], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("lightning-embodied ")


def test_stats_prints_a_row_for_each_dimension_and_writes_the_file(tmp_path, capsys):
    root, output = FIXTURES / "lerobot_v30_image" / "dataset", tmp_path / "stats.json"
    assert main(["stats", "--root", str(root), "--keys", "[action]", "--output", str(output)]) == 0
    dataset = LeRobotDataset(root)
    out = capsys.readouterr().out
    assert f"{len(dataset)} frames" in out
    assert sum("act_" in line for line in out.splitlines()) == dataset.features["action"].shape[0]
    expected = compute_stats(dataset, ["action"])["action"]
    written = FeatureStats.from_dict(json.loads(output.read_text())["action"])
    assert written.count == len(dataset)
    assert written.q50.tolist() == expected.q50.tolist()
