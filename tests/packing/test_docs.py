"""What docs/packing.md shows: its Python runs, its YAML parses."""

import re
from pathlib import Path

import yaml

from lightning_embodied.callbacks import ForceAttentionBackend
from lightning_embodied.cli import EmbodiedCLI
from lightning_embodied.packing import PackingOptions

PAGE = (Path(__file__).parents[2] / "docs" / "packing.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


class OnlyBuild(EmbodiedCLI):
    def fit(self, **kwargs):
        pass


def test_the_model_of_ones_own():
    scope = {}
    for code in blocks("python"):
        exec(compile(code, "docs/packing.md", "exec"), scope)  # noqa: S102  the page's own lines
    assert scope["out"].shape[1:] == (4, 16)
    packs = list(scope["stream"])
    assert sum(len(tokens) for tokens, _, _ in packs) == sum(map(len, scope["samples"]))
    assert all(len(tokens) == cu_seqlens[-1] <= 1024 for tokens, cu_seqlens, _ in packs)


def test_the_configuration(tmp_path):
    data, trainer = blocks("yaml")
    config = {**yaml.safe_load(data), **yaml.safe_load(trainer), "model": {"class_path": "FlowMatchingPolicy"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    cli = OnlyBuild(args=["fit", "--config", str(tmp_path / "config.yaml"), "--wandb=disabled"])
    assert cli.datamodule.token_budget == 4096
    assert cli.datamodule.packing == PackingOptions()
    assert any(isinstance(callback, ForceAttentionBackend) for callback in cli.trainer.callbacks)
