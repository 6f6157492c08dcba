"""`make crosscheck` runs this where LeRobot is installed; elsewhere it is skipped."""

from __future__ import annotations

import pytest

from tests.crosscheck.lerobot_policies import check, policies, record

pytest.importorskip("lerobot")


@pytest.mark.parametrize("policy_type", ["act", "diffusion", "smolvla"])
def test_lerobots_policies_train_as_under_lerobot(tmp_path, policy_type):
    record(tmp_path / "dataset")
    check(policy_type, policies(tmp_path)[policy_type], tmp_path)
