"""The shipped `tabletop` chain, whole: demonstrations, training, and right against swapped instruction."""

import json

import pytest

from lightning_embodied.cli import main


@pytest.mark.slow
def test_the_shipped_policy_follows_language(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = ["--checkpoint", "runs/tabletop"]
    assert main(["collect", "--config", "configs/collect_tabletop.yaml"]) == 0
    assert main(["fit", "--config", "configs/tabletop.yaml", "--wandb=disabled", "--trainer.accelerator=cpu"]) == 0
    assert main(["evaluate", *run, "--config", "configs/evaluate_tabletop.yaml", "--videos=false"]) == 0
    result = json.loads((tmp_path / "runs/tabletop/evaluation/results.json").read_text())
    right, swapped = (
        next(row for row in result["summary"] if row["policy"] == policy and row["task"] is None)
        for policy in ("checkpoint", "swapped")
    )
    assert right["episodes"] == swapped["episodes"] == 60
    assert right["success_rate"] > 0.5  # one who ignores the instruction does the right thing in one of four at best
    assert right["wilson_95"][0] > swapped["wilson_95"][1]
