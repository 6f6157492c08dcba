import json
import shutil
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from lightning_embodied.callbacks import GoodputMonitor
from lightning_embodied.data import LeRobotDataModule, SampleOrder, compute_stats
from lightning_embodied.errors import CheckpointError, ConfigError, DatasetError
from lightning_embodied.packing import PackedBatch, PackingOptions, SampleEncoder, VarlenPackingCollator

ROOT = Path(__file__).parents[1] / "fixtures" / "lerobot_v30_chunks" / "dataset"
CAMERA = "observation.images.top"


def module(root=ROOT, **options):
    collator = VarlenPackingCollator(SampleEncoder(image_size=(32, 32)))
    defaults = {"batch_size": 8, "action_horizon": 4, "seed": 5, "cameras": []}
    return LeRobotDataModule(str(root), collator, **{**defaults, **options})


class Recorder(LightningModule):
    """Writes down which frames each step is given; reads `estimated_stepping_batches`, as schedules do."""

    def __init__(self, record):
        super().__init__()
        self.record = record
        self.layer = torch.nn.Linear(3, 1)

    def _write(self, kind, batch):
        assert isinstance(batch, PackedBatch)
        frames = list(zip(batch.episode_index.tolist(), batch.frame_index.tolist(), strict=True))
        line = {"kind": kind, "frames": frames, "step": self.trainer.global_step, "epoch": self.trainer.current_epoch}
        with Path(f"{self.record}.{self.trainer.global_rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def training_step(self, batch, batch_idx):
        self._write("train", batch)
        return self.layer(batch.actions).square().mean()

    def validation_step(self, batch, batch_idx):
        self._write("val", batch)

    def test_step(self, batch, batch_idx):
        self._write("test", batch)

    def predict_step(self, batch, batch_idx):
        return batch.frame_index

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-4)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (steps + 1))]


class StopAt(Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise RuntimeError("power cut")


def trainer(devices=1, callbacks=(), **options):
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp_fork" if devices > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{"max_epochs": 2, "num_sanity_val_steps": 0, "limit_val_batches": 0, **options},
    )


def fit(record, data, *, ckpt=None, devices=1, callbacks=(), **options):
    try:
        trainer(devices, callbacks, **options).fit(Recorder(record), datamodule=data, ckpt_path=ckpt)
    except Exception as error:
        if "power cut" not in str(error):
            raise
    return read(record, devices)


def read(record, devices=1, kind="train"):
    ranks = [
        [json.loads(line) for line in Path(f"{record}.{rank}").read_text().splitlines()] for rank in range(devices)
    ]
    steps = zip(*([line for line in lines if line["kind"] == kind] for lines in ranks), strict=True)
    return [{**same[0], "frames": list(chain.from_iterable(line["frames"] for line in same))} for same in steps]


def frames(lines):
    return [tuple(frame) for line in lines for frame in line["frames"]]


def every_frame(dataset):
    return [(e, f) for e, n in zip(dataset.episodes, dataset.episode_lengths, strict=True) for f in range(n)]


def wanted(data, epochs=2):
    """The training stream, from the order and the dataset alone."""
    every = every_frame(data.train_dataset)
    order = SampleOrder(len(every), data.seed)
    return [every[i] for epoch in range(epochs) for i in order.indices(epoch, 0, len(every))]


def test_the_split_is_by_episode_and_seeded():
    data = module(val_episodes=4)
    data.setup()
    train, val = data.train_dataset.episodes, data.val_dataset.episodes
    assert len(val) == 4
    assert sorted(train + val) == list(range(14))
    again, other = module(val_episodes=4), module(val_episodes=4, seed=6)
    again.setup("fit")
    other.setup("fit")
    assert again.val_dataset.episodes == val
    assert other.val_dataset.episodes != val
    share = module(val_episodes=0.25)
    share.setup()
    assert len(share.val_dataset.episodes) == 4
    none = module(val_episodes=0)
    none.setup()
    assert none.val_dataset is None
    assert none.val_dataloader() == []


def test_statistics_are_exact_over_the_training_episodes_only():
    data = module(val_episodes=4)
    data.setup()
    rows = pq.read_table(ROOT / "data").to_pydict()
    used = np.isin(rows["episode_index"], data.train_dataset.episodes)
    action = np.array(rows["action"], dtype=np.float64)[used]
    assert data.stats["action"].count == used.sum()
    np.testing.assert_allclose(data.stats["action"].mean, action.mean(0), rtol=1e-12)
    np.testing.assert_allclose(data.stats["action"].q99, np.quantile(action, 0.99, axis=0), rtol=1e-12)
    assert data.stats.keys() == compute_stats(data.train_dataset, list(data.stats)).keys()
    assert not any(data.features[key].is_visual for key in data.stats)


def test_what_the_data_is():
    windows = {"observation.state": [-1 / 15, 0]}
    data = module(cameras=[CAMERA], action_horizon=3, delta_timestamps=windows)
    data.setup()
    sample = data.train_dataset[0]
    assert sample["action"].shape == (3, 3)
    assert sample["action_is_pad"].shape == (3,)
    assert sample["observation.state"].shape == (2, 4)
    assert [key for key, feature in data.features.items() if feature.is_visual] == [CAMERA]
    assert (data.fps, data.action_horizon, len(data.tasks) > 0) == (15, 3, True)
    assert len(data.dataset_fingerprint) == 64


def test_the_fingerprint_knows_the_data_and_not_its_place(tmp_path):
    copy, changed = tmp_path / "copy", tmp_path / "changed"
    for place in (copy, changed):
        shutil.copytree(ROOT, place)
    file = sorted((changed / "data").rglob("*.parquet"))[0]
    table = pq.read_table(file)
    column = table.column("action").combine_chunks()
    new = column.flatten().to_numpy(zero_copy_only=False).copy()
    new[0] += 1
    array = type(column).from_arrays(new, column.type.list_size)
    pq.write_table(table.set_column(table.column_names.index("action"), "action", array), file)
    prints = []
    for root in (ROOT, copy, changed):
        data = module(root, val_episodes=2)
        data.setup()
        prints.append(data.dataset_fingerprint)
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(("step", "cameras"), [(3, [CAMERA]), (14, [])])
def test_fit_resumes_with_other_workers_and_batch_size(tmp_path, step, cameras):
    ckpt = tmp_path / "stop.ckpt"
    before = fit(tmp_path / "before", module(num_workers=2, cameras=cameras), callbacks=[StopAt(ckpt, step)])
    data = module(batch_size=5)
    after = fit(tmp_path / "after", data, ckpt=ckpt)
    assert frames(before) + frames(after) == wanted(data)
    assert after[0]["step"] == step


def test_fit_on_two_ranks_resumes_on_one_with_lightnings_own_settings(tmp_path):
    ckpt = tmp_path / "stop.ckpt"
    before = fit(tmp_path / "before", module(), devices=2, callbacks=[StopAt(ckpt, 8)])
    data = module(num_workers=2)
    after = fit(tmp_path / "after", data, ckpt=ckpt)
    assert frames(before) + frames(after) == wanted(data)


def test_validation_on_two_ranks_sees_each_frame_once(tmp_path):
    data = module(val_episodes=4)
    fit(tmp_path / "run", data, devices=2, max_epochs=1, limit_val_batches=1.0)
    data.setup()
    assert frames(read(tmp_path / "run", 2, "val")) == every_frame(data.val_dataset)


def test_test_and_predict_read_the_held_out_episodes(tmp_path):
    data, model = module(val_episodes=2), Recorder(tmp_path / "run")
    trainer().test(model, datamodule=data, verbose=False)
    predictions = trainer().predict(model, datamodule=data)
    held_out = [f for n in data.val_dataset.episode_lengths for f in range(n)]
    assert torch.cat(predictions).tolist() == held_out
    assert [f for _, f in frames(read(tmp_path / "run", kind="test"))] == held_out


def test_the_state_is_a_few_plain_values(tmp_path):
    ckpt = tmp_path / "stop.ckpt"
    fit(tmp_path / "run", module(num_workers=2), callbacks=[StopAt(ckpt, 14)])
    state = torch.load(ckpt, weights_only=False)["LeRobotDataModule"]
    data = module()
    data.setup()
    size = len(data.train_dataset)
    steps = -(-size // 8)
    order = {"epoch": 1, "position": (14 - steps) * 8, "seed": 5, "samples": size}
    assert state == {"dataset_fingerprint": data.dataset_fingerprint, "order": order}


def test_a_module_used_again_begins_anew(tmp_path):
    data = module()
    first = fit(tmp_path / "first", data, max_epochs=1)
    assert frames(fit(tmp_path / "second", data, max_epochs=1)) == frames(first)


def test_the_seed_of_seed_everything_is_the_default(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert module(seed=None).seed == 0
    seed_everything(17, verbose=False)
    assert module(seed=None).seed == 17
    monkeypatch.delenv("PL_GLOBAL_SEED")


def budgeted(**options):
    data = module(token_budget=60, **options)
    data.setup()
    return data


def test_batches_are_filled_by_tokens_known_from_metadata(tmp_path):
    data = budgeted(cameras=[CAMERA])
    encoder, dataset = data.collator.encoder, data.train_dataset
    counts = dataset.token_counts(encoder.count_tokens)
    assert counts.tolist() == [encoder.length(dataset[i]) for i in range(len(dataset))]
    batches = list(data.train_dataloader())
    assert max(batch.num_tokens for batch in batches) <= 60
    found = [(int(e), int(f)) for b in batches for e, f in zip(b.episode_index, b.frame_index, strict=True)]
    assert sorted(found) == every_frame(dataset)
    held_out = [
        (int(e), int(f)) for b in data.val_dataloader() for e, f in zip(b.episode_index, b.frame_index, strict=True)
    ]
    assert sorted(held_out) == every_frame(data.val_dataset)


@pytest.mark.parametrize("devices", [(2, 1), (1, 2)], ids=str)
def test_a_token_budget_resumes_on_other_ranks_workers_and_budgets(tmp_path, devices):
    ckpt = tmp_path / "stop.ckpt"
    before = fit(tmp_path / "before", budgeted(num_workers=1), devices=devices[0], callbacks=[StopAt(ckpt, 5)])
    state = torch.load(ckpt, weights_only=False)["LeRobotDataModule"]["order"]
    assert [(entry["steps"], entry["num_replicas"]) for entry in state["taken"]] == [(5, devices[0])]
    json.dumps(state)
    data = module(token_budget=45)
    after = fit(tmp_path / "after", data, ckpt=ckpt, devices=devices[1])
    data.setup()
    for epoch in range(2):
        seen = frames(line for line in before + after if line["epoch"] == epoch)
        assert sorted(seen) == every_frame(data.train_dataset)


def test_a_frame_over_the_budget_is_named_or_left_out_and_counted():
    data = budgeted()
    counts = data.train_dataset.token_counts(data.collator.encoder.count_tokens)
    budget, longest = int(counts.max()) - 1, int(counts.argmax())
    over, which = int((counts > budget).sum()), every_frame(data.train_dataset)[longest]
    strict = module(token_budget=budget)
    strict.setup()
    with pytest.raises(DatasetError, match=f"episode {which[0]}, frame {which[1]}"):
        strict.train_dataloader()
    loose = module(token_budget=budget, packing=PackingOptions(over_budget="drop"))
    loose.setup()
    with pytest.warns(UserWarning, match=f"{over} of {len(counts)} samples"):
        loader = loose.train_dataloader()
    assert sum(batch.batch_size for batch in loader) == len(counts) - over
    nothing = module(token_budget=3, packing=PackingOptions(over_budget="drop"))
    nothing.setup()
    with pytest.raises(DatasetError, match="over the token budget"):
        nothing.train_dataloader()


def test_the_monitor_logs_how_full_packs_are(tmp_path):
    data, values = budgeted(), []

    class Read(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            values.append((trainer.logged_metrics, batch))

    fit(tmp_path / "run", data, callbacks=[GoodputMonitor(window=1), Read()], max_steps=3, log_every_n_steps=1)
    for logged, batch in values:
        assert float(logged["fill"]) == pytest.approx(batch.num_tokens / 60)
        assert float(logged["samples_per_batch"]) == batch.batch_size


@pytest.mark.parametrize("other", [{"seed": 6}, {"val_episodes": 3}], ids=str)
def test_resume_with_another_order_is_refused(tmp_path, other):
    ckpt = tmp_path / "stop.ckpt"
    fit(tmp_path / "before", module(), callbacks=[StopAt(ckpt, 3)])
    with pytest.raises(CheckpointError, match=r"another (seed|samples)"):
        fit(tmp_path / "after", module(**other), ckpt=ckpt)


def test_resume_on_another_dataset_is_refused_but_not_its_evaluation(tmp_path):
    ckpt, other = tmp_path / "stop.ckpt", ROOT.parents[1] / "lerobot_v30_image" / "dataset"
    fit(tmp_path / "before", module(), callbacks=[StopAt(ckpt, 3)])
    with pytest.raises(CheckpointError, match="another dataset"):
        fit(tmp_path / "after", module(other), ckpt=ckpt)
    trainer().test(Recorder(tmp_path / "test"), datamodule=module(other), ckpt_path=ckpt, verbose=False)


@pytest.mark.parametrize(
    "options",
    [{"action_horizon": 0}, {"batch_size": 0}, {"token_budget": 0}, {"num_workers": -1}, {"val_episodes": -1}],
    ids=str,
)
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        module(**options)


@pytest.mark.parametrize("options", [{"batch_size": 1000}, {"token_budget": 10**6}], ids=str)
def test_a_batch_larger_than_the_dataset_is_refused(options):
    data = module(**options)
    data.setup()
    with pytest.raises(ConfigError, match="larger than the training set"):
        data.train_dataloader()


@pytest.mark.parametrize("held_out", [14, 20, 0.99])
def test_a_split_without_training_episodes_is_refused(held_out):
    with pytest.raises(DatasetError, match="no episode is left to train on"):
        module(val_episodes=held_out).setup()


def test_half_an_episode_is_refused():
    with pytest.raises(ConfigError, match="no such number of episodes"):
        module(val_episodes=1.5).setup()


def test_properties_before_setup_say_what_to_do():
    with pytest.raises(ConfigError, match=r"call setup\(\) first"):
        _ = module().stats


def test_yaml_makes_one():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LeRobotDataModule, "data")
    encoder = {"class_path": "lightning_embodied.packing.SampleEncoder", "init_args": {"patch_size": 16}}
    collator = {"class_path": "lightning_embodied.packing.VarlenPackingCollator", "init_args": {"encoder": encoder}}
    options = {"root": str(ROOT), "collator": collator, "val_episodes": 0.2, "action_horizon": 8}
    options |= {"token_budget": 4096, "packing": {"window": 128}}
    config = parser.parse_object({"data": {"class_path": "LeRobotDataModule", "init_args": options}})
    data = parser.instantiate_classes(config).data
    assert isinstance(data.collator.encoder, SampleEncoder)
    assert (data.val_episodes, data.action_horizon) == (0.2, 8)
    assert (data.token_budget, data.packing) == (4096, PackingOptions(window=128))
