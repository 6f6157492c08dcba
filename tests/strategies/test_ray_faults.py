"""Faults beside those of a worker: each ends in recovery, or in one error that says what to do."""

import re
import resource
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_embodied.callbacks import FiniteLoss
from lightning_embodied.errors import CheckpointError, ConfigError, TrainingError
from lightning_embodied.strategies import RankFailedError, RayDDPStrategy, RayFSDPStrategy, latest_checkpoint
from tests.strategies.ray_models import Data, Mishap, Regression

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

SEAT = {"seat": 1}


@pytest.fixture(scope="module")
def three_nodes(ray_cluster):
    nodes = [ray_cluster.add_node(num_cpus=0, resources=SEAT) for _ in range(3)]
    yield
    for node in nodes:
        ray_cluster.remove_node(node, allow_graceful=False)


def trainer(tmp_path, strategy, *callbacks):
    seed_everything(3)
    return Trainer(
        strategy=strategy,
        callbacks=[*callbacks, ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1, save_top_k=-1)],
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class PortTaken(RayDDPStrategy):
    """Somebody listens where rank 0 is about to, once."""

    def setup_environment(self):
        import socket

        place = self.environment.assignment
        taken = place.attempt == 0 and place.rank == 0
        with socket.create_server(("", place.main_port)) if taken else socket.socket():
            super().setup_environment()


class Slow(Callback):
    """One rank takes longer for a step than a sign of life may."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == 2:
            assert trainer.strategy.environment.assignment.attempt == 2, "a slow rank is no lost one"
            threading.Event().wait(4.0)


def test_a_lost_node_a_port_that_is_taken_and_a_slow_rank_change_nothing(three_nodes, tmp_path):
    options = {"num_workers": 2, "restart": "warm", "resources_per_worker": SEAT, "hang_timeout": 3.0}
    found = []
    for name, kind, faults in (
        ("calm", RayDDPStrategy, []),
        ("rough", PortTaken, [Mishap(tmp_path / "marker", "lose node", step=1), Slow()]),
    ):
        model = Regression(noise=0.1)
        trainer(tmp_path / name, kind(**options), *faults).fit(model, Data())
        found.append(weights(model))
    assert (tmp_path / "marker").exists()
    assert found[0].equal(found[1])


class DiskFull(Callback):
    """No file of rank 0 may grow from the third step on."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 0 and trainer.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_full_disk_ends_the_run_in_one_error_and_the_checkpoints_before_stay(ray_cluster, tmp_path):
    run = trainer(tmp_path / "ddp", RayDDPStrategy(num_workers=2, restart="warm"), DiskFull())
    with pytest.raises(RankFailedError, match=r"rank 0 .* failed: OSError: \[Errno 27\] File too large") as caught:
        run.fit(Regression(), Data())
    assert caught.value.restarts == 0
    for path in (tmp_path / "ddp" / "checkpoints").iterdir():
        assert torch.load(path, weights_only=True)["global_step"] in (1, 2)

    run = trainer(tmp_path / "fsdp", RayFSDPStrategy(num_workers=2, restart="warm"), DiskFull())
    with pytest.raises(CheckpointError, match="was not written; the one before it is still complete") as error:
        run.fit(Regression(), Data())
    lost = int(re.search(r"step=(\d+)\.ckpt \(rank 0\)", str(error.value))[1])
    assert lost in (2, 3)  # that of step 2 is being written when the disk fills
    assert latest_checkpoint(tmp_path / "fsdp" / "checkpoints").endswith(f"step={lost - 1}.ckpt")


class NotANumber(Regression):
    """The loss of one rank is NaN at the third step, whose gradients reach all."""

    def training_step(self, batch, batch_idx):
        bad = self.trainer.global_rank == 1 and self.trainer.global_step == 2
        return super().training_step(batch, batch_idx) * (float("nan") if bad else 1.0)


def test_a_loss_that_is_nan_is_one_error_and_not_tried_again(ray_cluster, tmp_path):
    run = trainer(tmp_path, RayDDPStrategy(num_workers=2), FiniteLoss(), Attempts(tmp_path / "book"))
    with pytest.raises(TrainingError, match=r"not finite\n.* step \d"):
        run.fit(NotANumber(), Data())
    assert set((tmp_path / "book").read_text().split()) == {"0"}
    for path in (tmp_path / "checkpoints").iterdir():
        saved = torch.load(path, weights_only=True)["state_dict"]
        assert all(tensor.isfinite().all() for tensor in saved.values())


class Attempts(Callback):
    """Writes down which attempt it is."""

    def __init__(self, path):
        self.path = path

    def on_train_start(self, trainer, pl_module):
        with self.path.open("a") as file:
            file.write(f"{trainer.strategy.environment.assignment.attempt} ")


class WaitsAlone(Callback):
    """One rank waits for what no other sends."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == 2:
            dist.recv(torch.zeros(1), src=0)


def test_ranks_that_wait_for_each_other_are_named_after_the_timeout_of_the_process_group(ray_cluster, tmp_path):
    options = {"timeout": timedelta(seconds=4), "max_restarts": 0, "restart": "warm"}
    with pytest.raises(RankFailedError, match=r"rank 0 .*Timed out waiting 4000ms") as caught:
        trainer(tmp_path, RayDDPStrategy(num_workers=2, **options), WaitsAlone()).fit(Regression(), Data())
    assert {failure.rank for failure in caught.value.failures} == {0, 1}


@pytest.mark.parametrize("restart", ["warm", "cold"])
def test_more_workers_than_there_is_room_for_is_one_error_in_time(ray_cluster, tmp_path, restart):
    strategy = RayDDPStrategy(num_workers=64, restart=restart, start_timeout=3.0)
    with pytest.raises(ConfigError, match="could not start the workers") as caught:
        trainer(tmp_path, strategy).fit(Regression(), Data())
    assert "64 workers" in str(caught.value)
    assert "lower num_workers" in str(caught.value)


@pytest.mark.parametrize("workers", [4, [3, 6]])
def test_replicas_that_the_ranks_cannot_make_are_refused_before_ray_starts(tmp_path, workers):
    with pytest.raises(ConfigError, match="replicate"):
        trainer(tmp_path, RayFSDPStrategy(num_workers=workers, replicate=3, address="nowhere:1"))
