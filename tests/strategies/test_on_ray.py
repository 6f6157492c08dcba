"""The parts of the Ray launcher that need no cluster."""

import socket
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI

from lightning_embodied.errors import ConfigError
from lightning_embodied.strategies import RankFailedError, RayDDPStrategy
from lightning_embodied.strategies.on_ray.board import BoardConfig, RunBoard
from lightning_embodied.strategies.on_ray.checkpoints import CheckpointLog
from lightning_embodied.strategies.on_ray.cluster import cluster_here, project_modules, staged_project
from lightning_embodied.strategies.on_ray.failures import FailureKind, RankFailure, classify, to_raise
from lightning_embodied.strategies.on_ray.halt import HaltPoint
from lightning_embodied.strategies.on_ray.options import worker_range
from lightning_embodied.strategies.on_ray.payload import forwarded_environment
from lightning_embodied.strategies.on_ray.ranks import Beginning, assign
from lightning_embodied.strategies.on_ray.results import merge_predictions
from tests.strategies.ray_models import Data, Regression


def failure(rank, kind, summary="it"):
    return RankFailure(rank, kind, summary, "node", 1)


def board(max_restarts=1, hang_timeout=60.0, world_size=2):
    it = RunBoard(BoardConfig(max_restarts, hang_timeout))
    it.begin(world_size)
    for rank in range(world_size):
        it.join(0, rank, 100 + rank, "id", "node")
    return it


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_ranks_count_up_on_each_node(nodes):
    places = assign(nodes, "host", 1, Beginning(0))
    assert [place.rank for place in places] == list(range(len(nodes)))
    for node in set(nodes):
        mine = [place for place, where in zip(places, nodes, strict=True) if where == node]
        assert [place.local_rank for place in mine] == list(range(len(mine)))
        assert {place.local_world_size for place in mine} == {len(mine)}
        assert len({place.node_rank for place in mine}) == 1
    assert {place.node_rank for place in places} == set(range(len(set(nodes))))


@given(st.permutations([failure(0, FailureKind.CONNECTION), failure(1, FailureKind.DIED), failure(2, FailureKind(0))]))
def test_the_cause_comes_first_whatever_the_order_of_arrival(failures):
    error = to_raise(list(failures), restarts=0)
    assert isinstance(error, RankFailedError)
    assert [each.rank for each in error.failures] == [2, 1, 0]
    assert str(error).startswith("rank 2 (node node, pid 1) failed: it")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.1]:17"),
            FailureKind.CONNECTION,
        ),
        (torch.distributed.DistBackendError("anything"), FailureKind.CONNECTION),
        (ConnectionResetError("Connection reset by peer"), FailureKind.CONNECTION),
        (ValueError("connection closed by peer"), FailureKind.EXCEPTION),
        (torch.OutOfMemoryError("CUDA out of memory"), FailureKind.EXCEPTION),
    ],
)
def test_broken_connections_are_told_from_errors(error, kind):
    assert classify(error) is kind


def test_an_error_about_input_is_raised_as_it_was(tmp_path):
    original = ConfigError("bad", where="key", mend="mend it")
    raised = to_raise([RankFailure.of(original, 3, 7)], restarts=0)
    assert isinstance(raised, ConfigError)
    assert str(raised) == str(original)
    assert "rank 3" in raised.__notes__[0]


def test_only_what_is_not_the_users_is_retried_and_not_for_ever():
    it = board(max_restarts=1)
    it.fail(0, failure(1, FailureKind.CONNECTION))
    assert it.may_restart({0: "killed"})
    assert {each.rank: each.kind for each in it.failures()} == {0: FailureKind.DIED, 1: FailureKind.CONNECTION}
    it.begin(2)
    assert not it.failures()
    assert not it.may_restart({0: "killed again"})
    users = board(max_restarts=5)
    users.fail(0, failure(0, FailureKind.CONNECTION))
    users.fail(0, failure(1, FailureKind.EXCEPTION))
    assert not users.may_restart({})


def test_word_from_an_earlier_attempt_is_not_heard():
    it = board()
    it.begin(2)
    it.fail(0, failure(0, FailureKind.EXCEPTION))
    it.finish(0, 0, b"old")
    it.join(0, 0, 1, "id", "node")
    assert not it.failures()
    assert not it.results()
    assert not it.workers()


def test_a_silent_rank_is_reported_once():
    it = board(hang_timeout=1e-9)
    assert [record.rank for record in it.news().hung] == [0, 1]
    assert not it.news().hung
    assert {each.kind for each in it.failures()} == {FailureKind.HUNG}
    left = board(hang_timeout=1e-9)
    left.leave(0, 0)
    assert [record.rank for record in left.news().hung] == [1]


def test_ranks_stop_only_when_all_have_been_told():
    it = board()
    assert it.halt_point(0, 0, batches=5) is None
    it.request_stop("why")
    it.request_stop("another")
    assert it.stop_reason() == "why"
    assert it.beat(0, 1, knows_stop=False)
    assert it.halt_point(0, 0, batches=6) is None
    it.beat(0, 1, knows_stop=True)
    assert it.halt_point(0, 1, batches=7) is None
    assert it.halt_point(0, 0, batches=7) == HaltPoint(9, resize=False)
    assert it.halt_point(0, 1, batches=8) == HaltPoint(9, resize=False)
    assert not it.may_restart({0: "killed"})


def test_another_number_of_ranks_goes_on_once_all_have_saved():
    it = board()
    assert not it.beat(0, 1, knows_stop=False)
    it.request_resize()
    assert it.beat(0, 1, knows_stop=False)
    it.beat(0, 1, knows_stop=True)
    assert it.halt_point(0, 0, batches=3) == HaltPoint(5, resize=True)
    it.finish(0, 1, b"", stopped=True)
    assert it.awaits_resize(1)
    assert not it.awaits_resize(0)
    assert not it.resizes()
    it.finish(0, 0, b"", stopped=True)
    assert it.resizes()
    it.begin(3)
    assert not it.resizes()
    assert not it.beat(1, 0, knows_stop=False)


@pytest.mark.parametrize("ends", ["finished", "told to stop"])
def test_a_run_that_ends_is_not_resized(ends):
    it = board()
    it.request_resize()
    for rank in range(2):
        it.finish(0, rank, b"", stopped=ends == "told to stop")
    if ends == "told to stop":
        it.request_stop("why")
    assert not it.resizes()
    assert not it.awaits_resize(0)


def test_resumes_from_the_last_checkpoint_that_is_whole(tmp_path):
    log = CheckpointLog()
    assert log.newest() is None
    for name, step in (("early.ckpt", 2), ("late.ckpt", 4)):
        (tmp_path / name).touch()
        log.add(str(tmp_path / name), step)
    torn = tmp_path / "torn.ckpt"
    torn.mkdir()
    log.add(str(torn), 9)
    assert log.newest() == (str(tmp_path / "late.ckpt"), 4)
    (torn / ".metadata").touch()
    assert log.newest() == (str(torn), 9)
    overwritten = tmp_path / "overwritten.ckpt"
    overwritten.mkdir()
    (overwritten / "COMMITTED").write_text('{"global_step": 7}')
    log.add(str(overwritten), 11)
    assert log.newest() == (str(torn), 9)
    log.discard(str(torn))
    assert log.newest() == (str(overwritten), 7)
    log.discard(str(overwritten))
    (tmp_path / "late.ckpt").unlink()
    assert log.newest() == (str(tmp_path / "early.ckpt"), 2)


def test_generators_are_kept_with_their_checkpoint_and_number_of_ranks():
    it = board()
    for step in (2, 4):
        for rank in (0, 1):
            it.keep_generators("last.ckpt", step, rank, b"%d of %d" % (rank, step))
        it.saved("last.ckpt", step)
    assert it.generators("last.ckpt", 4, rank=1) == b"1 of 4"
    assert it.generators("last.ckpt", 2, rank=1) is None
    it.begin(3)
    assert it.generators("last.ckpt", 4, rank=1) is None
    it.begin(2)
    it.removed("last.ckpt")
    assert it.generators("last.ckpt", 4, rank=1) is None


def test_predictions_come_in_the_order_they_were_dealt():
    assert merge_predictions([["a", "c", "e"], ["b", "d"]]) == ["a", "b", "c", "d", "e"]
    assert merge_predictions([[["a"], ["x"]], [["b"], ["y"]]]) == [["a", "b"], ["x", "y"]]
    assert merge_predictions([None, None]) is None


def test_the_environment_that_changes_results_travels():
    given_variables = {"PL_GLOBAL_SEED": "3", "NCCL_DEBUG": "INFO", "HF_HOME": "/here", "HOME": "/root"}
    assert forwarded_environment(given_variables) == {"PL_GLOBAL_SEED": "3", "NCCL_DEBUG": "INFO"}


def test_the_project_is_found_and_staged_whole():
    modules = project_modules()
    assert "lightning_embodied" in modules
    assert not {"torch", "lightning", "os", "pytest"} & set(modules)
    with staged_project() as directory:
        staged = Path(directory) / "lightning_embodied"
        assert (staged / "errors.py").is_file()
        assert (staged / "strategies" / "on_ray" / "board.py").is_file()
    assert not Path(directory).exists()


def test_a_note_of_a_cluster_that_is_gone_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert not cluster_here()
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert cluster_here()
    assert not cluster_here()


@pytest.mark.parametrize(
    ("given_workers", "expected"), [(None, (8, 8)), (3, (3, 3)), ([2, 4], (2, 4))], ids=["devices", "fixed", "elastic"]
)
def test_number_of_workers(given_workers, expected):
    assert worker_range(given_workers, 8) == expected


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"num_workers": 0}, "num_workers"),
        ({"num_workers": [3, 2]}, "num_workers"),
        ({"num_workers": [3]}, "num_workers"),
        ({"num_workers": [2, 3], "restart": "warm", "placement": "spread"}, "placement"),
        ({"num_workers": [2, 3], "resize_interval": 0.0}, "resize_interval"),
        ({"num_workers": 1, "hang_timeout": 0.0}, "hang_timeout"),
        ({"num_workers": 1, "max_restarts": -1}, "max_restarts"),
    ],
)
def test_bad_options_are_refused_when_the_trainer_is_built(options, key):
    with pytest.raises(ConfigError, match=key):
        Trainer(strategy=RayDDPStrategy(**options), accelerator="cpu", logger=False, enable_checkpointing=False)


def test_ranks_on_the_driver_are_those_planned():
    run = Trainer(strategy="ray_ddp", devices=4, accelerator="cpu", logger=False, enable_checkpointing=False)
    assert isinstance(run.strategy, RayDDPStrategy)
    assert (run.world_size, run.global_rank, run.is_global_zero) == (4, 0, True)
    assert run.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 0}


def test_the_board_needs_no_torch():
    import subprocess

    code = "import lightning_embodied.strategies.on_ray.board, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("RayDDPStrategy", {"num_workers": [2, 4], "bucket_cap_mb": 10, "static_graph": True, "timeout": "0:00:15"}),
        ("RayFSDPStrategy", {"num_workers": 4, "restart": "warm", "units": ["Linear"], "replicate": 2}),
        ("RayFSDPStrategy", {"num_workers": [1, 4], "restart": "warm", "resize_interval": 600}),
    ],
)
def test_all_options_are_plain_yaml(name, options):
    strategy = {"class_path": f"lightning_embodied.strategies.{name}", "init_args": options}
    trainer = {"accelerator": "cpu", "logger": False, "strategy": strategy}
    cli = LightningCLI(Regression, Data, run=False, args={"trainer": trainer}, save_config_callback=None)
    assert cli.trainer.world_size == 4
    assert type(cli.trainer.strategy).__name__ == name
