"""A cluster that was there before and knows nothing of the project, and a driver that is told to stop."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    bare = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    head = subprocess.Popen(
        [Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=2"],
        cwd="/",
        env={**bare, "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"},
        stdout=subprocess.PIPE,
        text=True,
    )
    told = (re.search(rf"[0-9.]+:{port}", line) for line in head.stdout)
    found = next((match for match in told if match), None)
    assert found, "ray start did not say where it listens"
    yield found[0]
    head.terminate()
    head.wait()


def test_code_and_seed_reach_it_and_sigterm_to_the_driver_saves(address, tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.strategies.driver", address, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in driver.stdout:
        if line.startswith("step 3 "):
            break
    assert line == "step 3 ranks 2 seed 11\n"  # of one to three, the two that there is room for
    driver.send_signal(signal.SIGTERM)
    _, errors = driver.communicate()
    assert driver.returncode == 75, errors[-3000:]
    saved = re.search(r"resume from (\S+stopped-step=\d+\.ckpt)", errors)
    assert saved, errors[-3000:]
    assert Path(saved[1]).is_file()
