"""One YAML but for its strategy, Lightning's own and those on Ray: the same losses on four ranks."""

import csv

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from tests.strategies.ranks import run_ranks
from tests.strategies.ray_models import Data, Regression

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

RANKS = 4
TRAINER = {
    "accelerator": "cpu",
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 1,
    "enable_progress_bar": False,
}


def ours(name, **options):
    options = {"num_workers": RANKS, "restart": "warm", **options}
    return {"class_path": f"lightning_embodied.strategies.{name}", "init_args": options}


STRATEGIES = {
    "ddp": "ddp",
    "ModelParallelStrategy": {
        "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
        "init_args": {"data_parallel_size": RANKS, "tensor_parallel_size": 1},
    },
    "RayDDPStrategy": ours("RayDDPStrategy"),
    "RayFSDPStrategy": ours("RayFSDPStrategy"),
    "RayFSDPStrategy, replicate: 2": ours("RayFSDPStrategy", replicate=2),
}


class ShardsItself(Regression):
    """Shards itself under Lightning's own strategy, which leaves that to the module."""

    def configure_model(self):
        if type(self.trainer.strategy) is ModelParallelStrategy:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def fit(rank, path):
    LightningCLI(ShardsItself, Data, seed_everything_default=5, args=["fit", "--config", str(path)])


def losses(path, column="train_loss"):
    with next(path.rglob("metrics.csv")).open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]


def test_five_strategies_have_the_same_losses(ray_cluster, tmp_path):
    found = {}
    for name, strategy in STRATEGIES.items():
        directory = tmp_path / str(len(found))
        directory.mkdir()
        logger = {"class_path": "CSVLogger", "init_args": {"save_dir": str(directory)}}
        more = {"devices": RANKS, "max_steps": 6, "enable_checkpointing": False, "default_root_dir": str(directory)}
        config = {"trainer": {**TRAINER, **more, "strategy": strategy, "logger": logger}}
        (directory / "given.yaml").write_text(yaml.safe_dump(config))
        if name.startswith("Ray"):
            fit(0, directory / "given.yaml")
        else:
            run_ranks(RANKS, fit, directory / "ranks", directory / "given.yaml")
        assert next(directory.rglob("version_0/config.yaml")).is_file()
        found[name] = [*losses(directory), *losses(directory, "val_loss")]
    print(yaml.safe_dump(found))
    assert len(found["ddp"]) == 6 + 2
    for name, values in found.items():
        assert values == pytest.approx(found["ddp"], abs=1e-6), name
