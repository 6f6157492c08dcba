"""Runs on a real Ray cluster of this machine: two CPU workers, gloo."""

import csv
import signal

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_embodied.strategies import RankFailedError, RayDDPStrategy, RayFSDPStrategy, RunStoppedError
from lightning_embodied.strategies.ddp_audit import UnusedParametersError
from tests.strategies.ray_models import SAMPLES, Counter, Data, Mishap, Regression, samples

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def trainer(tmp_path, strategy=None, callbacks=(), **options):
    seed_everything(3)
    strategy = strategy or RayDDPStrategy(num_workers=2, restart="warm")
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "default_root_dir": str(tmp_path),
        "logger": CSVLogger(tmp_path),
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(strategy=strategy, callbacks=list(callbacks), **{**defaults, **options})


def every_step(tmp_path):
    return ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1, save_top_k=-1)


def rows(run):
    with open(f"{run.logger.log_dir}/metrics.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["train_loss"]]


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def single_process(tmp_path, max_epochs):
    model = Regression()
    run = trainer(tmp_path, strategy="auto", devices=1, max_epochs=max_epochs, logger=False, callbacks=[Counter()])
    run.fit(model, Data(batch_size=8))  # two ranks with four samples each see the same eight
    return model, run


@pytest.mark.parametrize("restart", ["warm", "cold"])
def test_the_driver_looks_as_if_it_had_trained_itself(tmp_path, capfd, restart):
    counter, checkpoint = Counter(), ModelCheckpoint(monitor="val_loss")
    strategy = RayDDPStrategy(num_workers=2, restart=restart)
    run = trainer(tmp_path, strategy, callbacks=[counter, checkpoint], enable_progress_bar=True)
    model, data = Regression(), Data()
    run.fit(model, data)
    steps = SAMPLES // 8
    expected, reference = single_process(tmp_path / "single", 2)
    torch.testing.assert_close(weights(model), weights(expected), atol=1e-6, rtol=0)
    assert (run.global_step, run.current_epoch, run.state.finished) == (2 * steps, 2, True)
    torch.testing.assert_close(run.callback_metrics["val_loss"], reference.callback_metrics["val_loss"])
    assert set(run.logged_metrics) == {"train_loss", "val_loss"}
    assert checkpoint.best_model_score == run.callback_metrics["val_loss"]
    assert checkpoint.best_model_path.endswith(f"epoch=1-step={2 * steps}.ckpt")
    assert (counter.batches, counter.loaded, data.epochs_served) == (2 * steps, 2 * steps, 2)
    assert len(counter.losses) == 2 * steps
    assert "Epoch 1/1" in capfd.readouterr().out

    if restart == "cold":
        return
    run.fit_loop.max_epochs = 3
    run.fit(model, data)
    assert (run.global_step, run.current_epoch) == (3 * steps, 3)
    assert len(counter.losses) == 3 * steps
    again = torch.cat(run.predict(model, data))
    assert again.sort().values.equal(samples().tensors[0][:, 0].sort().values)
    tested = run.test(datamodule=data, ckpt_path="best")[0]["test_loss"]
    assert tested == pytest.approx(float(checkpoint.best_model_score), abs=1e-6)


@pytest.mark.parametrize("restart", ["warm", "cold"])
def test_an_error_of_the_user_is_raised_once_with_its_place(tmp_path, restart):
    marker = tmp_path / "marker"
    mishap = Mishap(marker, ["raise"] * 5)
    strategy = RayDDPStrategy(num_workers=2, restart=restart)
    run = trainer(tmp_path, strategy, callbacks=[mishap, ModelCheckpoint(tmp_path, save_on_exception=True)])
    with pytest.raises(RankFailedError) as caught:
        run.fit(Regression(), Data())
    assert marker.read_text() == "x"
    cause = caught.value.failures[0]
    assert cause.rank == 1
    assert cause.summary == "ValueError: the mishap"
    assert "on_train_batch_start" in cause.traceback
    assert str(caught.value).startswith(f"rank 1 (node {cause.node}, pid {cause.pid}) failed: ValueError: the mishap")
    assert isinstance(caught.value.__cause__, ValueError)


def test_unused_parameters_are_named(tmp_path):
    with pytest.raises(UnusedParametersError, match=r"spare\.weight, spare\.bias"):
        trainer(tmp_path).fit(Regression(spare=True), Data())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    model = Regression(noise=0.1)
    trainer(tmp_path_factory.mktemp("undisturbed"), max_epochs=1).fit(model, Data())
    return model


@pytest.mark.parametrize(
    ("restart", "mishaps"), [("warm", ["kill", "hang", "kill"]), ("cold", ["hang", "kill"])], ids=["warm", "cold"]
)
def test_lost_workers_cost_restarts_and_nothing_else(tmp_path, undisturbed, restart, mishaps):
    strategy = RayDDPStrategy(num_workers=2, restart=restart, hang_timeout=5.0)
    callbacks = [Mishap(tmp_path / "marker", mishaps, step=1), every_step(tmp_path)]
    run = trainer(tmp_path, strategy, callbacks, max_epochs=1)
    model = Regression(noise=0.1)
    run.fit(model, Data())
    assert (tmp_path / "marker").read_text() == "x" * len(mishaps)
    assert weights(model).equal(weights(undisturbed))
    assert rows(run) == list(range(SAMPLES // 8))


@pytest.mark.parametrize("replicate", [1, 2], ids=["fsdp", "hsdp"])
def test_sharded_training_equals_ddp_also_when_a_worker_is_lost(tmp_path, undisturbed, replicate):
    strategy = RayFSDPStrategy(num_workers=2, restart="warm", replicate=replicate)
    run = trainer(tmp_path, strategy, [Mishap(tmp_path / "marker", "kill"), every_step(tmp_path)], max_epochs=1)
    model = Regression(noise=0.1)
    run.fit(model, Data())
    assert (tmp_path / "marker").exists()
    assert rows(run) == list(range(SAMPLES // 8))
    torch.testing.assert_close(weights(model), weights(undisturbed), atol=1e-6, rtol=0)


def test_restarts_end(tmp_path):
    strategy = RayDDPStrategy(num_workers=2, restart="warm", max_restarts=1)
    run = trainer(tmp_path, strategy, [Mishap(tmp_path / "marker", ["kill"] * 2, step=1), every_step(tmp_path)])
    with pytest.raises(RankFailedError, match="after 1 restart") as caught:
        run.fit(Regression(), Data())
    assert caught.value.failures[0].rank == 1


@pytest.mark.parametrize("restart", ["warm", "cold"])
def test_sigterm_to_a_worker_saves_and_stops_all(tmp_path, restart):
    strategy = RayDDPStrategy(num_workers=2, restart=restart)
    run = trainer(
        tmp_path, strategy, callbacks=[Mishap(tmp_path / "marker", "terminate"), every_step(tmp_path)], max_epochs=200
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunStoppedError) as caught:
        run.fit(Regression(), Data())
    assert caught.value.code == 75
    assert "SIGTERM on rank 1" in caught.value.reason
    assert signal.getsignal(signal.SIGTERM) is before
    steps = torch.load(caught.value.checkpoint, weights_only=True)["global_step"]
    resumed = trainer(tmp_path, max_steps=steps + 2, max_epochs=-1)
    resumed.fit(Regression(), Data(), ckpt_path=caught.value.checkpoint)
    assert resumed.global_step == steps + 2
