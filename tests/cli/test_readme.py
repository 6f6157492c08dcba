"""Every command of the README works: `tabletop` for real with few steps, the long ones as far as parsing."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from lightning_embodied.cli import main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
FEW = {
    "collect": ["--episodes_per_task=2"],
    "fit": [
        "--wandb=disabled",
        "--trainer.accelerator=cpu",
        "--trainer.max_steps=4",
        "--trainer.val_check_interval=2",
        "--trainer.limit_val_batches=1",
        "--trainer.log_every_n_steps=1",
        "--data.batch_size=4",
        "--data.val_episodes=1",
    ],
    "evaluate": ["--episodes_per_task=1", "--slots=1"],
}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def commands(first):
    lines = [line for block in blocks("bash") for line in block.splitlines() if line]
    return [line for line in lines if shlex.split(line)[0] == first]


def test_there_are_no_other_commands():
    lines = [line for block in blocks("bash") for line in block.splitlines() if line]
    assert len(lines) == sum(len(commands(first)) for first in ("make", "pip", "lightning-embodied"))
    assert set(re.findall(r"^```(\w+)", README, re.M)) == {"bash", "diff", "python"}


@pytest.mark.parametrize("command", commands("make"))
def test_make_targets(command):
    subprocess.run([*shlex.split(command), "--dry-run"], check=True, capture_output=True, cwd=ROOT)


@pytest.mark.parametrize("command", commands("pip"))
def test_extras(command):
    name, extras = re.fullmatch(r"([\w-]+)\[([\w,]+)\]", shlex.split(command)[-1]).groups()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert name == project["name"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("command", [line for line in commands("lightning-embodied") if "tabletop" not in line])
def test_long_commands_as_far_as_parsing(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = shlex.split(command)[1:]
    assert main([*args, "--print_config"]) == 0
    assert isinstance(yaml.safe_load(capsys.readouterr().out), dict)


@pytest.mark.slow
def test_the_tabletop_chain_for_real(tmp_path, monkeypatch):
    """In the README's order, so that each command finds what the ones before it wrote."""
    monkeypatch.chdir(tmp_path)
    for command in (line for line in commands("lightning-embodied") if "tabletop" in line):
        args = shlex.split(command)[1:]
        more = ["--trainer.max_steps=6"] if "--ckpt_path" in args else []
        assert main([*args, *FEW.get(args[0], []), *more]) == 0, command
    run = Path("runs/tabletop")
    for name in ("config.yaml", "metrics.csv", "checkpoints/last.ckpt", "evaluation/results.json", "report.html"):
        assert (run / name).is_file(), name
    assert list(run.glob("evaluation/videos/*.mp4"))
    assert {path.name for path in Path("runs").iterdir()} == {"tabletop", "mine"}


def test_the_diff_turns_a_plain_lightning_project_into_one_with_our_plugins(tmp_path, monkeypatch):
    """Both sides parse with Lightning's own CLI; only the project's own names are replaced by Lightning's demo."""
    from lightning.pytorch.cli import LightningCLI

    (diff,) = blocks("diff")
    assert sum(line.startswith("+") for line in diff.splitlines()) <= 5
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    for side, data in (("-", "BoringDataModule"), ("+", "LeRobotDataModule")):
        text = "\n".join(line[1:] for line in diff.splitlines() if line[0] in (" ", side))
        text = re.sub(r"my_project\.MyPolicy", "lightning.pytorch.demos.boring_classes.BoringModel", text)
        text = re.sub(r"my_project\.MyDataModule\n  init_args:\n    root: .*", _DEMO, text)
        Path("config.yaml").write_text(text)
        cli = LightningCLI(run=False, args=["--config", "config.yaml"], save_config_callback=None)
        assert type(cli.datamodule).__name__ == data
        monitors = [callback for callback in cli.trainer.callbacks if type(callback).__name__ == "GoodputMonitor"]
        assert len(monitors) == (side == "+")


_DEMO = "lightning.pytorch.demos.boring_classes.BoringDataModule"


def test_links_lead_somewhere():
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / page).read_text()):
            assert (ROOT / target).exists(), f"{page}: {target}"
    for folder in re.findall(r"^\| `([\w/.]+)`", README.split("## Where things are")[1], re.M):
        assert (ROOT / folder).exists(), folder


def test_the_script_of_ones_own_is_whole():
    (code,) = blocks("python")
    compile(code, "README.md", "exec")
    scope: dict[str, object] = {"__name__": "readme"}
    exec(code, scope)  # noqa: S102  the README's own lines
    assert "EmbodiedCLI" in scope
