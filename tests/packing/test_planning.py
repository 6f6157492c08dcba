"""Planners, rank balance and PackedBatchSampler: every sample once, within budget, equal steps, exact resume."""

from __future__ import annotations

import random

import lightning
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_embodied.errors import CheckpointError, ConfigError, DatasetError
from lightning_embodied.packing import PackedBatchSampler, balance_packs, padding_share, plan_packs

BUDGET = 64
PLANNERS = ("first-fit-decreasing", "best-fit-window", "padded", "length-grouped")
LENGTHS = st.lists(st.integers(1, BUDGET), min_size=1, max_size=120)


def mixture(number, seed=0):
    """Token counts of five robot datasets: one to six pictures, an instruction, state and actions."""
    choose = random.Random(seed)  # noqa: S311
    kinds = [(64,), (128, 256, 256, 288), (256,), (256, 512, 512, 768), (768, 1024, 1024, 1024, 1024, 1536)]
    weights = [15, 25, 25, 25, 10]
    return [
        choose.choice(kind) + choose.randint(4, 21) + 17 for kind in choose.choices(kinds, weights=weights, k=number)
    ]


def flat(packs):
    return [position for pack in packs for position in pack]


@settings(deadline=None)
@given(lengths=LENGTHS, planner=st.sampled_from(PLANNERS), window=st.integers(1, 70))
def test_every_sample_once_within_the_budget_and_repeatable(lengths, planner, window):
    packs = plan_packs(lengths, BUDGET, planner, window=window)
    assert sorted(flat(packs)) == list(range(len(lengths)))
    assert all(pack for pack in packs)
    assert max(sum(lengths[i] for i in pack) for pack in packs) <= BUDGET
    if planner in ("padded", "length-grouped"):
        assert max(max(lengths[i] for i in pack) * len(pack) for pack in packs) <= BUDGET
    assert packs == plan_packs(lengths, BUDGET, planner, window=window)


@given(lengths=LENGTHS)
def test_first_fit_decreasing_is_the_textbook_algorithm(lengths):
    bins, expected = [], []
    for position in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        index = next((i for i, free in enumerate(bins) if free >= lengths[position]), len(bins))
        if index == len(bins):
            bins.append(BUDGET)
            expected.append([])
        bins[index] -= lengths[position]
        expected[index].append(position)
    assert plan_packs(lengths, BUDGET, "first-fit-decreasing") == expected


@given(lengths=LENGTHS, window=st.integers(1, 20))
def test_the_window_bounds_how_far_ahead_a_pack_reaches(lengths, window):
    seen: set[int] = set()
    for pack in plan_packs(lengths, BUDGET, "best-fit-window", window=window):
        oldest = min(set(range(len(lengths))) - seen)
        assert pack[0] == oldest
        for position in pack:
            waiting_before = len(set(range(position)) - seen)
            assert waiting_before < window
            seen.add(position)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(
    ("lengths", "fewest"),
    [([BUDGET // 2] * 40, 20), ([BUDGET] * 7, 7), ([1] * 640, 10), ([BUDGET] + [1] * 64, 2), ([33] * 9, 9)],
    ids=["all equal", "all full", "all tiny", "one giant", "just over half"],
)
def test_worst_cases_need_the_fewest_packs(planner, lengths, fewest):
    assert len(plan_packs(lengths, BUDGET, planner)) == fewest


def test_padding_on_a_robot_mixture():
    lengths = mixture(8000)
    packs = {planner: plan_packs(lengths, 4096, planner) for planner in PLANNERS}
    share = {planner: padding_share(lengths, packs[planner], 4096) for planner in PLANNERS}
    assert share["first-fit-decreasing"] <= 0.01
    assert share["best-fit-window"] <= 0.012
    assert share["padded"] > 0.4
    assert padding_share([], [], 10) == 0.0


@settings(deadline=None)
@given(lengths=LENGTHS, replicas=st.integers(1, 9))
def test_ranks_take_equal_steps_and_lose_nothing(lengths, replicas):
    packs = plan_packs(lengths, BUDGET)
    try:
        steps = balance_packs(lengths, packs, replicas)
    except DatasetError:
        assert len(lengths) < -(-len(packs) // replicas) * replicas
        return
    assert all(len(step) == replicas and all(step) for step in steps)
    assert sorted(i for step in steps for pack in step for i in pack) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in pack) for step in steps for pack in step) <= BUDGET
    assert len(steps) == -(-len(packs) // replicas)


def test_ranks_cost_nearly_the_same():
    lengths, quadratic, ranks = mixture(8000), 1e-3, 8

    def excess(steps):
        costs = [[sum(lengths[i] + quadratic * lengths[i] ** 2 for i in pack) for pack in step] for step in steps]
        return sum(max(step) * len(step) / sum(step) - 1 for step in costs) / len(costs)

    packs = plan_packs(lengths, 4096)
    unbalanced = [packs[i : i + ranks] for i in range(0, len(packs) - ranks + 1, ranks)]
    balanced = excess(balance_packs(lengths, packs, ranks, quadratic_cost=quadratic))
    assert balanced < 0.04 < 4 * balanced < excess(unbalanced)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, BUDGET), min_size=60, max_size=120),
    worlds=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    planner=st.sampled_from(PLANNERS),
    data=st.data(),
)
def test_a_run_resumed_on_any_number_of_ranks_sees_the_rest_exactly_once(lengths, worlds, planner, data):
    state, seen = None, []
    for number, world in enumerate(worlds):
        ranks = [
            PackedBatchSampler(lengths, BUDGET, planner=planner, num_replicas=world, rank=rank, seed=3)
            for rank in range(world)
        ]
        for sampler in ranks:
            sampler.set_epoch(5)
            if state is not None:
                sampler.load_state_dict(state)
        steps = list(zip(*ranks, strict=True))
        last = number == len(worlds) - 1
        taken = len(steps) if last else data.draw(st.integers(0, min(3, len(steps))), label="steps")
        seen += [index for step in steps[:taken] for pack in step for index in pack]
        assert len(ranks[0]) == sum(entry[1] for entry in (state or {"taken": []})["taken"]) + len(steps)
        state = ranks[0].state_dict(taken)
    assert sorted(seen) == list(range(len(lengths)))


def test_resuming_on_as_many_ranks_gives_the_very_same_packs():
    lengths = mixture(500)
    whole = list(PackedBatchSampler(lengths, 2048, num_replicas=2, rank=1))
    sampler = PackedBatchSampler(lengths, 2048, num_replicas=2, rank=1)
    state = sampler.state_dict(7)
    again = PackedBatchSampler(lengths, 2048, num_replicas=2, rank=1)
    again.load_state_dict(state)
    assert list(again) == whole[7:]
    state = again.state_dict(2)
    again.load_state_dict(state)
    assert list(again) == whole[9:]


def test_epochs_differ_and_another_order_can_be_given():
    lengths = mixture(300)
    sampler = PackedBatchSampler(lengths, 2048)
    first = list(sampler)
    assert first == list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    ordered = PackedBatchSampler([10] * 12, 40, order=lambda epoch: range(12))
    assert list(ordered) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_sample_over_the_budget_is_named_or_dropped_and_counted():
    lengths = [5, 70, 6, 90]
    with pytest.raises(DatasetError, match="sample 1 and 1 more"):
        PackedBatchSampler(lengths, BUDGET)
    sampler = PackedBatchSampler(lengths, BUDGET, over_budget="drop")
    assert sampler.dropped == (1, 3)
    assert sorted(flat(sampler)) == [0, 2]


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError, match="no such planner"):
        plan_packs([1], 4, "best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="window"):
        plan_packs([1], 4, window=0)
    with pytest.raises(ConfigError, match="no such rank"):
        PackedBatchSampler([1], 4, num_replicas=2, rank=2)
    with pytest.raises(DatasetError, match="too few samples"):
        list(PackedBatchSampler([1], 4, num_replicas=2, rank=0))
    with pytest.raises(CheckpointError, match="another dataset"):
        PackedBatchSampler([1], 4).load_state_dict(PackedBatchSampler([1, 1], 4).state_dict(0))


class Recorder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.epochs: dict[int, list[list[int]]] = {}

    def training_step(self, batch, _):
        self.epochs.setdefault(self.current_epoch, []).append(batch.tolist())
        return (self.weight * batch.float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_lightning_sets_the_epoch():
    sampler = PackedBatchSampler([10] * 20, 40)
    module = Recorder()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.arange(20), batch_sampler=sampler))  # type: ignore[arg-type]
    sampler.set_epoch(0)
    assert module.epochs[0] == list(sampler)
    sampler.set_epoch(1)
    assert module.epochs[1] == list(sampler)
