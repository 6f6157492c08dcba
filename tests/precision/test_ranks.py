"""Two gloo ranks: DDP, and FSDP2 by ModelParallelStrategy with layers converted before or after `fully_shard`."""

import os
import socket

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import multiprocessing
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_embodied.precision import FP8Linear, FP8Precision
from tests.precision.networks import FlowModule, loader, trainer

STEPS = 2
ORDERS = ("before", "after")
RECIPES = ("rowwise", "delayed")


class Sharded(FlowModule):
    """Sharded layer by layer, down to single linear layers, with conversion before or left to Lightning."""

    def __init__(self, order):
        super().__init__()
        self.order, self.converted_in = order, None

    def configure_model(self):
        if isinstance(self.net, FSDPModule):
            return
        if self.order == "before":
            self.trainer.precision_plugin.convert_module(self.net)
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block.fc1, mesh=mesh)
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class RankOrder(torch.utils.data.DataLoader):
    """Every rank its own half of each batch of six."""

    def __init__(self, rank):
        samples = list(loader(24, 6).dataset)
        super().__init__([samples[i] for i in range(len(samples)) if i % 6 // 3 == rank], batch_size=3)


def train(rank, model, plugin, strategy):
    fit = trainer(max_steps=STEPS, plugins=plugin, strategy=strategy, devices=2, use_distributed_sampler=False)
    fit.fit(model, RankOrder(rank))


def full_state(model):
    whole = (
        (name, value.full_tensor() if isinstance(value, DTensor) else value) for name, value in model.named_parameters()
    )
    return {name: value.detach().clone() for name, value in whole}


def work(rank, port, path):
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank),
        NODE_RANK="0", TORCHELASTIC_RUN_ID="test",
    )  # fmt: skip
    torch.set_num_threads(1)
    results = {}
    for recipe in RECIPES:
        model, plugin = FlowModule(), FP8Precision(recipe, "emulated")
        train(rank, model, plugin, DDPStrategy())
        results["ddp", recipe] = full_state(model), plugin.state_dict()
        for order in ORDERS:
            model, plugin = Sharded(order), FP8Precision(recipe, "emulated")
            kinds = []
            model.on_train_end = lambda model=model, kinds=kinds: kinds.extend(
                (isinstance(layer, FP8Linear), isinstance(layer, FSDPModule), isinstance(layer.weight, DTensor))
                for layer in (model.net.blocks[0].fc1, model.net.blocks[0].fc2, model.net.action_in)
            )
            train(rank, model, plugin, ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
            assert kinds == [(True, True, True), (True, False, True), (False, False, True)], kinds
            assert type(model.net.blocks[0].fc1).__name__ == "FSDPLinear"  # torn down, still sharded
            results[order, recipe] = full_state(model), plugin.state_dict()
    torch.save(results, path / f"{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    multiprocessing.start_processes(work, args=(port, path), nprocs=2, start_method="spawn")
    return [torch.load(path / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_all_ranks_and_all_ways_to_shard_come_to_the_same(ranks, recipe):
    expected, _ = ranks[0]["ddp", recipe]
    begun = FlowModule().state_dict()
    assert any(not torch.equal(expected[name], begun[name]) for name in expected)
    for rank in ranks:
        for way in ("ddp", *ORDERS):
            found, _ = rank[way, recipe]
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_scaling_is_the_largest_of_all_ranks(ranks):
    alone = FP8Precision("delayed", "emulated")
    model = FlowModule()
    trainer(max_steps=1, plugins=alone).fit(model, loader(24, 6))
    whole = alone.state_dict()["amax_history"]
    for way in ("ddp", *ORDERS):
        histories = [rank[way, "delayed"][1]["amax_history"] for rank in ranks]
        assert histories[0].keys() == histories[1].keys() == whole.keys()
        for name, history in histories[0].items():
            assert torch.equal(history, histories[1][name])
            assert (history[0] > 0).sum() == STEPS
            # The first step's input and weight are those of one rank with the whole batch; a layer sees FP8 from above.
            torch.testing.assert_close(history[:2, STEPS - 1], whole[name][:2, 0], rtol=0.05, atol=0)
