"""Where `--config` looks: the path as given, else the shipped configurations, said aloud."""

from pathlib import Path

import pytest

from lightning_embodied.cli.config_files import resolve_config, resolve_configs, shipped_configs
from lightning_embodied.errors import ConfigError


def test_an_existing_file_wins(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/quickstart.yaml").write_text("wandb: disabled\n")
    assert resolve_config("configs/quickstart.yaml") == "configs/quickstart.yaml"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["configs/quickstart.yaml", "quickstart.yaml", "quickstart"])
def test_a_shipped_one_is_found_from_elsewhere_and_said(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert resolve_config(name) == str(shipped_configs()["quickstart.yaml"])
    assert "using the one shipped" in capsys.readouterr().err


def test_another_folder_is_never_taken_for_the_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_config("mine/quickstart.yaml")


def test_every_config_on_the_line_is_resolved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = str(shipped_configs()["tabletop.yaml"])
    args = ["fit", "-c", "tabletop", "--config=tabletop", "--trainer.max_steps", "3"]
    assert resolve_configs(args) == ["fit", "-c", shipped, f"--config={shipped}", "--trainer.max_steps", "3"]
