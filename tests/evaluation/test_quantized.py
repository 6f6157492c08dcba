"""A quantised policy in closed loop: before and after from the same initial states, and evaluated like a checkpoint."""

import json
from dataclasses import replace

import pytest
import standin
import yaml

from lightning_embodied.cli import main
from lightning_embodied.evaluation import EvaluationResult, evaluate, mcnemar_exact
from tests.evaluation.test_checkpoint import CONFIG, policy_for, save_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = save_run(tmp_path_factory.mktemp("run"), policy_for(standin.ReachEnv().features))
    evaluate(folder, replace(CONFIG, policies=("checkpoint",), episodes_per_task=3, horizon=30))
    return folder


def test_success_before_and_after_with_the_exact_test(run, tmp_path, capsys):
    out = tmp_path / "robot"
    assert main(["quantize", "--checkpoint", str(run), "--out", str(out), "--safe_defaults=false"]) == 0
    text = capsys.readouterr().out
    assert "actions were not compared: the run has no configuration" in text
    assert "exact McNemar p = " in " ".join(text.split())
    loop = json.loads((out / "report.json").read_text())["closed_loop"]
    assert [row["episodes"] for row in loop["summary"]] == [3, 3, 6, 3, 3, 6]
    assert sum(loop[case] for case in ("both", "only_first", "only_second", "neither")) == 6
    assert loop["mcnemar_p"] == mcnemar_exact(loop["only_first"], loop["only_second"])
    before = EvaluationResult.load(run / "evaluation" / "results.json")
    assert loop["summary"][2]["successes"] == before.success_rate("checkpoint").successes

    after = evaluate(out, replace(CONFIG, policies=("checkpoint",), episodes_per_task=3, horizon=30))
    assert after.success_rate("checkpoint").successes == loop["summary"][5]["successes"]
    assert EvaluationResult.load(out / "evaluation" / "results.json") == after
    assert after.checkpoint["path"].endswith("manifest.json")


def test_another_evaluation_may_be_asked_for(run, tmp_path, capsys):
    path = tmp_path / "evaluation.yaml"
    settings = {"env_id": standin.ENV_ID, "tasks": ["walk"], "horizon": 8, "slots": 1, "asynchronous": False}
    path.write_text(yaml.safe_dump({**settings, "dataset": str(tmp_path / "gone")}))
    options = ["--evaluation", str(path), "--episodes_per_task=2"]
    assert main(["quantize", "--checkpoint", str(run), "--out", str(tmp_path / "robot"), *options]) == 0
    assert "starts are not checked to be unseen" in capsys.readouterr().out
    loop = json.loads((tmp_path / "robot" / "report.json").read_text())["closed_loop"]
    assert [row["task"] for row in loop["summary"]] == ["walk", None, "walk", None]
    assert [row["episodes"] for row in loop["summary"]] == [2, 2, 2, 2]
