"""The memory of a step, against what torch's allocator held on real ranks."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from lightning_embodied.errors import ConfigError
from lightning_embodied.planning import ACCELERATORS, Sharding, profile_step

from . import real_run

GPU = ACCELERATORS["h200"]


def imagined(sharding, precision="32-true", network=real_run.Network, batch=real_run.BATCH, **options):
    def step(module, execution):
        return module(execution.empty(batch, real_run.TOKENS, 24)).square().mean()

    with torch.device("meta"):
        module = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP2 warns of units that return views
        return profile_step(module, step, sharding, GPU, precision=precision, **options)


@pytest.fixture(scope="module")
def real_peaks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(Path(real_run.__file__))]
    ranks = [
        subprocess.Popen([*command, str(rank), str(directory)], stderr=subprocess.PIPE, text=True) for rank in range(4)
    ]
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), errors[0][-3000:]
    return json.loads((directory / "peaks.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", real_run.CASES)
def test_the_predicted_peak_is_within_5_percent_of_a_real_run(real_peaks, case):
    sharding, precision = real_run.CASES[case]
    assert imagined(sharding, precision).memory.peak == pytest.approx(real_peaks[case], rel=0.05)


def test_shares_are_those_of_the_model():
    whole = imagined(Sharding("ddp", 8))
    size = 4 * whole.parameters
    assert whole.memory.parameters == whole.memory.gradients == size
    assert whole.memory.optimizer == pytest.approx(2 * size, rel=1e-3)
    assert whole.state_bytes == pytest.approx(3 * size, rel=1e-3)
    sharded = imagined(Sharding("fsdp", 64, 64, ("Block",)))
    assert sharded.memory.parameters == pytest.approx(size / 64, rel=0.05)
    assert sharded.state_bytes == pytest.approx(whole.state_bytes, rel=0.01)
    assert sharded.flops == whole.flops


def test_a_thousand_ranks_shard_what_fsdp_can_and_hsdp_shards_within_its_group():
    flat = imagined(Sharding("fsdp", 1024, 1024, ("Block",)), batch=1).memory
    hybrid = imagined(Sharding("hsdp", 1024, 8, ("Block",)), batch=1).memory
    eight = imagined(Sharding("fsdp", 8, 8, ("Block",)), batch=1).memory
    assert hybrid == eight
    assert flat.parameters < hybrid.parameters / 16
    # 128 rows over 1,024 ranks are gathered with 896 rows of padding
    assert flat.activations > 1.5 * hybrid.activations


def test_units_bound_what_is_gathered_at_once():
    gathered = [imagined(Sharding("fsdp", 64, 64, units)).memory.activations for units in (("Block",), ())]
    assert gathered[0] < gathered[1]


def test_autocast_alone_keeps_whole_copies_in_half_precision_and_param_dtype_does_not():
    plain, cast = (
        imagined(Sharding("fsdp", 1024, 1024, ("Block",), dtype), "bf16-mixed", batch=1).memory.activations
        for dtype in (None, torch.bfloat16)
    )
    assert plain > 1.5 * cast


def test_gradients_that_accumulate_are_there_from_the_beginning():
    once, twice = (imagined(Sharding("ddp", 1), accumulate=count, batch=64).memory for count in (1, 2))
    assert twice.peak == pytest.approx(once.peak + once.gradients, rel=0.05)


def test_whole_half_precision_halves_what_is_held():
    full, half = (imagined(Sharding("ddp", 2), precision).memory for precision in ("32-true", "bf16-true"))
    assert half.parameters * 2 == full.parameters


class ReachingNetwork(real_run.Network):
    """Uses a layer of a block from outside, as a cache of keys and values does."""

    def forward(self, x):
        x = self.embed(x)
        x = x + self.blocks[0].out(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_blocks_that_are_reached_into_are_found_and_refused_as_units():
    assert imagined(Sharding("ddp", 2), network=ReachingNetwork).reached_into == {"Block"}
    assert imagined(Sharding("ddp", 2)).reached_into == set()
    with pytest.raises(ConfigError, match="reached into"):
        imagined(Sharding("fsdp", 2, 2, ("Block",)), network=ReachingNetwork)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fsdp", 8, 4), "shards do not fit"),
        (("hsdp", 8, 3), "shards do not fit"),
        (("fsdp", 8, 8, ("Layer",)), "Block"),
    ],
)
def test_shardings_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        imagined(Sharding(*arguments))


def test_unknown_precision_and_frozen_models_are_refused():
    with pytest.raises(ConfigError, match="precision"):
        imagined(Sharding("ddp", 1), "8-bit")
    with pytest.raises(ConfigError, match="trains"):
        imagined(Sharding("ddp", 1), network=lambda: real_run.Network().requires_grad_(False))
