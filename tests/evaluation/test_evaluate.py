"""Closed loop: the result is a function of the seeds alone, starts are the same for all, nothing finished is lost."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import standin
import torch

from lightning_embodied.errors import ConfigError
from lightning_embodied.evaluation import EvaluationConfig, EvaluationResult, evaluate, success_table
from lightning_embodied.evaluation.actors import chunk_seed
from lightning_embodied.evaluation.report import give_verdict
from lightning_embodied.evaluation.result import write_atomically

CONFIG = EvaluationConfig(
    env_id=standin.ENV_ID,
    tasks=("walk", "stroll"),
    episodes_per_task=7,
    first_seed=500,
    policies=("checkpoint", "expert"),
    execute_steps=3,
    asynchronous=False,
)


@pytest.fixture(scope="module")
def reference():
    return evaluate(standin.NoisyWalker(), replace(CONFIG, slots=1))


@pytest.mark.parametrize("slots", [2, 5, 14, 50])
@pytest.mark.parametrize("batched", [False, True])
def test_results_do_not_depend_on_the_slots(reference, slots, batched):
    result = evaluate(standin.NoisyWalker(), replace(CONFIG, slots=slots, batched=batched))
    assert result.episodes == reference.episodes
    assert 0 < result.success_rate("checkpoint").rate <= 1
    assert len({row.steps for row in result.select("checkpoint")}) > 3  # episodes finished out of step


def test_processes_give_the_same_as_one_process(reference):
    result = evaluate(standin.NoisyWalker(), replace(CONFIG, slots=3, asynchronous=True))
    assert result.episodes == reference.episodes


def test_a_policy_that_uses_the_global_random_state_is_reproducible_and_leaves_it_alone(reference):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = evaluate(standin.GlobalWalker(), replace(CONFIG, slots=2))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert evaluate(standin.GlobalWalker(), replace(CONFIG, slots=9, batched=True)).episodes == first.episodes


def test_another_seed_samples_other_noise(reference):
    other = evaluate(standin.NoisyWalker(), replace(CONFIG, seed=1))
    assert [row.initial_state for row in other.episodes] == [row.initial_state for row in reference.episodes]
    assert [row.steps for row in other.episodes] != [row.steps for row in reference.episodes]


def test_inference_is_batched_unless_rows_are_to_be_independent():
    walker = standin.NoisyWalker()
    evaluate(walker, replace(CONFIG, slots=5, policies=("checkpoint",)))
    assert max(walker.batch_sizes) == 5
    walker = standin.NoisyWalker()
    evaluate(walker, replace(CONFIG, slots=5, batched=False, policies=("checkpoint",)))
    assert set(walker.batch_sizes) == {1}


def test_seeds_of_inferences_differ():
    seeds = {chunk_seed(s, task, e, c) for s in range(3) for task in "ab" for e in range(20) for c in range(20)}
    assert len(seeds) == 3 * 2 * 20 * 20


def test_all_policies_start_from_the_same_distinct_states(reference):
    starts = {
        policy: [(row.task, row.seed, row.initial_state) for row in reference.select(policy)]
        for policy in ("checkpoint", "expert")
    }
    assert starts["checkpoint"] == starts["expert"]
    assert reference.distinct_initial_states == 14
    assert [row.seed for row in reference.select("expert", "walk")] == list(range(500, 507))
    assert reference.success_rate("expert").rate == 1.0


def test_a_policy_that_listens_fails_when_told_another_goal():
    config = replace(CONFIG, policies=("checkpoint", "swapped"))
    result = evaluate(standin.NoisyWalker(noise=0.0), config)
    assert result.success_rate("checkpoint").rate == 1.0
    assert result.success_rate("swapped").rate == 0.0
    told = {row.instruction for row in result.select("swapped")}
    assert told <= {"walk left", "walk right", "stroll left", "stroll right"}
    pairs = zip(result.select("checkpoint"), result.select("swapped"), strict=True)
    assert all(a.instruction != b.instruction and a.initial_state == b.initial_state for a, b in pairs)
    assert result.compare("checkpoint", "swapped").p_value < 0.001


def test_the_horizon_counts_as_failure():
    result = evaluate(standin.NoisyWalker(), replace(CONFIG, horizon=2, policies=("checkpoint",)))
    assert {(row.success, row.steps) for row in result.episodes} == {(False, 2)}
    assert result.steps_to_success("checkpoint") is None


def test_an_environment_that_forgets_its_seed_is_refused():
    with pytest.raises(ConfigError, match="does not repeat its initial state"):
        evaluate(standin.NoisyWalker(), replace(CONFIG, env_kwargs={"forgetful": True}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ("wlak",)}, "no such task"),
        ({"policies": ("checkpoint", "swapped"), "env_kwargs": {"goals": 1}}, "no other goal"),
        ({"env_id": "standin/Raech-v0"}, "no such environment"),
        ({"env_kwargs": {"imagesize": 3}}, "refuses its options"),
    ],
)
def test_what_cannot_be_evaluated_is_said_before_anything_runs(change, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        evaluate(standin.NoisyWalker(), replace(CONFIG, **change), output_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"slots": 0}, {"tasks": ()}, {"tasks": ("a", "a")}, {"episodes_per_task": -1}])
def test_impossible_options_are_refused(change):
    with pytest.raises(ConfigError):
        replace(CONFIG, **change)


def test_output_directory_holds_results_and_the_first_episodes_videos(tmp_path):
    result = evaluate(standin.NoisyWalker(), CONFIG, output_dir=tmp_path, progress=True)
    assert EvaluationResult.load(tmp_path / "results.json") == result
    assert result.videos == {"walk": "videos/walk.mp4", "stroll": "videos/stroll.mp4"}
    first = result.select("checkpoint", "walk")[0]
    with av.open(str(tmp_path / "videos" / "walk.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 1 + -(-first.steps // 3)  # the start, and one a chunk
    assert np.ptp(frames[0]) > 128
    value = json.loads((tmp_path / "results.json").read_text())
    assert value["schema_version"] == 1
    assert value["complete"] is True
    assert value["versions"]["torch"] == importlib.metadata.version("torch")
    assert {row["task"] for row in value["summary"]} == {"walk", "stroll", None}
    assert success_table(result).row_count == 3


def test_the_checkpoint_is_the_subject_whoever_ran_first(tmp_path):
    config = replace(CONFIG, policies=("expert", "checkpoint"))
    result = evaluate(standin.NoisyWalker(noise=0.0), replace(config, horizon=2), output_dir=tmp_path)
    assert result.subject == "checkpoint"
    assert [(pair.first, pair.second) for pair in result.comparisons()] == [("checkpoint", "expert")]
    with av.open(str(tmp_path / "videos" / "walk.mp4")) as container:
        assert len(list(container.decode(video=0))) == 2
    verdict = give_verdict(result)
    assert verdict.tone == "bad"
    assert verdict.headline == "This policy probably cannot do the job: 0% success."


def test_results_are_replaced_whole_or_not_at_all(tmp_path):
    path = write_atomically(tmp_path / "results.json", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


INTERRUPTED = """
import sys
from dataclasses import replace
from lightning_embodied.evaluation import EvaluationInterrupted, evaluate
import standin
from test_evaluate import CONFIG

class Walker(standin.NoisyWalker):
    def predict_action_chunk(self, observations, *, generator=None):
        if len(self.batch_sizes) == 60:
            print("walking", flush=True)
            sys.stdin.read()  # until the test has sent Ctrl-C
        return super().predict_action_chunk(observations, generator=generator)

try:
    evaluate(Walker(), replace(CONFIG, slots=2, asynchronous=True), output_dir=sys.argv[1])
except EvaluationInterrupted as stop:
    print(len(stop.result.episodes))
    sys.exit(130)
"""


def test_ctrl_c_keeps_finished_episodes(tmp_path, reference):
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "walking\n"
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group, workers included
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    result = EvaluationResult.load(tmp_path / "results.json")
    assert not result.complete
    assert result.planned_episodes == 28
    assert 0 < len(result.episodes) == int(out) < 28
    done = {(row.policy, row.task, row.seed): row for row in reference.episodes}
    assert all(done[row.policy, row.task, row.seed] == row for row in result.episodes)
