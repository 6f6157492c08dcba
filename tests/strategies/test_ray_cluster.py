"""A cluster that was there before and knows nothing of the project; a driver that is killed, and one told to stop."""

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
        start_new_session=True,
    )
    told = (re.search(rf"[0-9.]+:{port}", line) for line in head.stdout)
    found = next((match for match in told if match), None)
    assert found, "ray start did not say where it listens"
    yield found[0]
    os.killpg(head.pid, signal.SIGKILL)  # asked to end, it takes half a minute
    head.wait()


@pytest.fixture
def drive(address, tmp_path):
    """Starts a driver, and waits for its first word of a step."""
    drivers = []

    def start(*workers):
        command = [sys.executable, "-m", "tests.strategies.driver", address, str(tmp_path), *map(str, workers)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        driver = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "RAY_AUTH_MODE": "disabled"}, **pipes)
        drivers.append(driver)
        return driver, next(line for line in driver.stdout if line.startswith("step "))

    yield start
    for driver in drivers:
        driver.kill()


def test_a_killed_driver_is_run_again_and_one_told_to_stop_saves(drive):
    driver, line = drive(1, 3)
    assert line == "step 1 ranks 2 seed 11\n"  # the code, the seed, and of one to three ranks as many as have room
    next(line for line in driver.stdout if line.startswith("step 8 "))
    driver.kill()
    driver.communicate()

    driver, line = drive(2)
    step = int(line.split()[1])
    assert step > 5
    assert step % 5 == 1  # after the last complete checkpoint
    driver.send_signal(signal.SIGTERM)
    _, errors = driver.communicate()
    assert driver.returncode == 75, errors[-3000:]
    saved = re.search(r"resume from (\S+stopped-step=\d+\.ckpt)", errors)
    assert saved, errors[-3000:]
    assert Path(saved[1]).is_file()
