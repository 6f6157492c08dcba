"""How gradients travel, or do not, on two real ranks: against whole gradients, and against steps done by hand."""

import copy

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from torch import nn

from lightning_embodied.errors import ConfigError
from lightning_embodied.strategies import RayDDPStrategy
from lightning_embodied.strategies.lightning_compat import set_launcher
from lightning_embodied.strategies.local_sgd import LocalSGD
from lightning_embodied.strategies.on_ray.ranks import Assignment
from lightning_embodied.strategies.power_sgd import PowerSGD
from tests.strategies.ranks import run_ranks
from tests.strategies.ray_models import Data, Regression, samples

RANKS, STEPS, BATCH, LR = 2, 12, 2, 0.05


class Wide(Regression):
    """Matrices in several buckets, and plain SGD, which is done by hand in a line."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.net = nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR)


def trainer(rank, strategy, **options):
    run = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **options,
    )
    strategy.environment.assignment = Assignment(0, rank, RANKS, rank, RANKS, 0, "localhost", 0)
    strategy.set_world_ranks()
    set_launcher(strategy, None)  # these ranks are there already
    return run


def fitted(rank, options, *, steps=STEPS, ckpt_path=None, save=None):
    torch.manual_seed(0)
    model = Wide()
    run = trainer(rank, RayDDPStrategy(num_workers=RANKS, **options), max_steps=steps)
    run.fit(model, Data(BATCH), ckpt_path=ckpt_path, weights_only=False)
    if save is not None:
        run.save_checkpoint(save)
    return flat(model)


def flat(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def narrow(rank, whole, ways):
    found = {name: fitted(rank, options) for name, options in ways.items()}
    return fitted(rank, whole), found


def test_narrow_gradients_stay_close_to_whole_ones_and_ranks_together(tmp_path):
    buckets = {"bucket_cap_mb": 0.002}
    ways = {
        "bfloat16": {"gradient_dtype": "bfloat16"},
        "float16": {"gradient_dtype": "float16"},
        "power_sgd": {"power_sgd": PowerSGD(rank=2, start_step=3, min_compression=1.0)},
        "power_sgd, not yet": {"power_sgd": PowerSGD(start_step=STEPS + 1)},
    }
    results = run_ranks(RANKS, narrow, tmp_path, buckets, {name: {**way, **buckets} for name, way in ways.items()})
    (whole, found), (_, other) = results
    for name, difference in (("bfloat16", 3e-3), ("float16", 3e-4), ("power_sgd", 3e-2)):
        assert found[name].equal(other[name])
        assert not found[name].equal(whole)
        torch.testing.assert_close(found[name], whole, atol=difference, rtol=0)
    torch.testing.assert_close(found["power_sgd, not yet"], whole, atol=1e-7, rtol=0)


def by_hand(options: LocalSGD, steps: int = STEPS):
    """Each rank a model of its own; the outer optimizer as DiLoCo's algorithm 1 writes it."""
    torch.manual_seed(0)
    common = Wide()
    ranks = [copy.deepcopy(common) for _ in range(RANKS)]
    momentum = [torch.zeros_like(parameter) for parameter in common.parameters()]
    x, y = samples().tensors
    alone = 0
    for step in range(steps):
        for rank, model in enumerate(ranks):
            mine = slice(rank + RANKS * BATCH * step, RANKS * BATCH * (step + 1), RANKS)
            model.zero_grad()
            model.loss((x[mine], y[mine])).backward()
        apart = step >= options.start_step
        gradients = [[parameter.grad.clone() for parameter in model.parameters()] for model in ranks]
        with torch.no_grad():
            for model, own in zip(ranks, gradients, strict=True):
                for place, parameter in enumerate(model.parameters()):
                    mean = sum(each[place] for each in gradients) / RANKS
                    parameter.sub_(LR * (own[place] if apart else mean))
            alone += apart
            if not apart:
                common.load_state_dict(ranks[0].state_dict())
            elif alone == options.every or step == steps - 1:
                alone = 0
                for place, parameter in enumerate(common.parameters()):
                    delta = parameter - sum(list(model.parameters())[place] for model in ranks) / RANKS
                    momentum[place] = options.outer_momentum * momentum[place] + delta
                    parameter.sub_(options.outer_lr * (delta + options.outer_momentum * momentum[place]))
                for model in ranks:
                    model.load_state_dict(common.state_dict())
    return flat(common)


LOCAL = {
    "local SGD": LocalSGD(every=3),
    "post-local SGD": LocalSGD(every=3, start_step=4),
    "DiLoCo": LocalSGD(every=2, outer_lr=0.7, outer_momentum=0.9),
    "every step": LocalSGD(every=1),
}


def local(rank, directory):
    found = {name: fitted(rank, {"local_sgd": options}) for name, options in LOCAL.items()}
    diloco = {"local_sgd": LOCAL["DiLoCo"]}
    fitted(rank, diloco, steps=4, save=directory / "four.ckpt")
    return found, fitted(rank, {}), fitted(rank, diloco, ckpt_path=directory / "four.ckpt")


def test_ranks_that_meet_now_and_then_take_the_steps_done_by_hand(tmp_path):
    (found, whole, resumed), (other, _, _) = run_ranks(RANKS, local, tmp_path / "ranks", tmp_path)
    for name, options in LOCAL.items():
        assert found[name].equal(other[name])
        torch.testing.assert_close(found[name], by_hand(options), atol=1e-6, rtol=0, msg=name)
    torch.testing.assert_close(found["every step"], whole, atol=1e-6, rtol=0)  # plain SGD is linear in gradients
    assert not torch.allclose(found["local SGD"], whole, atol=1e-5)
    torch.testing.assert_close(resumed, found["DiLoCo"], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: LocalSGD(every=0), "local_sgd.every"),
        (lambda: LocalSGD(outer_momentum=1.0), "local_sgd.outer_momentum"),
        (lambda: PowerSGD(start_step=1), "power_sgd.start_step"),
        (lambda: PowerSGD(rank=0), "power_sgd.rank"),
        (lambda: RayDDPStrategy(gradient_dtype="float16", power_sgd=PowerSGD()), "gradient_dtype, power_sgd"),
    ],
)
def test_what_cannot_be_is_refused(build, key):
    with pytest.raises(ConfigError, match=key):
        build()


@pytest.mark.parametrize("option", [{"local_sgd": {"every": 4, "outer_lr": 0.7}}, {"power_sgd": {"rank": 4}}])
def test_they_are_plain_yaml(option):
    strategy = {"class_path": "lightning_embodied.strategies.RayDDPStrategy", "init_args": {"num_workers": 2, **option}}
    trainer = {"accelerator": "cpu", "logger": False, "strategy": strategy}
    cli = LightningCLI(Regression, Data, run=False, args={"trainer": trainer}, save_config_callback=None)
    ((name, value),) = option.items()
    assert getattr(cli.trainer.strategy, name) == {"local_sgd": LocalSGD, "power_sgd": PowerSGD}[name](**value)
