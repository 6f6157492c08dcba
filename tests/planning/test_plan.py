"""Whole plans: which way is recommended, how it scales, and what it asks of storage."""

import math
from dataclasses import replace

import pytest
import torch

from lightning_embodied.errors import ConfigError
from lightning_embodied.planning import ACCELERATORS, Cluster, PlanRequest, SampleSize, Sharding, Storage, make_plan
from lightning_embodied.planning.demands import CheckpointCost, LoaderDemand

from . import real_run

SAMPLE = SampleSize(cameras=2, picture_pixels=640 * 480)


def step_of(micro_batch):
    def step(module, execution):
        return module(execution.empty(micro_batch, real_run.TOKENS, 24)).square().mean()

    return step


def planned(*, memory=None, build=real_run.Network, **changes):
    gpu = ACCELERATORS["h200"]
    cluster = Cluster(gpu if memory is None else replace(gpu, memory=memory), 4e11)
    request = PlanRequest(ranks=64, cluster=cluster, micro_batch=4, sample=SAMPLE, precision="32-true")
    return make_plan(build, step_of, replace(request, **changes))


def test_a_small_model_takes_ddp_and_a_tight_gpu_takes_shards():
    roomy = planned()
    assert roomy.recommended.sharding.strategy == "ddp"
    assert [candidate.sharding.strategy for candidate in roomy.candidates] == ["ddp", "hsdp"]
    whole, hybrid = (candidate.memory.peak for candidate in roomy.candidates)
    tight = planned(memory=(whole + hybrid) / 2 / ACCELERATORS["h200"].usable_share)
    assert tight.recommended.sharding.label == "hsdp 8 x 8"
    assert tight.recommended.sharding.units == ("Block",)
    assert "ddp needs" in tight.reasons[0]


def test_what_does_not_fit_is_said_and_fsdp_is_then_looked_at():
    plan = planned(memory=1e6)
    assert plan.recommended is None
    assert [candidate.sharding.strategy for candidate in plan.candidates] == ["ddp", "hsdp", "fsdp"]
    assert "nothing fits" in plan.reasons[-1]
    assert all(candidate.largest_micro_batch == 0 for candidate in plan.candidates)


def test_the_largest_micro_batch_fits_and_its_double_does_not():
    memory = 400e6
    plan = planned(memory=memory, strategies=("ddp",))
    largest, usable = plan.candidates[0].largest_micro_batch, memory * ACCELERATORS["h200"].usable_share
    assert largest == 2 ** round(math.log2(largest))
    sizes = [
        planned(strategies=("ddp",), micro_batch=size).candidates[0].memory.peak for size in (largest, 2 * largest)
    ]
    assert sizes[0] <= usable < sizes[1]


def test_the_curve_loses_efficiency_and_measurements_replace_it():
    plan = planned(strategies=("ddp",), ranks=2048)
    assert [point.ranks for point in plan.scaling] == [2**power for power in range(3, 12)]
    efficiencies = [point.efficiency for point in plan.scaling]
    assert efficiencies[0] == 1
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert plan.scaling[-1].samples_per_second == pytest.approx(plan.candidates[0].samples_per_second)
    fitted = planned(strategies=("ddp",), measured={256: 3.01, 1024: 3.44})
    assert fitted.scaling[-1].seconds == pytest.approx(3.44)


def test_one_rank_has_nobody_to_talk_to():
    plan = planned(ranks=1)
    assert [candidate.sharding.strategy for candidate in plan.candidates] == ["ddp"]
    assert plan.candidates[0].time.traffic == {}
    assert plan.candidates[0].time.exposed == pytest.approx(0, abs=1e-12)


def test_loaders_read_in_proportion_to_samples():
    demand = LoaderDemand.of(SAMPLE, samples=1000, nodes=10)
    assert demand.iops == 3000
    assert demand.read_rate == pytest.approx(1000 * (2 * 640 * 480 * 0.1 * 1.5 + 4096))
    assert demand.frames_per_node == 300
    assert demand.pixels_rate_per_node == 300 * 640 * 480 * 3


def test_shards_are_written_at_once_and_replicas_are_not():
    storage = Storage(node_rate=5e9, total_rate=100e9, host_rate=25e9)
    ways = {"ddp": Sharding("ddp", 1024), "hsdp": Sharding("hsdp", 1024, 8), "fsdp": Sharding("fsdp", 1024, 1024)}
    costs = {name: CheckpointCost.of(100 * 10**9, sharding, storage, 8) for name, sharding in ways.items()}
    assert costs["ddp"].write_seconds == costs["hsdp"].write_seconds == 20
    assert costs["fsdp"].write_seconds == 1
    assert [costs[name].stall_seconds for name in ways] == [4, 0.5, pytest.approx(4 / 1024)]
    assert costs["ddp"].load_seconds == costs["hsdp"].load_seconds == 128, "every node reads all of it"
    assert costs["fsdp"].load_seconds == 1


@pytest.mark.parametrize("change", [{"ranks": 0}, {"micro_batch": 0}, {"accumulate": 0}])
def test_numbers_below_one_are_refused(change):
    with pytest.raises(ConfigError, match="too small"):
        planned(**change)


def test_a_shard_size_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="shards do not fit"):
        planned(shard_size=24)


def test_half_precision_is_gathered_and_reduced_in_full():
    plan = planned(precision="bf16-mixed", strategies=("hsdp",))
    hybrid = plan.candidates[1]
    assert (hybrid.sharding.param_dtype, hybrid.sharding.reduce_dtype) == (torch.bfloat16, torch.float32)
    traffic = hybrid.time.traffic
    assert traffic["all_gather"].sent < traffic["reduce_scatter"].sent * 1.1  # twice as often, in half the bytes
