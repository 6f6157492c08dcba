"""Every shipped configuration is commented, parses, and builds what it names; `tabletop`'s chain is run for real."""

import re

import pytest
import yaml

from lightning_embodied.callbacks import GoodputMonitor
from lightning_embodied.cli import EmbodiedCLI
from lightning_embodied.cli.commands import COMMANDS, command_parser
from lightning_embodied.cli.config_files import shipped_configs
from lightning_embodied.data import LeRobotDataModule
from lightning_embodied.models import PolicyModule

CONFIGS = shipped_configs()
FIT = [name for name, path in CONFIGS.items() if "model" in yaml.safe_load(path.read_text())]
LEAF = re.compile(r"^(?P<indent>[ -]*)(?P<key>\w+): *\S")


class OnlyBuild(EmbodiedCLI):
    """Builds what `fit` needs and stops there."""

    def fit(self, **kwargs):
        pass


def command_of(name):
    """The subcommand a configuration is for, from the example in its header."""
    return re.search(
        r"^#\s+lightning-embodied (\w+) .*--config configs/" + re.escape(name), CONFIGS[name].read_text(), re.M
    )[1]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_has_a_comment(name):
    lines = CONFIGS[name].read_text().splitlines()
    for number, line in enumerate(lines):
        leaf = LEAF.match(line)
        if leaf is None or leaf["key"] == "class_path":
            continue
        above = number - 1
        while LEAF.match(lines[above]) and len(LEAF.match(lines[above])["indent"]) == len(leaf["indent"]):
            above -= 1  # neighbours may share one
        assert lines[above].strip().startswith("#"), f"{name}:{number + 1}: {line}"


@pytest.mark.parametrize("name", FIT)
def test_a_fit_configuration_builds(name, tmp_path):
    cli = OnlyBuild(args=["fit", "--config", str(CONFIGS[name]), "--wandb=disabled"])
    assert command_of(name) == "fit"
    assert isinstance(cli.model, PolicyModule)
    assert isinstance(cli.datamodule, LeRobotDataModule)
    assert any(isinstance(callback, GoodputMonitor) for callback in cli.trainer.callbacks)
    assert cli.trainer.checkpoint_callback.save_on_exception


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in FIT])
def test_a_configuration_of_ours_parses(name):
    command = command_of(name)
    assert command in COMMANDS
    extra = ["--checkpoint", "runs/x"] if command == "evaluate" else []
    options = command_parser(command).parse_args(["--config", str(CONFIGS[name]), *extra])
    for key, value in yaml.safe_load(CONFIGS[name].read_text()).items():
        assert options[key] == value


def test_the_vision_configuration_reads_no_simulator_state():
    assert "environment_state" not in CONFIGS["metaworld_vision.yaml"].read_text()
