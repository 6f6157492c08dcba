"""Sharded training is the training of one process; what would go wrong in silence is repaired or refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_embodied.errors import ConfigError
from lightning_embodied.strategies import Sharding, check_replicas, sharding_mesh
from tests.strategies.models import Block, Handless, JointTowers, Stack
from tests.strategies.ranks import run_ranks

STEPS, ROWS = 3, 8


@pytest.fixture
def one_rank():
    """A process group of one, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield sharding_mesh("cpu", 1)
    dist.destroy_process_group()


def data(step: int) -> torch.Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, ranks: int = 1) -> None:
    for step in range(STEPS):
        x = data(step).chunk(ranks)[rank]
        (module(x) - x.sum(-1, keepdim=True)).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def full(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in module.named_parameters()}


def build(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind().double()


CASES = {
    "layers found": (Stack, 1, {}),
    "layers named": (Stack, 1, {"units": ["Block"]}),
    "one unit": (Stack, 1, {"units": []}),
    "parts of units, and a pattern": (Stack, 1, {"units": ["Block", "Linear", "blocks.0.up", "ste*"]}),
    "recomputed": (Stack, 1, {"activation_checkpointing": ["Block"]}),
    "hybrid": (Stack, 2, {"units": ["Block"]}),
    "replicas only": (Stack, 4, {}),
    "joint attention": (JointTowers, 1, {"joint_units": ["TowerLayer"]}),
    "layers without forward": (Handless, 1, {}),
    "joint attention, hybrid": (JointTowers, 2, {"joint_units": ["TowerLayer"], "units": []}),
}


def train_all_cases(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name, (kind, replicate, options) in CASES.items():
        module = build(kind, seed=rank)  # other values on every rank: rank 0's count
        early = torch.optim.AdamW(module.parameters(), lr=0.01)
        sharded = Sharding(**options, reduce_dtype=None).apply(module, sharding_mesh("cpu", 4, replicate))
        sharded.rebind([early])
        train(module, early, rank, 4)
        check_replicas(module, sharded.mesh)
        found[name] = full(module)
        assert type(module) is not kind
        assert type(module).__qualname__ == kind.__qualname__
    return found


def test_equals_one_process_whatever_the_sharding_and_with_an_optimizer_built_before(tmp_path):
    results = run_ranks(4, train_all_cases, tmp_path)
    for name, (kind, *_) in CASES.items():
        module = build(kind)
        train(module, torch.optim.AdamW(module.parameters(), lr=0.01))
        for rank in range(4):
            torch.testing.assert_close(results[rank][name], full(module), rtol=1e-10, atol=1e-12)


def disagree(rank: int) -> list[str]:
    messages = []

    def refused(act):
        with pytest.raises(ConfigError) as error:
            act()
        messages.append(str(error.value))

    mesh = sharding_mesh("cpu", 2, 2)
    refused(lambda: Sharding().apply(Stack(depth=2 + rank), sharding_mesh("cpu", 2)))
    module = Stack()
    Sharding().apply(module, mesh)
    with torch.no_grad():
        module.blocks[1].up.bias.to_local().add_(rank)
    refused(lambda: check_replicas(module, mesh))
    refused(lambda: sharding_mesh("cpu", 2, 3))
    return messages


def test_ranks_that_differ_are_refused_by_name(tmp_path):
    for structure, drifted, indivisible in run_ranks(2, disagree, tmp_path):
        assert "rank 1, parameters or buffers blocks.2.up.weight" in structure
        assert "blocks.1.up.bias" in drifted
        assert "a divisor of the number of ranks, 2" in indivisible


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"units": ["Blok"]}, ["units", "Blok", "Block"]),
        ({"units": ["*.block.*"]}, ["*.block.*", "blocks.0"]),
        ({"units": ["ModuleList"]}, ["ModuleList"]),
        ({"joint_units": ["Tower"]}, ["joint_units", "Tower"]),
        ({"activation_checkpointing": ["Bloc"]}, ["activation_checkpointing", "Block"]),
        ({"forward_methods": ["act"]}, ["forward_methods", "act"]),
    ],
)
def test_names_that_match_nothing_are_refused_with_the_closest(one_rank, options, told):
    with pytest.raises(ConfigError) as error:
        Sharding(**options).apply(Stack(), one_rank)
    assert all(word in str(error.value) for word in told)


def test_layers_that_are_not_called_are_named(one_rank):
    towers = Regressor()
    Sharding(units=["TowerLayer"], forward_methods=["predict"]).apply(towers, one_rank)
    with pytest.raises(ConfigError, match="TowerLayer") as error:
        towers.predict(torch.zeros(2, 4))
    assert "joint_units" in str(error.value)


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = JointTowers()

    def predict(self, x):
        return self.network(x)


def test_tied_parameters_stay_tied_or_are_refused(one_rank):
    class Tied(Stack):
        def __init__(self, tie_within_root: bool) -> None:
            super().__init__()
            if tie_within_root:
                self.again = nn.Linear(4, 16)
                self.again.weight = self.stem.weight
            else:
                self.blocks[0].up.weight = self.blocks[1].up.weight

    tied = Tied(tie_within_root=True)
    Sharding().apply(tied, one_rank)
    assert tied.again.weight is tied.stem.weight
    with pytest.raises(ConfigError, match=r"blocks\.0\.up\.weight and blocks\.1\.up\.weight"):
        Sharding().apply(Tied(tie_within_root=False), one_rank)


def test_parameters_that_cannot_be_sharded_are_named(one_rank):
    module = Stack()
    module.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="temperature"):
        Sharding().apply(module, one_rank)
    module = Stack()
    sharded = Sharding().apply(module, one_rank)
    with pytest.raises(ConfigError, match="sharded already"):
        Sharding().apply(module, one_rank)
    module.late = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"late\.weight, late\.bias"):
        sharded.rebind([])


def test_optimizers_of_other_tensors_or_with_state_are_refused(one_rank):
    module = build(Stack)
    stepped = torch.optim.AdamW(module.parameters())
    train(module, stepped)
    sharded = Sharding().apply(module, one_rank)
    with pytest.raises(ConfigError, match="not parameters of the model"):
        sharded.rebind([torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)])
    with pytest.raises(ConfigError, match="stepped before"):
        sharded.rebind([stepped])


def test_what_is_written_after_a_call_without_gradients_is_kept(one_rank):
    class Averaged(Stack):
        def validate(self, x):
            return self.again(x)

        def again(self, x):
            return self(x)

    module = Averaged()
    Sharding(forward_methods=["validate", "again"]).apply(module, one_rank)
    with torch.no_grad():
        module.validate(torch.ones(1, 4))
        for param in module.parameters():
            param.zero_()
        module.head.bias.fill_(7.0)
        assert module.validate(torch.ones(1, 4)).item() == 7.0


def test_the_default_units_are_the_repeated_layers(one_rank):
    module = nn.Sequential(Block(4), Block(4), nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = Sharding().apply(module, one_rank)
    assert sharded.units == [module, module[0], module[1]]
