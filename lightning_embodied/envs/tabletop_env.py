"""A tabletop seen from above, in NumPy alone: coloured blocks, coloured pads, and an instruction that decides the goal.

The scene is a function of the seed only, so that the same picture with another instruction asks for another motion: a
policy that ignores language can succeed in one of four. No simulator, no OpenGL; made for tests and small machines,
after the language-table idea (Lynch et al., 2022, https://arxiv.org/abs/2210.06407).
"""

from __future__ import annotations

import difflib
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from lightning_embodied.envs.embodied_env import Action, EmbodiedEnv, Observation, image_feature, observation_space
from lightning_embodied.envs.tabletop_drawing import draw_scene
from lightning_embodied.errors import ConfigError
from lightning_embodied.features import Feature

BLOCKS = ("red", "green")
PADS = ("blue", "white")
TABLETOP_INSTRUCTIONS: dict[str, str] = {
    f"{block}-block-{pad}-pad": f"put the {block} block on the {pad} pad" for block in BLOCKS for pad in PADS
}
"""Instruction of each task, by the task's name."""

_TASKS = tuple(TABLETOP_INSTRUCTIONS)
_STEP = 0.08
_GRASP_RADIUS = 0.08
_PAD_TOLERANCE = 0.08
_ARRIVED = 0.05
_GRID = 4  # the table's cells in each direction; the row nearest to the viewer is the blocks'
_BLOCK_CELLS = np.array(((1, 0), (2, 0)))
_JITTER = 0.03


class TabletopEnv(EmbodiedEnv):
    """Pick one of two blocks and put it on one of two pads.

    The table is the unit square, x to the right, y away from the viewer. Each block starts near its own place in front;
    the pads lie anywhere behind, blue in the left half, so that only the picture tells where they are.

    Observation: `observation.images.top` uint8 `[H, W, 3]`; `observation.state` float32 `[3]` (gripper x, y; 1 while it
    holds a block); and `observation.environment_state` float32 `[8]` (x, y of the blocks, then of the pads). Action:
    float32 `[3]` in [-1, 1]: the gripper's motion (1 is 0.08), and the gripper (above 0 closes, and grips a block
    within 0.08). Done when the instructed block lies, released, within 0.08 of the centre of the instructed pad.

    `reset(options={"task": name})` or `options={"instruction": sentence}` gives the scene of the seed another goal.

    Args:
        task: One of `TABLETOP_INSTRUCTIONS`; None draws it with the scene.
        image_size: Width and height of the picture in pixels.
        episode_length: Steps after which an episode is truncated.
        terminate_on_success: Whether an episode ends at its first successful step.
        render_mode: `rgb_array` or None, for gymnasium's `render()`.
        render_size: Width and height of the picture `render()` returns, in pixels.

    Raises:
        ConfigError: An unknown task or a size that cannot work.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    fps = 10
    robot_type = "tabletop"
    task_names = _TASKS

    def __init__(
        self,
        task: str | None = None,
        *,
        image_size: int = 64,
        episode_length: int = 40,
        terminate_on_success: bool = True,
        render_mode: str | None = None,
        render_size: int = 192,
    ) -> None:
        super().__init__(
            episode_length=episode_length, terminate_on_success=terminate_on_success, render_mode=render_mode
        )
        for name, size in (("image_size", image_size), ("render_size", render_size)):
            if not 16 <= size <= 1024:
                raise ConfigError("pictures cannot have this size", where=name, found=size, expected="16 to 1024")
        self._fixed_task = None if task is None else _known(task, _TASKS, "task")
        self._goal = 0 if task is None else _TASKS.index(task)
        self.image_size, self.render_size = image_size, render_size
        self.observation_space = observation_space(self.features)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), dtype=np.float32)
        self._start(0, {})

    @property
    def task(self) -> str:
        """Name of the task of this episode."""
        return _TASKS[self._goal]

    @property
    def instruction(self) -> str:
        """The task in plain English."""
        return TABLETOP_INSTRUCTIONS[self.task]

    @property
    def other_instruction(self) -> str:
        """An instruction with another block and another pad, which the same scene allows as well."""
        return TABLETOP_INSTRUCTIONS[f"{BLOCKS[1 - self.goal_block]}-block-{PADS[1 - self.goal_pad]}-pad"]

    @property
    def features(self) -> dict[str, Feature]:
        """What a recorded frame holds."""
        places = [
            f"{name}_{axis}" for name in (*(f"{b}_block" for b in BLOCKS), *(f"{p}_pad" for p in PADS)) for axis in "xy"
        ]
        return {
            "observation.images.top": image_feature(self.image_size),
            "observation.state": Feature("float32", (3,), ["gripper_x", "gripper_y", "holding"]),
            "observation.environment_state": Feature("float32", (8,), places),
            "action": Feature("float32", (3,), ["delta_x", "delta_y", "gripper"]),
        }

    @property
    def goal_block(self) -> int:
        """Index in `BLOCKS` of the block the instruction names."""
        return self._goal // len(PADS)

    @property
    def goal_pad(self) -> int:
        """Index in `PADS` of the pad the instruction names."""
        return self._goal % len(PADS)

    def expert(self) -> TabletopExpert:
        """The scripted controller."""
        return TabletopExpert(self)

    def observe(self) -> Observation:
        """Draws the table and reads the state."""
        state = np.array([*self.gripper, self.held is not None], dtype=np.float32)
        places = np.concatenate([self.blocks, self.pads]).astype(np.float32).reshape(-1)
        return {
            "observation.images.top": self._draw(self.image_size),
            "observation.state": state,
            "observation.environment_state": places,
        }

    def picture(self) -> NDArray[np.uint8]:
        """The table at `render_size`."""
        return self._draw(self.render_size)

    def _draw(self, size: int) -> NDArray[np.uint8]:
        return draw_scene(size, self.pads, self.blocks, self.gripper, closed=self.closed)

    def _start(self, seed: int, options: dict[str, Any]) -> None:
        random = np.random.default_rng(seed)
        self.blocks, self.pads = _places(random)
        self.gripper = random.uniform(0.3, 0.7, size=2)
        self.closed = False
        self.held: int | None = None
        drawn = int(random.integers(len(_TASKS)))  # drawn in every case: the scene must not depend on the task
        if "instruction" in options:
            sentences = list(TABLETOP_INSTRUCTIONS.values())
            self._goal = sentences.index(_known(options["instruction"], sentences, "instruction"))
        elif "task" in options:
            self._goal = _TASKS.index(_known(options["task"], _TASKS, "task"))
        else:
            self._goal = drawn if self._fixed_task is None else _TASKS.index(self._fixed_task)

    def _apply(self, action: Action) -> tuple[float, bool]:
        self.gripper = np.clip(self.gripper + _STEP * action[:2].astype(np.float64), 0.0, 1.0)
        self.closed = bool(action[2] > 0)
        if not self.closed:
            self.held = None
        elif self.held is None:
            distances = np.linalg.norm(self.blocks - self.gripper, axis=1)
            nearest = int(distances.argmin())
            self.held = nearest if distances[nearest] <= _GRASP_RADIUS else None
        if self.held is not None:
            self.blocks[self.held] = self.gripper
        distance = float(np.linalg.norm(self.blocks[self.goal_block] - self.pads[self.goal_pad]))
        success = self.held is None and distance <= _PAD_TOLERANCE
        return float(success), success

    def _state_bytes(self) -> bytes:
        return np.concatenate([self.blocks.ravel(), self.pads.ravel(), self.gripper]).tobytes()


class TabletopExpert:
    """Goes to the instructed block, closes, carries it to the instructed pad, opens.

    Args:
        env: The environment; its positions are read at every action.
    """

    def __init__(self, env: TabletopEnv) -> None:
        self._env = env

    def act(self) -> Action:
        """The action `[3]` for the present state."""
        env = self._env
        carrying = env.held == env.goal_block
        target = env.pads[env.goal_pad] if carrying else env.blocks[env.goal_block]
        error = target - env.gripper
        distance = float(np.linalg.norm(error))
        # Proportional near the target, so that a cloned policy sees no jump; full speed further away.
        motion = error / _STEP * min(0.7, _STEP / max(distance, 1e-9))
        arrived = distance < _ARRIVED
        closing = arrived != carrying
        return np.array([*motion, 1.0 if closing else -1.0], dtype=np.float32)


def _places(random: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draws where the blocks `[2, 2]` and the pads `[2, 2]` lie: near the centres of cells, no two in one cell."""
    columns = random.integers([0, _GRID // 2], [_GRID // 2, _GRID])  # the blue pad in the left half
    pad_cells = np.stack([columns, random.integers(1, _GRID, size=len(PADS))], axis=1)
    cells = np.concatenate([_BLOCK_CELLS, pad_cells])
    places = (cells + 0.5) / _GRID + random.uniform(-_JITTER, _JITTER, size=cells.shape)
    return places[: len(BLOCKS)], places[len(BLOCKS) :]


def _known(name: str, valid: tuple[str, ...] | list[str], what: str) -> str:
    if name not in valid:
        close = difflib.get_close_matches(str(name), valid, n=3, cutoff=0.0)
        raise ConfigError(f"unknown {what} {name!r}", where=what, found=name, expected=f"such as {close}")
    return name
