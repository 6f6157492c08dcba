"""Training interrupted anywhere and resumed on other ranks and workers sees exactly what it had not seen."""

import json
from itertools import chain
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, OnExceptionCheckpoint
from torch.utils.data import Dataset

from lightning_embodied.data.loader import ResumableLoader
from lightning_embodied.data.order import SampleOrder
from lightning_embodied.errors import CheckpointError
from lightning_embodied.packing import PackingOptions

SIZE = 43
LENGTHS = [1 + 7 * n % 13 for n in range(SIZE)]
BUDGET = 20


class Numbers(Dataset):
    """Sample n is n, and a random number as an augmentation would draw it."""

    def __getitem__(self, index):
        return float(index), float(torch.rand(()))

    def __len__(self):
        return SIZE


class Recorder(LightningModule):
    """Writes down what each training step is given."""

    def __init__(self, record: Path, *, workers=0, batch_size=4, budget=None, seed=3, estimate=False, fail_at=None):
        super().__init__()
        self.record, self.workers, self.seed = record, workers, seed
        by_tokens = {"token_budget": budget, "lengths": LENGTHS, "packing": PackingOptions(window=1)}
        self.batching = by_tokens if budget else {"batch_size": batch_size}
        self.estimate, self.fail_at = estimate, fail_at
        self.layer = torch.nn.Linear(1, 1)

    def train_dataloader(self):
        return ResumableLoader(
            Numbers(),
            SampleOrder(SIZE, self.seed),
            trainer=self.trainer,
            **self.batching,
            num_workers=self.workers,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
        )

    def val_dataloader(self):
        return [torch.zeros(1, 1)]

    def training_step(self, batch, batch_idx):
        if self.fail_at is not None and self.trainer.fit_loop.total_batch_idx == self.fail_at:
            raise RuntimeError("power cut")
        numbers, noise = batch
        line = {"ids": [int(n) for n in numbers], "noise": noise.tolist(), "epoch": self.trainer.current_epoch}
        line |= {"batch_idx": batch_idx, "step": self.trainer.global_step}
        with Path(f"{self.record}.{self.trainer.global_rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return self.layer(numbers.float()[:, None]).square().mean() * 1e-6

    def validation_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        if not self.estimate:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (steps + 1))]


class StopAt(Callback):
    """Saves a checkpoint in a hook of the n-th batch and ends the run as a crash would."""

    def __init__(self, path, batches, hook="on_train_batch_end"):
        self.path, self.batches = path, batches
        setattr(self, hook, self._stop)

    def _stop(self, trainer, *_):
        if not trainer.sanity_checking and trainer.fit_loop.total_batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)
            raise RuntimeError("power cut")


def run(tmp_path, name, *, ckpt=None, callbacks=(), devices=1, trainer_options=None, **module_options):
    """Fits, and returns `[step] -> line` with the ranks' samples joined."""
    record = tmp_path / name
    options = {"max_epochs": 3, "limit_val_batches": 0} | (trainer_options or {})
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp_fork" if devices > 1 else "auto",
        logger=False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        default_root_dir=tmp_path,
        **options,
    )
    try:
        trainer.fit(Recorder(record, **module_options), ckpt_path=ckpt)
    except Exception as error:
        if "power cut" not in str(error):
            raise
    ranks = []
    for rank in range(devices):
        path = Path(f"{record}.{rank}")
        ranks.append([json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [])
    assert len({len(lines) for lines in ranks}) == 1, "ranks differ in the number of steps"
    return [
        {**same[0], "ids": joined(line["ids"] for line in same), "noise": joined(line["noise"] for line in same)}
        for same in zip(*ranks, strict=True)
    ]


def stream(lines):
    return joined(line["ids"] for line in lines)


def joined(lists):
    return list(chain.from_iterable(lists))


def expected(epochs=3, seed=3):
    order = SampleOrder(SIZE, seed)
    return [int(n) for epoch in range(epochs) for n in order.indices(epoch, 0, SIZE)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), "whole")


def test_an_uninterrupted_run_sees_every_epoch_in_order(whole):
    assert stream(whole) == expected()
    assert [line["epoch"] for line in whole] == [0] * 11 + [1] * 11 + [2] * 11


@pytest.mark.parametrize("estimate", [False, True], ids=["plain", "estimated_stepping_batches"])
@pytest.mark.parametrize(
    ("hook", "batches"),
    [("on_train_batch_end", n) for n in (1, 5, 11, 12, 22)]
    + [("on_train_epoch_end", n) for n in (11, 22)]
    + [("on_train_epoch_start", 11)]
    + [("on_validation_end", n) for n in (5, 11, 17)],
)
def test_resume_continues_the_stream_and_the_counters(tmp_path, whole, batches, hook, estimate):
    options = {"limit_val_batches": 1, "num_sanity_val_steps": 0}
    if hook == "on_validation_end":
        options["val_check_interval"] = 1
    ckpt = tmp_path / "stop.ckpt"
    callbacks = [StopAt(ckpt, batches, hook)]
    before = run(tmp_path, "before", callbacks=callbacks, estimate=estimate, trainer_options=options)
    after = run(tmp_path, "after", ckpt=ckpt, estimate=estimate, trainer_options=options)
    assert stream(before) == stream(whole)[: len(stream(before))]
    for key in ("ids", "noise", "epoch", "step", "batch_idx"):
        assert [line[key] for line in before + after] == [line[key] for line in whole], key


@pytest.mark.parametrize("estimate", [False, True], ids=["plain", "estimated_stepping_batches"])
@pytest.mark.parametrize(
    ("hook", "batches"),
    [("on_train_batch_end", 11), ("on_train_batch_end", 17), ("on_train_epoch_end", 11), ("on_train_epoch_start", 11)],
)
def test_resume_with_max_steps(tmp_path, whole, batches, hook, estimate):
    ckpt, options = tmp_path / "stop.ckpt", {"max_steps": 30, "max_epochs": 3}
    before = run(
        tmp_path, "before", callbacks=[StopAt(ckpt, batches, hook)], estimate=estimate, trainer_options=options
    )
    after = run(tmp_path, "after", ckpt=ckpt, estimate=estimate, trainer_options=options)
    for key in ("ids", "noise", "epoch", "step", "batch_idx"):
        assert [line[key] for line in before + after] == [line[key] for line in whole[:30]], key


@pytest.mark.parametrize("fail_at", [0, 6, 10, 14])
def test_a_batch_broken_off_by_an_exception_is_trained_again(tmp_path, whole, fail_at):
    saver = OnExceptionCheckpoint(tmp_path, "broken")
    before = run(tmp_path, "before", callbacks=[saver], fail_at=fail_at)
    after = run(tmp_path, "after", ckpt=tmp_path / "broken.ckpt")
    for key in ("ids", "epoch", "step", "batch_idx"):
        assert [line[key] for line in before + after] == [line[key] for line in whole], key


def test_a_checkpoint_after_an_exception_resumes_too(tmp_path, whole):
    saver = OnExceptionCheckpoint(tmp_path, "broken")
    first = run(tmp_path, "first", callbacks=[saver], fail_at=6)
    second = run(tmp_path, "second", callbacks=[StopAt(tmp_path / "2.ckpt", 9)], ckpt=tmp_path / "broken.ckpt")
    third = run(tmp_path, "third", ckpt=tmp_path / "2.ckpt")
    assert [line["ids"] for line in first + second + third] == [line["ids"] for line in whole]


@pytest.mark.parametrize(("batches", "again"), [(8, 0), (10, 2), (11, 0), (13, 2)])
def test_accumulation_repeats_only_gradients_that_no_checkpoint_holds(tmp_path, batches, again):
    options, ckpt = {"accumulate_grad_batches": 4}, tmp_path / "stop.ckpt"
    whole = run(tmp_path, "whole", trainer_options=options)
    before = run(tmp_path, "before", callbacks=[StopAt(ckpt, batches)], trainer_options=options)
    after = run(tmp_path, "after", ckpt=ckpt, trainer_options=options)
    for key in ("ids", "epoch", "step", "batch_idx"):
        assert [line[key] for line in before[: batches - again] + after] == [line[key] for line in whole], key


@pytest.mark.parametrize("batches", [3, 7, 10])
def test_other_batch_size_and_workers_take_exactly_the_rest(tmp_path, whole, batches):
    ckpt = tmp_path / "stop.ckpt"
    before = run(tmp_path, "before", callbacks=[StopAt(ckpt, batches)], workers=2)
    after = run(tmp_path, "after", ckpt=ckpt, batch_size=7)
    assert stream(before) + stream(after) == stream(whole)
    noise = [value for line in before + after for value in line["noise"]]
    assert noise == [value for line in whole for value in line["noise"]], "augmentation depends on workers or batches"


@pytest.mark.parametrize("batches", [4, 6])
def test_two_ranks_to_one(tmp_path, whole, batches):
    ckpt = tmp_path / "stop.ckpt"
    before = run(tmp_path, "before", callbacks=[StopAt(ckpt, batches)], devices=2)
    after = run(tmp_path, "after", ckpt=ckpt, workers=2)
    assert stream(before) == stream(whole)[: len(stream(before))]
    assert stream(before) + stream(after) == stream(whole)


@pytest.mark.parametrize("batches", [5, 11])
def test_one_rank_to_two(tmp_path, whole, batches):
    ckpt = tmp_path / "stop.ckpt"
    before = run(tmp_path, "before", callbacks=[StopAt(ckpt, batches)])
    after = run(tmp_path, "after", ckpt=ckpt, devices=2, workers=2, estimate=True)
    assert stream(before) + stream(after) == stream(whole)


@pytest.mark.parametrize("first", [{"max_epochs": 1}, {"max_steps": 7}, {"max_steps": 11}, {"max_steps": 15}], ids=str)
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end"])
def test_a_finished_run_is_continued(tmp_path, whole, first, hook):
    ckpt, steps = tmp_path / "end.ckpt", first.get("max_steps", 11)
    before = run(tmp_path, "before", callbacks=[StopAt(ckpt, steps, hook)], trainer_options=first)
    for name, more in (("steps", {"max_steps": 30}), ("epochs", {"max_epochs": 3})):
        after = run(tmp_path, name, ckpt=ckpt, trainer_options=more)
        lines = before + after
        assert stream(lines) == stream(whole)[: len(stream(lines))], name
        assert [line["step"] for line in lines] == list(range(len(lines))), name
        assert len(lines) >= 30


def test_limited_epochs_begin_anew_and_resume(tmp_path):
    options, ckpt = {"limit_train_batches": 5}, tmp_path / "stop.ckpt"
    order = SampleOrder(SIZE, 3)
    wanted = [order.indices(epoch, 0, 20).tolist() for epoch in range(3)]
    for batches in (3, 5, 7):
        before = run(tmp_path, f"b{batches}", callbacks=[StopAt(ckpt, batches)], trainer_options=options)
        after = run(tmp_path, f"a{batches}", ckpt=ckpt, trainer_options=options)
        assert stream(before) + stream(after) == joined(wanted)


def test_overfitting_repeats_the_same_batches(tmp_path):
    lines = run(tmp_path, "overfit", trainer_options={"overfit_batches": 2})
    assert stream(lines) == SampleOrder(SIZE, 3).indices(0, 0, 8).tolist() * 3


def test_another_seed_is_refused(tmp_path):
    ckpt = tmp_path / "stop.ckpt"
    run(tmp_path, "before", callbacks=[StopAt(ckpt, 5)])
    with pytest.raises(CheckpointError, match="another seed"):
        run(tmp_path, "after", ckpt=ckpt, seed=4)


def packed(tmp_path, name, **options):
    return run(tmp_path, name, **{"budget": BUDGET, **options})


def each_once(lines, epochs=3):
    """Whether every epoch has every sample once; packing takes them slightly out of order."""
    found = [sorted(stream([line for line in lines if line["epoch"] == epoch])) for epoch in range(epochs)]
    return found == [list(range(SIZE))] * epochs


@pytest.fixture(scope="module")
def whole_packed(tmp_path_factory):
    return packed(tmp_path_factory.mktemp("packed"), "whole")


def steps_by_epoch(lines):
    return [sum(line["epoch"] == epoch for line in lines) for epoch in range(3)]


def test_packed_epochs_of_unequal_numbers_of_steps_are_trained_whole(tmp_path, whole_packed):
    assert each_once(whole_packed)
    assert max(sum(LENGTHS[n] for n in line["ids"]) for line in whole_packed) <= BUDGET
    epochs = steps_by_epoch(whole_packed)
    assert len(set(epochs)) > 1, "or Lightning would not have to be told"
    assert [line["batch_idx"] for line in whole_packed] == joined(range(steps) for steps in epochs)
    accumulated = packed(tmp_path, "accumulated", trainer_options={"accumulate_grad_batches": 4})
    assert [line["ids"] for line in accumulated] == [line["ids"] for line in whole_packed]
    steps = joined([sum(-(-n // 4) for n in epochs[:e]) + i // 4 for i in range(n)] for e, n in enumerate(epochs))
    assert [line["step"] for line in accumulated] == steps, "the last batch of an epoch steps the optimizer"


@pytest.mark.parametrize("estimate", [False, True], ids=["plain", "estimated_stepping_batches"])
@pytest.mark.parametrize("limits", [{}, {"max_steps": 45}], ids=["epochs", "steps"])
@pytest.mark.parametrize(
    ("hook", "place"),
    [("on_train_batch_end", place) for place in ((0, 1), (1, 5), (1, 0), (2, 0))]
    + [("on_train_epoch_end", (1, 0)), ("on_train_epoch_start", (2, 0))],
)
def test_packed_resume_continues_the_stream_and_the_counters(tmp_path, whole_packed, hook, place, limits, estimate):
    batches = sum(steps_by_epoch(whole_packed)[: place[0]]) + place[1]
    options, ckpt = {"max_epochs": 3, **limits}, tmp_path / "stop.ckpt"
    callbacks = [StopAt(ckpt, batches, hook)]
    before = packed(tmp_path, "before", callbacks=callbacks, estimate=estimate, trainer_options=options)
    after = packed(tmp_path, "after", ckpt=ckpt, estimate=estimate, trainer_options=options)
    for key in ("ids", "noise", "epoch", "step", "batch_idx"):
        wanted = [line[key] for line in whole_packed[: limits.get("max_steps")]]
        assert [line[key] for line in before + after] == wanted, key


def test_packed_broken_off_batches_and_accumulation_windows_are_trained_again(tmp_path, whole_packed):
    options, saver = {"accumulate_grad_batches": 4}, OnExceptionCheckpoint(tmp_path, "broken")
    whole = packed(tmp_path, "whole", trainer_options=options)
    before = packed(tmp_path, "before", callbacks=[saver], fail_at=7, trainer_options=options)
    after = packed(tmp_path, "after", ckpt=tmp_path / "broken.ckpt", trainer_options=options)
    for key in ("ids", "epoch", "step", "batch_idx"):
        assert [line[key] for line in before[:4] + after] == [line[key] for line in whole], key


@pytest.mark.parametrize("hops", [[(2, 20, 0), (1, 20, 2)], [(1, 20, 2), (2, 16, 0), (1, 33, 0)]], ids=str)
def test_packed_run_moves_to_other_ranks_workers_and_budgets(tmp_path, whole_packed, hops):
    lines, ckpt = [], None
    for number, (devices, budget, workers) in enumerate(hops):
        path = tmp_path / f"{number}.ckpt"
        callbacks = [] if number == len(hops) - 1 else [StopAt(path, (number + 1) * 3)]
        lines += packed(
            tmp_path, f"run{number}", ckpt=ckpt, devices=devices, budget=budget, workers=workers, callbacks=callbacks
        )
        ckpt = path
    assert each_once(lines)
    assert [line["step"] for line in lines] == list(range(len(lines)))
    noise = [dict(zip(line["ids"], line["noise"], strict=True)) for line in lines if line["epoch"] == 0]
    before = [dict(zip(line["ids"], line["noise"], strict=True)) for line in whole_packed if line["epoch"] == 0]
    merged, wanted = ({k: v for part in parts for k, v in part.items()} for parts in (noise, before))
    assert merged == wanted, "augmentation depends on how samples are packed"
