"""The private parts of Lightning that EmbodiedCLI overrides are still there and still called as it expects."""

import inspect

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_embodied.cli import EmbodiedCLI
from lightning_embodied.cli.commands import COMMANDS


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_signatures():
    assert parameters(LightningCLI._parse_ckpt_path) == ["self"]
    assert parameters(LightningCLI._add_subcommands) == ["self", "parser", "kwargs"]
    assert parameters(LightningCLI._instantiate_trainer) == ["self", "config", "callbacks"]
    assert parameters(LightningCLI._get) == ["self", "config", "key", "default"]


def test_they_are_called(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(EmbodiedCLI, "_parse_ckpt_path", lambda _: called.append("_parse_ckpt_path"))
    for name in ("_add_subcommands", "_instantiate_trainer", "_get"):
        real = getattr(LightningCLI, name)

        def spy(self, *args, real=real, name=name, **kwargs):
            called.append(name)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(LightningCLI, name, spy)
    args = ["fit", "--trainer.fast_dev_run=1", f"--trainer.default_root_dir={tmp_path}", "--wandb=disabled"]
    cli = EmbodiedCLI(model_class=BoringModel, datamodule_class=BoringDataModule, args=args)
    assert set(called) == {"_add_subcommands", "_parse_ckpt_path", "_instantiate_trainer", "_get"}
    assert cli.trainer.state.finished
    assert not list(tmp_path.iterdir())


def test_a_subclass_in_ones_own_script_has_all_commands(capsys):
    class MyCLI(EmbodiedCLI):
        pass

    with pytest.raises(SystemExit):
        MyCLI(args=["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in ["fit", "validate", "test", "predict", *COMMANDS])
