"""Sharded checkpoints: any number of ranks resumes to the weights of the undisturbed run; one file is made of them."""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_embodied.cli import main
from lightning_embodied.errors import CheckpointError, ConfigError
from lightning_embodied.strategies import AsyncShardedCheckpoint, FSDP2Strategy, latest_checkpoint
from tests.models.conftest import make_trainer
from tests.strategies.models import Regression, Stack
from tests.strategies.ranks import run_ranks
from tests.strategies.store import Store

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
SAVED, END = 3, 6


class Scheduled(Regression):
    """Uneven shards (widths of 7, a bias of one), an optimizer with two groups and momenta, a buffer, a schedule."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Stack(width=7))
        self.register_buffer("seen", torch.zeros(3))

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        biases = [p for n, p in self.named_parameters() if n.endswith("bias")]
        others = [p for n, p in self.named_parameters() if not n.endswith("bias")]
        optimizer = torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others}], lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def strategy_of(kind: str, **options):
    return {"plain": "auto", "ddp": "ddp"}.get(kind) or FSDP2Strategy(replicate=2 if kind == "hsdp" else 1, **options)


def train(kind: str, ranks: int, steps: int, *, ckpt_path=None, save_to=None, **options):
    callbacks = [] if save_to is None else [ModelCheckpoint(save_to, "{step}", every_n_train_steps=SAVED)]
    module = Scheduled()
    trainer = make_trainer(
        devices=ranks,
        strategy=strategy_of(kind, **options),
        plugins=[AsyncShardedCheckpoint()] if kind in ("plain", "ddp") else None,
        max_steps=steps,
        callbacks=callbacks,
        **({"enable_checkpointing": True} if callbacks else {}),
    )
    trainer.fit(module, DataLoader([BATCH] * 100, batch_size=None), ckpt_path=ckpt_path)
    state = {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for n, t in module.state_dict().items()}
    return state, trainer.optimizers[0].param_groups[0]["lr"], trainer.global_step


def save(rank: int, kind: str, ranks: int, path: Path) -> None:
    train(kind, ranks, SAVED, save_to=path)


def resume(rank: int, kind: str, ranks: int, path: Path):
    return train(kind, ranks, END, ckpt_path=path)


@pytest.fixture(scope="module")
def undisturbed():
    return train("plain", 1, END)


def assert_same(found, expected) -> None:
    (state, lr, steps), (expected_state, expected_lr, expected_steps) = found, expected
    assert (lr, steps) == (expected_lr, expected_steps)
    for name, value in expected_state.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (("fsdp", 2), [("fsdp", 1), ("fsdp", 3), ("plain", 1)]),
        (("hsdp", 4), [("fsdp", 2)]),
        (("plain", 1), [("hsdp", 4)]),
    ],
    ids=["2 to 1, 3 and DDP's", "HSDP to FSDP", "DDP's to HSDP"],
)
def test_any_number_of_ranks_resumes(tmp_path, undisturbed, written, read):
    checkpoints = tmp_path / "checkpoints"
    run_ranks(written[1], save, tmp_path / "ranks", *written, checkpoints)
    assert [entry.name for entry in checkpoints.iterdir()] == [f"step={SAVED}.ckpt"]
    for reader in read:
        path = checkpoints if reader[0] == "fsdp" else checkpoints / f"step={SAVED}.ckpt"
        for found in run_ranks(reader[1], resume, tmp_path / "ranks", *reader, path):
            assert_same(found, undisturbed)


def save_many_ways(rank: int, path: Path) -> list:
    os.environ["STORE"], url = str(path), f"{Store.protocol}://run"
    trained, *_ = train("fsdp", 2, SAVED, save_to=url)
    found = [train("fsdp", 2, END, ckpt_path=url)]
    train("fsdp", 2, SAVED, save_to=path / "full", save_distributed_checkpoint=False)
    assert (path / "full" / "step=3.ckpt").is_file()
    found.append(train("fsdp", 2, END, ckpt_path=path / "full" / "step=3.ckpt", save_distributed_checkpoint=False))

    module = Scheduled()
    keep = ModelCheckpoint(path / "kept", "{step}", every_n_train_steps=1, monitor="step", mode="max", save_top_k=2)
    last = ModelCheckpoint(path / "last", every_n_train_steps=1, save_last=True, save_top_k=0)
    options = {"devices": 2, "max_steps": 4, "enable_checkpointing": True, "callbacks": [keep, last]}
    trainer = make_trainer(strategy=FSDP2Strategy(), **options)
    trainer.fit(module, DataLoader([BATCH] * 10, batch_size=None))
    trainer.save_checkpoint(path / "after" / "fit.ckpt")
    assert latest_checkpoint(path / "after")
    trainer.validate(module, DataLoader([BATCH], batch_size=None), ckpt_path=path / "after", verbose=False)
    trainer = make_trainer(devices=2, strategy=FSDP2Strategy(), plugins=[AsyncCheckpointIO()])
    with pytest.raises(ConfigError, match="AsyncShardedCheckpoint"):
        trainer.fit(Scheduled(), DataLoader([BATCH], batch_size=None))
    return [trained, found]


def test_stores_whole_files_retention_and_saves_after_training(tmp_path, undisturbed, monkeypatch):
    results = run_ranks(2, save_many_ways, tmp_path / "ranks", tmp_path)
    for one in (one for _, found in results for one in found):
        assert_same(one, undisturbed)
    trained = results[0][0]
    assert sorted(entry.name for entry in (tmp_path / "kept").iterdir()) == ["step=3.ckpt", "step=4.ckpt"]
    (last,) = (tmp_path / "last").iterdir()
    assert len(list(last.glob("data-*"))) == 1
    assert latest_checkpoint(tmp_path / "kept") == f"{tmp_path}/kept/step=4.ckpt"

    weights = tmp_path / "out" / "model.safetensors"
    source = "store://run"
    monkeypatch.setenv("STORE", str(tmp_path))
    assert main(["consolidate", "--checkpoint", source, "--output", str(weights), "--prefix", "network."]) == 0
    loaded = load_file(weights)
    assert loaded.keys() == Stack(width=7).state_dict().keys()
    assert all(torch.equal(value, trained[f"network.{name}"]) for name, value in loaded.items())
    assert main(["consolidate", "--checkpoint", source, "--output", str(tmp_path / "one.ckpt")]) == 0
    whole = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert whole["global_step"] == SAVED
    assert all(torch.equal(whole["state_dict"][name], value) for name, value in trained.items())
    module = Scheduled.load_from_checkpoint(tmp_path / "one.ckpt", weights_only=True)
    assert torch.equal(module.seen, trained["seen"])


def test_what_cannot_be_consolidated_is_refused(tmp_path, capsys):
    io = AsyncShardedCheckpoint(asynchronous=False)
    io.save_checkpoint({"state_dict": {"a": torch.ones(2)}}, tmp_path / "x.ckpt")
    for options, told in (
        (["--checkpoint", "x.ckpt", "--output", "a.bin"], ".safetensors or .ckpt"),
        (["--checkpoint", "x.ckpt", "--output", "a.safetensors", "--prefix", "model."], "prefix"),
        (["--checkpoint", "y.ckpt", "--output", "a.safetensors"], "no such directory"),
    ):
        paths = [str(tmp_path / part) if "." in part and not part.endswith(".") else part for part in options]
        assert main(["consolidate", *paths]) == 2
        assert told in capsys.readouterr().err


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path):
    path = tmp_path / "checkpoints"
    run_ranks(1, save, tmp_path / "ranks", "fsdp", 1, path)
    for found in run_ranks(1, refused, tmp_path / "ranks", path):
        model, optimizer, shape = found
        assert "lacks late.bias, late.weight (2 in all)" in model
        assert "other optimizers" in optimizer
        assert "another shape" in shape


def refused(rank: int, path: Path) -> list[str]:
    class Larger(Scheduled):
        def __init__(self) -> None:
            super().__init__()
            self.late = torch.nn.Linear(2, 2)

    class Frozen(Scheduled):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    class Wider(Scheduled):
        def __init__(self) -> None:
            super().__init__()
            self.network = Stack(width=8)

    messages = []
    for kind in (Larger, Frozen, Wider):
        trainer = make_trainer(devices=1, strategy=FSDP2Strategy(), max_steps=END)
        with pytest.raises(CheckpointError) as error:
            trainer.fit(kind(), DataLoader([BATCH] * 10, batch_size=None), ckpt_path=path)
        messages.append(str(error.value))
    return messages
