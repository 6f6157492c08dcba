"""Contracts of the private Lightning names in strategies/lightning_compat.py."""

import inspect

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_embodied.strategies import lightning_compat as compat
from tests.strategies.ray_models import Data, Regression


def quiet(**options):
    defaults = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return Trainer(**{**defaults, "enable_checkpointing": False, **options})


class Recorder(compat.Launcher):
    """A launcher that says what it was given, then runs it here."""

    is_interactive_compatible = True

    def launch(self, function, *args, trainer=None, **kwargs):
        self.function, self.arguments = function, inspect.signature(function).bind(*args, **kwargs).arguments
        with compat.without_launcher(trainer.strategy):
            assert trainer.strategy.launcher is None
            return compat.run_entry_point(trainer, function, *args, **kwargs)

    def kill(self, signum):
        pass


def test_entry_points_reach_a_launcher_as_methods_of_the_trainer():
    strategy, launcher = SingleDeviceStrategy(), Recorder()
    run = quiet(strategy=strategy, max_epochs=1)
    compat.set_launcher(strategy, launcher)
    run.fit(Regression(), Data())
    assert launcher.function == run._fit_impl
    assert {"ckpt_path", "weights_only", "datamodule"} <= set(inspect.signature(launcher.function).parameters)
    run.predict(Regression(), Data())
    assert launcher.function.__name__ == "_predict_impl"
    assert "ckpt_path" in launcher.arguments


def test_progress_and_metrics_move_to_a_trainer_that_goes_on():
    done = quiet(max_epochs=2)
    model = Regression()
    done.fit(model, Data())
    other = quiet(max_epochs=3)
    compat.load_progress(other, compat.progress(done))
    compat.load_metrics(other, compat.metrics(done))
    assert (other.global_step, other.current_epoch) == (done.global_step, 2)
    assert other.callback_metrics == done.callback_metrics
    assert other.logged_metrics == done.logged_metrics
    assert not other.fit_loop.restarting
    other.fit(model, Data())
    assert other.global_step == done.global_step * 3 // 2


def test_the_global_state_is_captured_and_restored():
    import torch

    state = compat.GlobalState.capture()
    first = torch.rand(3)
    state.restore()
    assert torch.rand(3).equal(first)


def test_a_wandb_run_keeps_its_id(tmp_path):
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    compat.pin_wandb_run(logger, "abc")
    assert (logger.version, logger._wandb_init["id"], logger._wandb_init["resume"]) == ("abc", "abc", "allow")
    compat.pin_wandb_run(logger, "other")
    assert logger.version == "abc"
    assert logger._experiment is None
    compat.pin_wandb_run(CSVLogger(tmp_path), "ignored")
