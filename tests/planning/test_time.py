"""Collectives, the timeline, goodput and scaling laws."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_embodied.errors import ConfigError
from lightning_embodied.planning import (
    META_HOURS_BETWEEN_FAILURES,
    Cluster,
    MeasuredLink,
    Measurement,
    NcclModel,
    ScalingLaw,
    Sharding,
    goodput,
    parse_rate,
    step_time,
)
from lightning_embodied.planning.events import AwaitGather, Collective, Compute, GradientReady
from lightning_embodied.planning.goodput import useful_share

CLUSTER = Cluster.of("h200", "3.2Tb")
NCCL = NcclModel(CLUSTER)


class Constant:
    """Every collective takes one second, however many ranks and bytes."""

    def seconds(self, kind, size, ranks, stride=1):
        return 1.0 if ranks > 1 else 0.0


def play(events, sharding, model=None, **options):
    return step_time(events, sharding, model or Constant(), gpus_per_node=8, **options)


# Collectives


@pytest.mark.parametrize(
    ("text", "rate"),
    [("3.2Tb", 4e11), ("400Gbps", 5e10), ("400 Gbit/s", 5e10), ("50GB/s", 5e10), ("25MB", 2.5e7)],
)
def test_rates_are_read_in_bits_and_bytes(text, rate):
    assert parse_rate(text, "network") == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "3.2", "fast", "3.2.1Tb", "-1Gb", "0Gb", "3.2XB"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ConfigError, match="no rate"):
        parse_rate(text, "network")


def test_unknown_gpus_and_empty_nodes_are_refused():
    with pytest.raises(ConfigError, match="h200"):
        Cluster.of("h2000", "3.2Tb")
    with pytest.raises(ConfigError, match="gpus_per_node"):
        Cluster.of("h200", "3.2Tb", 0)


@given(
    kind=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    ranks=st.integers(2, 4096),
    size=st.floats(1, 1e11),
)
def test_no_collective_beats_its_links_and_more_work_never_takes_less(kind, ranks, size):
    seconds = NCCL.seconds(kind, size, ranks)
    per_node = min(ranks, 8)
    nodes = math.ceil(ranks / per_node)
    passes = 2 if kind == "all_reduce" else 1
    bound = (
        passes
        * size
        * max((ranks - 1) / ranks / CLUSTER.gpu.link, (nodes - 1) / nodes / (CLUSTER.network * per_node / 8))
    )
    assert seconds > bound
    assert NCCL.seconds(kind, 2 * size, ranks) >= seconds
    assert NCCL.seconds(kind, size, 2 * max(ranks, 8)) >= NCCL.seconds(kind, size, max(ranks, 8))


def test_large_tensors_run_at_the_rate_and_small_ones_at_the_latency():
    rate = 1e12 / NCCL.seconds("all_gather", 1e12, 1024)
    assert rate == pytest.approx(CLUSTER.network * CLUSTER.network_share, rel=0.02)
    small = [NCCL.seconds("all_gather", 8, ranks) for ranks in (256, 512, 1024)]
    assert small[2] / small[1] == pytest.approx(small[1] / small[0], rel=0.1) == pytest.approx(2, rel=0.1)
    tree = [NCCL.seconds("all_reduce", 8, ranks) for ranks in (256, 1024)]
    assert tree[1] < 1.5 * tree[0], "trees grow with the logarithm"


def test_replicas_of_one_gpu_in_each_node_have_their_share_of_the_network():
    whole = NCCL.seconds("all_reduce", 1e9, 128, stride=8)
    assert whole == pytest.approx(2e9 * 127 / 128 / (CLUSTER.network * CLUSTER.network_share / 8), rel=0.1)


@given(latency=st.floats(1e-6, 1e-2), rate=st.floats(1e6, 1e11), noise=st.integers(0, 2**32 - 1))
def test_a_measured_link_finds_its_constants_again(latency, rate, noise):
    sizes = latency * rate * np.array([0.1, 0.5, 2.0, 20.0])
    jitter = np.random.default_rng(noise).normal(1, 0.01, len(sizes))
    seconds = (latency + sizes / rate) * jitter
    link = MeasuredLink.fit(4, [Measurement("all_gather", *pair) for pair in zip(sizes, seconds, strict=True)])
    assert link.latency["all_gather"] == pytest.approx(latency, rel=0.15)
    assert link.rate["all_gather"] == pytest.approx(rate, rel=0.15)


def test_a_measured_link_answers_only_what_was_measured():
    with pytest.raises(ConfigError, match="two sizes"):
        MeasuredLink.fit(2, [Measurement("all_gather", 8, 1.0)])
    link = MeasuredLink.fit(2, [Measurement("all_gather", size, size) for size in (1, 2)])
    with pytest.raises(ConfigError, match="not measured"):
        link.seconds("all_gather", 8, 4)
    with pytest.raises(ConfigError, match="not measured"):
        link.seconds("all_reduce", 8, 2)


# The timeline


def test_gathers_overlap_the_layer_before_and_reductions_the_layers_after():
    sharding = Sharding("fsdp", 4, 4)
    gather, scatter = Collective("all_gather", 8), Collective("reduce_scatter", 8)
    forward = [event for _ in range(3) for event in (gather, AwaitGather(), Compute(2.0))]
    # The first gather shows, the others hide behind two seconds of work.
    assert play(forward, sharding).seconds == 1 + 3 * 2
    # The last reduction has nothing to hide behind.
    assert play([Compute(2.0), scatter, Compute(2.0), scatter], sharding).seconds == 5
    # Faster layers leave a part of each gather to see.
    quick = play([event for _ in range(3) for event in (gather, AwaitGather(), Compute(0.25))], sharding)
    assert quick.seconds == pytest.approx(1 + 3 * 0.25 + 2 * 0.75)
    assert quick.exposed == pytest.approx(quick.seconds - 0.75)
    assert quick.traffic["all_gather"].calls == 3
    assert quick.traffic["all_gather"].sent == 3 * 8 * 3 / 4


def test_hybrid_reductions_follow_their_reduce_scatter_on_the_other_network():
    events = [Compute(1.0), Collective("reduce_scatter", 8), Collective("all_reduce", 2)]
    assert play(events, Sharding("hsdp", 64, 8)).seconds == 3
    assert play(events, Sharding("fsdp", 8, 8)).seconds == 2, "one copy has nobody to agree with"


def test_buckets_fill_in_the_order_of_the_gradients():
    mebibyte = 2**18
    ready = [event for _ in range(6) for event in (Compute(1.0), GradientReady(mebibyte, 4))]
    step = play(ready, Sharding("ddp", 4, bucket_mb=2))
    assert step.traffic["all_reduce"].calls == 4  # 1, 2, 2 and the rest
    assert step.seconds == 7
    assert play(ready, Sharding("ddp", 1, bucket_mb=2)).seconds == 6


def test_only_the_last_micro_batch_reduces():
    events = [Collective("all_gather", 8), AwaitGather(), Compute(2.0), Collective("reduce_scatter", 8)]
    total = play(events, Sharding("fsdp", 4, 4), accumulate=3, optimizer_seconds=0.5)
    assert total.seconds == 3 * 3 + 1 + 0.5
    assert total.traffic["reduce_scatter"].calls == 1
    assert total.traffic["all_gather"].calls == 3


@given(
    layers=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 10**9)), min_size=1, max_size=20),
    ranks=st.sampled_from([2, 8, 64, 1024]),
)
def test_a_step_takes_at_least_its_work_and_at_most_both_one_after_the_other(layers, ranks):
    events = list(
        itertools.chain.from_iterable(
            (Collective("all_gather", size), AwaitGather(), Compute(seconds), Collective("reduce_scatter", size))
            for seconds, size in layers
        )
    )
    step = play(events, Sharding("fsdp", ranks, ranks), NCCL)
    talk = sum(traffic.seconds for traffic in step.traffic.values())
    assert max(step.compute, talk) <= step.seconds * (1 + 1e-9)
    assert step.seconds <= (step.compute + talk) * (1 + 1e-9)


# Goodput


def test_useful_share_is_what_a_simulation_of_failures_finds():
    random, mean, save, restart, interval = np.random.default_rng(0), 1000.0, 20.0, 60.0, 150.0
    done, clock, failure = 0, 0.0, random.exponential(mean)
    while done < 20_000:
        if clock + interval + save <= failure:
            clock, done = clock + interval + save, done + 1
            continue
        clock, failure = failure, failure + random.exponential(mean)
        while clock + restart > failure:  # a failure while starting again
            clock, failure = failure, failure + random.exponential(mean)
        clock += restart
    assert useful_share(interval, mean, save, restart) == pytest.approx(done * interval / clock, rel=0.01)


@settings(max_examples=50)
@given(
    ranks=st.integers(1, 20_000), save=st.floats(0.1, 300), restart=st.floats(1, 600), hours=st.floats(5_000, 100_000)
)
def test_the_interval_is_the_best_one(ranks, save, restart, hours):
    best = goodput(ranks, hours_between_failures=hours, save_seconds=save, restart_seconds=restart)
    mean = 3600 * hours / ranks
    for factor in (0.5, 0.9, 1.1, 2):
        assert best.share >= useful_share(best.interval * factor, mean, save, restart) - 1e-12
    assert 0 <= best.share < 1


def test_goodput_of_llama_3_is_what_its_authors_report():
    found = goodput(16_384, hours_between_failures=META_HOURS_BETWEEN_FAILURES, save_seconds=5, restart_seconds=600)
    assert found.hours_between_failures == pytest.approx(54 * 24 / 419)
    assert found.share > 0.9  # arXiv:2407.21783, section 3.3.4: more than 90 % effective training time


def test_an_interval_is_no_shorter_than_writing_takes_and_numbers_are_positive():
    options = {"hours_between_failures": 50_000, "restart_seconds": 60}
    assert goodput(1024, save_seconds=1e-3, least_interval=90, **options).interval == 90
    with pytest.raises(ConfigError, match="save_seconds"):
        goodput(1024, save_seconds=0, **options)


# Scaling

PAPER = {256: 2.55, 512: 1.24, 1024: 0.73}
"""GPUs to hours of an epoch with 128 samples a GPU (arXiv:2603.11101, section 3.1)."""


def test_two_constants_reproduce_the_papers_scaling_table():
    frames = 100e6
    steps = {ranks: frames / (128 * ranks) for ranks in PAPER}
    law = ScalingLaw.fit({ranks: hours * 3600 / steps[ranks] for ranks, hours in PAPER.items()})
    assert law.fixed == pytest.approx(2.76, abs=0.01)
    assert law.per_rank == pytest.approx(0.00061, abs=0.00001)
    for ranks, hours in PAPER.items():
        assert law.epoch_hours(ranks, frames, 128) == pytest.approx(hours, rel=0.05)


@given(fixed=st.floats(0, 100), per_rank=st.floats(0, 1))
def test_a_law_is_found_again_and_never_has_a_negative_constant(fixed, per_rank):
    ranks = (8, 64, 512)
    truth = ScalingLaw(fixed + 1e-3, per_rank)
    law = ScalingLaw.fit({count: truth.step_seconds(count) for count in ranks})
    assert all(law.step_seconds(count) == pytest.approx(truth.step_seconds(count), rel=1e-6) for count in ranks)
    faster = ScalingLaw.fit({8: 2.0, 64: 1.0})
    assert faster.per_rank == 0
    assert 1 < faster.fixed < 2


def test_one_measurement_is_no_law():
    with pytest.raises(ConfigError, match="two measurements"):
        ScalingLaw.fit({8: 1.0})
