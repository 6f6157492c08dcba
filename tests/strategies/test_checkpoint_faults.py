"""Whenever a save is cut short, what is found is the last complete checkpoint; and no checkpoint runs code."""

import os
import pickle
import resource
import signal
import threading
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.multiprocessing import ProcessExitedException

from lightning_embodied.errors import CheckpointError
from lightning_embodied.strategies import AsyncShardedCheckpoint, Sharding, latest_checkpoint, sharding_mesh
from lightning_embodied.strategies.checkpoint_state import join_checkpoint, split_checkpoint
from tests.strategies.models import Stack
from tests.strategies.ranks import run_ranks


class HeldFileSystem(MemoryFileSystem):
    """A store that keeps writers waiting until it is released."""

    protocol = "held"
    store, pseudo_dirs = {}, [""]
    released = threading.Event()

    def _open(self, path, mode="rb", **options):
        if "w" in mode:
            self.released.wait()
        return super()._open(path, mode, **options)


fsspec.register_implementation("held", HeldFileSystem)


def checkpoint_of(value: float, **more) -> dict:
    state = {"weight": torch.full((3, 2), value), "count": torch.tensor(int(value))}
    return {"state_dict": state, "global_step": int(value), "pytorch-lightning_version": "2.6.6", **more}


def value_of(path) -> float:
    loaded = AsyncShardedCheckpoint().load_checkpoint(path)
    (value,) = loaded["state_dict"]["weight"].unique().tolist()
    assert value == loaded["global_step"] == loaded["state_dict"]["count"]
    return value


def test_training_goes_on_while_a_checkpoint_is_written_and_removals_wait_for_it():
    io, HeldFileSystem.released = AsyncShardedCheckpoint(), threading.Event()
    HeldFileSystem.released.set()
    io.save_checkpoint(checkpoint_of(1), "held://run/one.ckpt")
    io.wait()
    HeldFileSystem.released.clear()
    changing = checkpoint_of(2)
    io.save_checkpoint(changing, "held://run/two.ckpt")
    io.remove_checkpoint("held://run/one.ckpt")
    changing["state_dict"]["weight"].fill_(7.0)  # the next step
    assert latest_checkpoint("held://run") == "held://run/one.ckpt"
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        value_of("held://run/two.ckpt")
    HeldFileSystem.released.set()
    io.teardown()
    assert latest_checkpoint("held://run") == "held://run/two.ckpt"
    assert value_of("held://run") == 2
    assert not fsspec.filesystem("held").exists("run/one.ckpt")


def sharded(value: float) -> dict:
    module = Stack(width=32)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(value)
    Sharding().apply(module, sharding_mesh("cpu", dist.get_world_size()))
    return {"state_dict": module.state_dict(), "global_step": int(value), "pytorch-lightning_version": "2.6.6"}


def save_and_die(rank: int, path: Path) -> None:
    io = AsyncShardedCheckpoint(asynchronous=False)
    io.save_checkpoint(sharded(1), path / "last.ckpt")
    content = sharded(2)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the system kills this rank in the middle of its file
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    io.save_checkpoint(content, path / (path / "name").read_text())


@pytest.mark.parametrize("name", ["last.ckpt", "next.ckpt"])
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_checkpoint_before(tmp_path, name):
    (tmp_path / "name").write_text(name)
    with pytest.raises(ProcessExitedException, match="SIGXFSZ"):
        run_ranks(2, save_and_die, tmp_path / "ranks", tmp_path)
    assert latest_checkpoint(tmp_path) == str(tmp_path / "last.ckpt")
    loaded = AsyncShardedCheckpoint().load_checkpoint(tmp_path)
    assert loaded["global_step"] == 1
    assert all((value == 1).all() for value in loaded["state_dict"].values())
    written = list(tmp_path.rglob("__1_0.distcp"))
    assert len(written) == 2  # the second save had begun
    AsyncShardedCheckpoint(asynchronous=False).save_checkpoint(checkpoint_of(3), tmp_path / name)
    assert value_of(tmp_path) == 3
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted({"last.ckpt", name, "name", "ranks"})


def save_to_a_full_disk(rank: int, path: Path) -> str:
    io = AsyncShardedCheckpoint()
    io.save_checkpoint(sharded(1), path / "one.ckpt")
    io.wait()
    content = sharded(2)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    io.save_checkpoint(content, path / "two.ckpt")
    if rank == 0:
        io.remove_checkpoint(path / "one.ckpt")  # as ModelCheckpoint does, believing in the new one
    with pytest.raises(CheckpointError) as error:
        io.save_checkpoint(content, path / "three.ckpt")
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert latest_checkpoint(path) == f"{path}/one.ckpt"
    dist.barrier()
    io.save_checkpoint(sharded(3), path / "three.ckpt")
    io.teardown()
    return str(error.value)


def test_a_full_disk_of_one_rank_is_one_error_on_all(tmp_path):
    for message in run_ranks(2, save_to_a_full_disk, tmp_path / "ranks", tmp_path):
        assert "two.ckpt (rank 1)" in message
        assert "OSError" in message
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/three.ckpt"


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


def test_checkpoints_do_not_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    io, path = AsyncShardedCheckpoint(asynchronous=False), tmp_path / "x.ckpt"
    with pytest.raises(CheckpointError, match="plain values"):
        io.save_checkpoint(checkpoint_of(1, hyper_parameters={"act": Attack()}), path)
    assert latest_checkpoint(tmp_path) is None
    io.save_checkpoint(checkpoint_of(1), path)
    (data,) = path.glob("data-*")
    for file in (data / ".metadata", data / "trainer.pt"):
        good = file.read_bytes()
        file.write_bytes(pickle.dumps(Attack()))
        with pytest.raises(CheckpointError):
            io.load_checkpoint(path)
        file.write_bytes(good)
    assert value_of(path) == 1
    assert not Path("attacked").exists()


@pytest.mark.parametrize("damage", ["trainer.pt", ".metadata", "__0_0.distcp"])
def test_damaged_checkpoints_are_refused(tmp_path, damage):
    path = tmp_path / "x.ckpt"
    AsyncShardedCheckpoint(asynchronous=False).save_checkpoint(checkpoint_of(1), path)
    (file,) = path.glob(f"data-*/{damage}")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError):
        value_of(path)
    file.unlink()
    with pytest.raises(CheckpointError):
        value_of(path)
    (path / "COMMITTED").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="another format"):
        value_of(path)


def test_what_is_no_checkpoint_is_refused_and_what_was_there_is_replaced(tmp_path):
    for place in (tmp_path, tmp_path / "absent"):
        assert latest_checkpoint(place) is None
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            value_of(place)
    io = AsyncShardedCheckpoint(asynchronous=False)
    (tmp_path / "a.ckpt").write_text("a file of another format")
    (tmp_path / "b.ckpt").symlink_to("a.ckpt")
    (tmp_path / "c.ckpt").mkdir()
    (tmp_path / "c.ckpt" / "junk").write_text("x")
    for value, name in enumerate(("a.ckpt", "b.ckpt", "c.ckpt", "a.ckpt"), start=1):
        io.save_checkpoint(checkpoint_of(value), tmp_path / name)
        assert value_of(tmp_path / name) == value_of(tmp_path) == value
    assert value_of(tmp_path / "b.ckpt") == 2
    assert not (tmp_path / "c.ckpt" / "junk").exists()
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.wait()
    assert value_of(tmp_path) == 3


tensors = st.sampled_from([torch.zeros(2), torch.ones(3, 1), torch.tensor(4)])
plain = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
values = st.dictionaries(st.text("abc._0", min_size=1, max_size=4), tensors | plain, max_size=3)
optimizer = st.fixed_dictionaries(
    {"state": st.dictionaries(st.integers(0, 12), values, max_size=3), "param_groups": st.just([{"lr": 0.1}])}
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine
@given(
    st.fixed_dictionaries(
        {"state_dict": values, "optimizer_states": st.lists(optimizer, max_size=2), "epoch": st.integers()}
    )
)
def test_dividing_a_checkpoint_loses_nothing(checkpoint):
    taken, rest = split_checkpoint(checkpoint)
    assert same(join_checkpoint(taken, rest), checkpoint)
    assert not any(isinstance(value, torch.Tensor) for value in rest["state_dict"].values())


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b
