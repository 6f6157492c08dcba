"""Whether MuJoCo can draw without a display: one small picture, drawn in a process of its own.

MuJoCo binds its GL library when it is imported and a broken driver may abort the process, so asking in this one would
decide it for good. EGL (libegl1, libegl-mesa0) is tried before OSMesa (libosmesa6); both draw at the same speed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass

RENDER_BACKENDS = {
    "egl": "apt-get install -y libegl1 libegl-mesa0 libgl1",
    "osmesa": "apt-get install -y libosmesa6 libgl1",
}
"""MuJoCo's offscreen backends and the Debian packages each needs."""

_SCRIPT = """
import mujoco
model = mujoco.MjModel.from_xml_string(
    '<mujoco><worldbody><light pos="0 0 3"/><geom size=".5" rgba="1 0 0 1"/></worldbody></mujoco>')
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 48, 64) as renderer:
    renderer.update_scene(data)
    picture = renderer.render()
assert picture[..., 0].max() > picture[..., 1].max(), "the picture is empty"
"""


@dataclass(frozen=True)
class RenderOutcome:
    """What came of drawing with one backend.

    Args:
        works: The picture shows what it should.
        value: In words.
    """

    works: bool
    value: str


def try_rendering(backend: str, timeout_s: float = 120.0) -> RenderOutcome:
    """Draws one picture with MuJoCo.

    Args:
        backend: A key of `RENDER_BACKENDS`.
        timeout_s: Longest wait.
    """
    environment = {**os.environ, "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
    with tempfile.TemporaryDirectory() as folder:  # MuJoCo leaves a log file where it works
        return _draw(environment, timeout_s, folder)


def _draw(environment: dict[str, str], timeout_s: float, folder: str) -> RenderOutcome:
    try:
        done = subprocess.run(  # noqa: S603  our own script in our own interpreter
            [sys.executable, "-c", _SCRIPT],
            check=False,
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return RenderOutcome(False, f"no picture within {timeout_s:.0f} s")
    if done.returncode == 0:
        return RenderOutcome(True, "drew a picture")
    lines = done.stderr.strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    last = (errors or lines or [f"the process ended with code {done.returncode}"])[-1]
    return RenderOutcome(False, last[:160])


def main() -> int:
    """Says which backend draws; the exit code is 1 when none does (`python -m lightning_embodied.cli.rendering`)."""
    for backend in RENDER_BACKENDS:
        outcome = try_rendering(backend)
        print(f"offscreen rendering with {backend}: {outcome.value}")
        if outcome.works:
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
