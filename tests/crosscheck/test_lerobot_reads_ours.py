"""`make crosscheck` runs this where LeRobot is installed; elsewhere it is skipped."""

from __future__ import annotations

import pytest

from tests.crosscheck.lerobot_reads_ours import compare, write

pytest.importorskip("lerobot")


def test_lerobot_reads_what_we_write(tmp_path):
    write(tmp_path)
    compare(tmp_path)
