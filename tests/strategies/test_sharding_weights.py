"""Weights reach the shards without any rank reading, or holding, the whole model."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_embodied.errors import CheckpointError
from lightning_embodied.strategies import Sharding, load_weights, parameters_on_meta, sharding_mesh
from tests.strategies.models import Stack
from tests.strategies.ranks import PeakMemory, run_ranks

CPU = torch.device("cpu")
WIDTH, DEPTH = 1024, 2  # four matrices of 16.8 MB
HUGE_PAGES = 4 * 2 * 2**21  # of each, the first and the last page of its rows hold other rows as well


class TouchedBytes(TorchDispatchMode):
    """Watches how much of a file this process has touched through memory maps, whenever a tensor is copied."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.most = path, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.most = max(self.most, self._touched())
        return result

    def _touched(self) -> int:
        maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
        return (
            sum(int(re.search(r"^Rss:\s+(\d+)", one, re.MULTILINE)[1]) for one in maps if str(self.path) in one) * 1024
        )


def read_my_rows(rank: int, ranks: int, path: Path) -> dict[str, int]:
    mesh = sharding_mesh("cpu", ranks)
    Sharding().apply(Stack(), mesh)  # what torch loads the first time is not the model's
    with PeakMemory() as peak:
        with parameters_on_meta():
            module = Stack(WIDTH, DEPTH)
        Sharding().apply(module, mesh)
        with TouchedBytes(path) as read:
            load_weights(module, path, CPU)
    expected = load_file(path)
    return {
        "held": sum(param.to_local().nbytes for param in module.parameters()),
        "read": read.most,
        "peak": peak.bytes,
        "equal": all(torch.equal(p.full_tensor(), expected[name]) for name, p in module.named_parameters()),
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_reads_and_holds_its_rows_only(tmp_path, ranks):
    path = tmp_path / "model.safetensors"
    save_file(Stack(WIDTH, DEPTH).state_dict(), path)
    size = path.stat().st_size
    for found in run_ranks(ranks, read_my_rows, tmp_path / "ranks", ranks, path):
        assert found["equal"]
        assert found["held"] == pytest.approx(size / ranks, rel=0.01)
        assert size / ranks * 0.9 < found["read"] < size / ranks + HUGE_PAGES < size
        assert found["peak"] < found["held"] + found["read"] + 2**23  # never the whole model


@pytest.fixture
def mesh():
    """A process group of one, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield sharding_mesh("cpu", 1)
    dist.destroy_process_group()


def on_meta(**changes: nn.Module) -> nn.Module:
    with parameters_on_meta():
        module = Stack()
        for name, part in changes.items():
            module.add_module(name, part())
        module.register_buffer("scale", torch.tensor([3.0]))
    assert all(param.is_meta for param in module.parameters())
    assert module.scale.item() == 3.0
    return module


def sharded(mesh, **changes) -> nn.Module:
    module = on_meta(**changes)
    Sharding().apply(module, mesh)
    return module


def test_a_directory_of_shards_with_a_prefix(tmp_path, mesh):
    state = {f"policy.{name}": value.bfloat16() for name, value in Stack().state_dict().items()}
    names = sorted(state)
    files = {"one.safetensors": names[:4], "two.safetensors": names[4:]}
    for file, content in files.items():
        save_file({name: state[name] for name in content}, tmp_path / file)
    index = {"weight_map": {name: file for file, content in files.items() for name in content}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = Stack()

        def forward(self, x):
            return self.policy(x)

    with parameters_on_meta():
        outer = Outer()
    Sharding().apply(outer, mesh)
    load_weights(outer, tmp_path, CPU)
    module = sharded(mesh)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({name.removeprefix("policy."): value for name, value in state.items()}, tmp_path / "model.safetensors")
    load_weights(module, tmp_path, CPU)
    for name, param in module.named_parameters():
        assert torch.equal(param.full_tensor(), state[f"policy.{name}"].float()), name
        assert torch.equal(outer.policy.get_parameter(name).full_tensor(), param.full_tensor())
    nested = Outer()
    load_weights(nested, tmp_path, CPU, prefix="policy.")
    assert torch.equal(nested.policy.stem.weight, module.stem.weight.full_tensor())


def test_what_no_file_has_is_initialised_or_refused(tmp_path, mesh):
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.gain

    path = tmp_path / "model.safetensors"
    save_file(Stack().state_dict(), path)
    module = sharded(mesh, extra=lambda: nn.Linear(4, 4))
    load_weights(module, path, CPU)
    assert 0 < module.extra.weight.full_tensor().abs().max() < 1
    with pytest.raises(CheckpointError, match=r"extra\.gain"):
        load_weights(sharded(mesh, extra=Bare), path, CPU)
    kept = Stack()
    kept.extra = Bare()
    load_weights(kept, path, CPU)
    assert torch.equal(kept.extra.gain, torch.ones(4))


def test_files_that_do_not_fit_are_refused(tmp_path, mesh):
    path = tmp_path / "model.safetensors"
    save_file(Stack(width=8).state_dict(), path)
    with pytest.raises(CheckpointError, match="another shape"):
        load_weights(sharded(mesh), path, CPU)
    save_file({"else": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="prefix"):
        load_weights(sharded(mesh), path, CPU)
    path.write_bytes(path.read_bytes()[:-4])
    for bad in (path, tmp_path / "absent.safetensors", tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_weights(sharded(mesh), bad, CPU)
