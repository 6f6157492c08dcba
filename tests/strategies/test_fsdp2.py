"""FSDP2Strategy trains unmodified LightningModules to the weights of DDP."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies.strategy import Strategy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_embodied.errors import ConfigError
from lightning_embodied.strategies import FSDP2Strategy
from tests.strategies.models import JointTowers, Regression, Stack
from tests.strategies.ranks import run_ranks


def loader() -> DataLoader:
    return DataLoader(torch.randn(48, 4, generator=torch.Generator().manual_seed(0)), batch_size=3)


def trainer(strategy, ranks: int, **options) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in module.named_parameters()}


class Scaled(Callback):
    """Doubles a parameter for validation, and puts it back: what averaged weights do."""

    def on_validation_start(self, trainer, module):
        module.network.head.bias.data.mul_(2)

    def on_validation_end(self, trainer, module):
        module.network.head.bias.data.mul_(0.5)


class Manual(Regression):
    def __init__(self, network) -> None:
        super().__init__(network)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Early(Regression):
    """Hands out an optimizer that was built with the module, as LightningCLI's `optimizer:` section does."""

    def __init__(self, network) -> None:
        super().__init__(network)
        self.early = [torch.optim.AdamW(self.parameters(), lr=1e-2)]

    def configure_optimizers(self):
        schedule = torch.optim.lr_scheduler.LambdaLR(self.early[0], lambda step: 1 / (1 + step))
        return self.early, [{"scheduler": schedule, "interval": "step"}]


CASES = {
    "plain": (Regression, Stack, {}, {}),
    "clipped": (Regression, Stack, {"gradient_clip_val": 0.1}, {}),
    "accumulated": (Regression, Stack, {"accumulate_grad_batches": 2}, {}),
    "manual": (Manual, Stack, {}, {}),
    "early": (Early, Stack, {}, {}),
    "written between": (Regression, Stack, {"callbacks": [Scaled()], "val_check_interval": 2}, {}),
    "joint": (Regression, JointTowers, {}, {"joint_units": ["TowerLayer"]}),
    "recomputed": (Regression, Stack, {}, {"activation_checkpointing": ["Block"]}),
}


def train_all(rank: int, ranks: int, replicate: int) -> dict[str, tuple]:
    results = {}
    for name, (module_class, network, options, sharding) in CASES.items():
        for kind in ("ddp", "fsdp2"):
            seed_everything(0, verbose=False)
            module = module_class(network())
            strategy = FSDP2Strategy(replicate=replicate, **sharding) if kind == "fsdp2" else "ddp"
            run = trainer(strategy, ranks, **options)
            run.fit(module, loader(), loader())
            results[name, kind] = weights(module), {key: float(value) for key, value in run.callback_metrics.items()}
            if name == "plain" and kind == "fsdp2":
                run.validate(module, loader(), verbose=False)
                run.fit_loop.max_epochs = 2
                run.fit(module, loader())
                assert module.global_step == 2 * 48 / 3 / ranks
    return results


@pytest.mark.parametrize(("ranks", "replicate"), [(2, 1), (4, 2)])
def test_weights_and_metrics_are_those_of_ddp(tmp_path, ranks, replicate):
    for results in run_ranks(ranks, train_all, tmp_path, ranks, replicate):
        for name in CASES:
            (expected, metrics), (found, logged) = results[name, "ddp"], results[name, "fsdp2"]
            start = dict(CASES[name][1]().named_parameters())
            assert len(start) == len(found)
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
            assert logged == pytest.approx(metrics, rel=1e-5), name


def mixed_precision(rank: int) -> dict[str, object]:
    found = {}
    for param_dtype in ("auto", None):
        seed_everything(0, verbose=False)
        module, dtypes = Regression(Stack()), []
        module.network.head.register_forward_hook(lambda layer, *_, seen=dtypes: seen.append(layer.weight.dtype))
        trainer(FSDP2Strategy(param_dtype=param_dtype), 2, precision="bf16-mixed").fit(module, loader())
        found[str(param_dtype)] = weights(module), set(dtypes)
    with pytest.raises(ConfigError, match="precision: bf16-mixed"):
        trainer(FSDP2Strategy(param_dtype="bfloat16"), 2).fit(Regression(Stack()), loader())
    return found


def test_bf16_mixed_gathers_bfloat16_and_keeps_float32(tmp_path):
    for found in run_ranks(2, mixed_precision, tmp_path):
        (halved, dtypes), (exact, exact_dtypes) = found["auto"], found["None"]
        assert (dtypes, exact_dtypes) == ({torch.bfloat16}, {torch.float32})
        for name, value in exact.items():
            assert halved[name].dtype == torch.float32
            torch.testing.assert_close(halved[name], value, rtol=0.05, atol=0.02)


def test_the_strategy_is_written_in_yaml(tmp_path):
    strategy = {
        "class_path": "lightning_embodied.strategies.FSDP2Strategy",
        "init_args": {"units": ["Block"], "replicate": 2, "param_dtype": "auto", "timeout": "0:00:30"},
    }
    cli = LightningCLI(
        Regression, run=False, save_config_callback=None, args={"trainer": {"strategy": strategy, "accelerator": "cpu"}}
    )
    found = cli.trainer.strategy
    assert (found.units, found.replicate, found._timeout.seconds) == (["Block"], 2, 30)


def test_lightning_still_has_the_hook_that_shards():
    assert Strategy._setup_model(None, 1) == 1
    assert "_setup_model" in Strategy.setup.__code__.co_names
