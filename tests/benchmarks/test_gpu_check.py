"""The GPU check's own logic, on the CPU and small: only what calls the GPU itself is left untried."""

import sys
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.filterwarnings("ignore:Profiler clears events")


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check

    yield gpu_check
    for name in (
        "gpu_check",
        "attention",
        "packing",
        "pi05_step",
        "pi05_dense",
        "fp8_steps",
        "timing",
        "robot_mixture",
    ):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_runs_whole_and_finds_the_backends_right(gpu_check, dtype, capsys):
    assert gpu_check.run("cpu", dtype, gpu_check.SMALL, scale=1) == []
    out = capsys.readouterr().out
    for title in ("fp64", "varlen_attention (cpu-flash", "pi0.5's blocks", "R suffixes", "given padding", "mixture",
                  "pi0.5: training step", "pi0.5: draws that share", "pi0.5: denoising", "FP8 training steps",
                  "quantised policy"):  # fmt: skip
        assert title in out
    assert "0 failures" in out


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_backends_of_this_gpu_are_right(gpu_check):
    assert gpu_check.check_backends("cuda", (torch.float32, torch.bfloat16), 10, time.monotonic() + 300) == []


def test_it_finds_a_backend_that_is_wrong(gpu_check, monkeypatch):
    backends = gpu_check.attention_backends()
    (right,) = (backend for backend in backends if backend.name == "padded-sdpa")

    def leaking(query, key, *rest):
        return right.kernel(query, key, *rest) + 1e-3 * key.mean()

    wrong = [type(right)(**{**vars(b), "kernel": leaking}) if b is right else b for b in backends]
    monkeypatch.setattr("lightning_embodied.attention.backends._backends", tuple(wrong))
    failed = gpu_check.check_backends("cpu", (torch.float32,), 1, stop=time.monotonic() + 100)
    assert failed
    assert all(line.startswith("padded-sdpa") for line in failed)


def test_it_times_a_backend_on_the_shapes_it_takes(gpu_check, monkeypatch):
    tried = []
    monkeypatch.setattr(
        gpu_check, "packed_against_padded", lambda bench, cases, name: tried.append((name, list(cases)))
    )
    for part in ("pi05_blocks", "shared_prefixes", "train_steps", "training", "shared_prefix", "denoising"):
        monkeypatch.setattr(gpu_check, part, lambda *_, **__: None)  # the whole has been run above
    narrow = [type(b)(**{**vars(b), "largest_head": 128}) for b in gpu_check.attention_backends()]
    monkeypatch.setattr(gpu_check, "attention_backends", lambda: narrow)
    gpu_check.time_all(gpu_check.Bench(seconds=0.0), gpu_check.SMALL, stop=time.monotonic() + 100)
    assert [name for name, _ in tried] == ["cpu-flash", "padded-sdpa"]
    assert all(len(cases) == 2 and not any("256" in case for case in cases) for _, cases in tried)


def test_time_that_is_up_is_a_failure(gpu_check):
    timings = gpu_check.time_all(gpu_check.Bench(seconds=0.0), gpu_check.SMALL, stop=0.0)
    checks = gpu_check.check_backends("cpu", (torch.float32,), 1, stop=0.0)
    for failed in (timings, checks):
        assert failed
        assert all("time is up" in line for line in failed)


def test_without_a_gpu_it_says_so_and_succeeds(gpu_check, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main() == 0
    assert capsys.readouterr().out == "skipped: this check needs a CUDA device\n"
