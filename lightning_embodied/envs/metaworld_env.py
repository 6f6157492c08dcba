"""Meta-World's fifty tasks (simulated Sawyer arm, MuJoCo) with LeRobot's keys and seeds that mean what they say.

The package's own reset ignores its seed, draws from NumPy's global generator and returns object positions of the
draw before; here `reset(seed=n)` is a pure function of the task and `n`.
Source: https://github.com/Farama-Foundation/Metaworld (Yu et al., 2019).
"""

from __future__ import annotations

import copy
import difflib
import functools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from lightning_embodied.envs.embodied_env import Action, EmbodiedEnv, Observation, image_feature, observation_space
from lightning_embodied.envs.metaworld_tasks import METAWORLD_INSTRUCTIONS
from lightning_embodied.envs.opengl import import_mujoco, require_opengl
from lightning_embodied.envs.rendering import MAX_PICTURE_SIZE, GraphicsContext, graphics_context
from lightning_embodied.errors import ConfigError, import_extra
from lightning_embodied.features import Feature

if TYPE_CHECKING:
    from metaworld.sawyer_xyz_env import SawyerXYZEnv
    from mujoco import MjData, MjModel, MjvCamera

METAWORLD_CAMERAS = ("workspace", "behindGripper", "corner", "corner2", "corner3", "corner4", "gripperPOV", "topview")
"""Views on offer: `workspace` is ours (close, from the side, hand and object in view), the others the package's."""

_STATE_NAMES = ["hand_x", "hand_y", "hand_z", "gripper_opening"]
_POSE_NAMES = ["x", "y", "z", "qw", "qx", "qy", "qz"]
_ENVIRONMENT_NAMES = [
    *(f"object_{i}_{name}" for i in (0, 1) for name in _POSE_NAMES),
    *("goal_x", "goal_y", "goal_z"),
]


class MetaWorldEnv(EmbodiedEnv):
    """One task of Meta-World.

    Observation: `observation.images.<camera>` uint8 `[H, W, 3]`; `observation.state` float32 `[4]` (hand position in
    metres, gripper opening in [0, 1]); `observation.environment_state` float32 `[17]` (two object poses as position
    and quaternion, zero where a task has one object, and the goal position). Action: float32 `[4]` in [-1, 1], the
    change of the hand's position (1 is one centimetre) and the gripper (1 closes). 80 steps are one second.

    `reset(options={"task": name})` switches to another task.

    Args:
        task: Name of the task, such as `drawer-open-v3`.
        image_size: Width and height of the pictures in pixels.
        cameras: Views to render, of `METAWORLD_CAMERAS`; none needs no OpenGL.
        episode_length: Steps after which an episode is truncated, at most 500.
        terminate_on_success: Whether an episode ends at its first successful step.
        render_mode: `rgb_array` or None, for gymnasium's `render()`.
        render_size: Width and height of the picture `render()` returns, in pixels.

    Raises:
        ConfigError: An unknown task or camera, or a size that cannot work.
        MissingExtraError: Meta-World is not installed, or there is no OpenGL for the pictures asked for.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 80}  # noqa: RUF012
    fps = 80
    robot_type = "sawyer"
    task_names = tuple(METAWORLD_INSTRUCTIONS)

    def __init__(
        self,
        task: str = "reach-v3",
        *,
        image_size: int = 64,
        cameras: Sequence[str] = ("workspace",),
        episode_length: int = 300,
        terminate_on_success: bool = True,
        render_mode: str | None = None,
        render_size: int = 192,
    ) -> None:
        super().__init__(
            episode_length=episode_length, terminate_on_success=terminate_on_success, render_mode=render_mode
        )
        if episode_length > 500:
            raise ConfigError(
                "Meta-World's episodes have at most 500 steps", where="episode_length", found=episode_length
            )
        for name, size in (("image_size", image_size), ("render_size", render_size)):
            if not 8 <= size <= MAX_PICTURE_SIZE:
                raise ConfigError(
                    "pictures cannot have this size", where=name, found=size, expected=f"8 to {MAX_PICTURE_SIZE}"
                )
        for camera in cameras:
            _check_name(camera, METAWORLD_CAMERAS, "camera", "cameras")
        self._mujoco = import_mujoco()
        if cameras:
            require_opengl()
        self.image_size, self.cameras, self.render_size = image_size, tuple(cameras), render_size
        self._graphics: GraphicsContext | None = None
        self._observation: NDArray[np.float64] = np.zeros(39)
        self._task = ""
        self._select(task)
        self.observation_space = observation_space(self.features)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), dtype=np.float32)

    @property
    def task(self) -> str:
        """Name of the task."""
        return self._task

    @property
    def instruction(self) -> str:
        """The task in plain English."""
        return METAWORLD_INSTRUCTIONS[self._task]

    @property
    def features(self) -> dict[str, Feature]:
        """What a recorded frame holds."""
        return {
            **{f"observation.images.{camera}": image_feature(self.image_size) for camera in self.cameras},
            "observation.state": Feature("float32", (4,), _STATE_NAMES),
            "observation.environment_state": Feature("float32", (17,), _ENVIRONMENT_NAMES),
            "action": Feature("float32", (4,), ["delta_x", "delta_y", "delta_z", "gripper"]),
        }

    @property
    def simulator(self) -> SawyerXYZEnv:
        """The package's own environment, with MuJoCo's `model` and `data`."""
        simulator: SawyerXYZEnv = self._simulator
        return simulator

    @property
    def simulator_observation(self) -> NDArray[np.float64]:
        """The package's own observation `[39]`, goal included; what its experts read."""
        return self._observation

    def expert(self) -> MetaWorldExpert:
        """Meta-World's scripted policy for the task."""
        return MetaWorldExpert(self)

    def observe(self) -> Observation:
        """Renders the cameras and reads the state."""
        seen: Observation = {
            f"observation.images.{camera}": self.view(camera, self.image_size) for camera in self.cameras
        }
        seen["observation.state"] = self._observation[:4].astype(np.float32)
        seen["observation.environment_state"] = self._observation[[*range(4, 18), *range(36, 39)]].astype(np.float32)
        return seen

    def picture(self) -> NDArray[np.uint8]:
        """The first camera's view (`workspace` if there is none) at `render_size`."""
        return self.view((*self.cameras, "workspace")[0], self.render_size)

    def view(self, camera: str, size: int) -> NDArray[np.uint8]:
        """Renders one view.

        Args:
            camera: One of `METAWORLD_CAMERAS`.
            size: Width and height in pixels.

        Returns:
            `[size, size, 3]`, upright: what is higher in the world is higher in the picture.
        """
        simulator = self._simulator
        if self._graphics is None:
            self._graphics = graphics_context(simulator.model_name, simulator.model)
        picture = self._graphics.render(simulator.model, simulator.data, self._camera(camera), size)
        if camera != "workspace" and simulator.data.camera(camera).xmat[7] < -0.01:
            picture = picture[::-1, ::-1]  # the scene file mounts its four corner cameras upside down
        return np.ascontiguousarray(picture)

    def close(self) -> None:
        """Frees the graphics context, if no other environment uses it."""
        self._graphics = None

    def _start(self, seed: int, options: dict[str, Any]) -> None:
        if "task" in options:
            self._select(options["task"])
        simulator = self._simulator
        simulator.seed(seed)
        simulator.reset()
        # The package leaves object and goal positions of its first draw in `data`; this computes them anew.
        self._mujoco.mj_forward(simulator.model, simulator.data)
        now = simulator._get_curr_obs_combined_no_goal()
        simulator._prev_obs = now
        self._observation = np.concatenate([now, now, simulator._get_pos_goal()])

    def _apply(self, action: Action) -> tuple[float, bool]:
        self._observation, reward, _, _, info = self._simulator.step(action.astype(np.float64))
        return float(reward), bool(info["success"])

    def _state_bytes(self) -> bytes:
        simulator = self._simulator
        parts = (simulator.data.qpos, simulator.data.qvel, simulator.model.body_pos, self._observation)
        return b"".join(np.ascontiguousarray(part).tobytes() for part in parts)

    def _select(self, task: str) -> None:
        if task == self._task:
            return
        _check_name(task, METAWORLD_INSTRUCTIONS, "task", "task")
        simulator = _simulator_class(task)()
        simulator._partially_observable = False
        del simulator.sawyer_observation_space  # a cached property: it must be computed anew with the goal in it
        simulator._set_task_called = True
        simulator._freeze_rand_vec = False
        simulator.seeded_rand_vec = True
        self._simulator, self._task, self._graphics = simulator, task, None

    def _camera(self, name: str) -> MjvCamera:
        mujoco = self._mujoco
        camera = mujoco.MjvCamera()
        if name == "workspace":
            camera.type = mujoco.mjtCamera.mjCAMERA_FREE
            camera.lookat[:] = (0.0, 0.7, 0.1)
            camera.azimuth, camera.elevation, camera.distance = 150.0, -35.0, 1.15
        else:
            camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
            camera.fixedcamid = self._simulator.model.camera(name).id
        return camera


class MetaWorldExpert:
    """Meta-World's scripted policy for the task an environment is set to.

    Args:
        env: The environment; its simulator's state is read at every action.
    """

    def __init__(self, env: MetaWorldEnv) -> None:
        self._env = env
        self._policy = import_extra("metaworld.policies", "sim").ENV_POLICY_MAP[env.task]()

    def act(self) -> Action:
        """The action `[4]` for the present state, clipped to [-1, 1]."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the policies warn whenever their gain saturates, which is most steps
            action = self._policy.get_action(self._env.simulator_observation)
        clipped: Action = np.clip(action, -1.0, 1.0).astype(np.float32)
        return clipped


@functools.cache
def _simulator_class(task: str) -> type[SawyerXYZEnv]:
    """The package's class of a task, with the scene file compiled once a process instead of once an environment."""
    mujoco = import_mujoco()
    compiled: dict[str, MjModel] = {}

    def initialize_simulation(self: SawyerXYZEnv) -> tuple[MjModel, MjData]:
        if self.fullpath not in compiled:
            compiled[self.fullpath] = mujoco.MjModel.from_xml_path(self.fullpath)
        model = copy.copy(compiled[self.fullpath])  # resets move bodies in it
        return model, mujoco.MjData(model)

    base = import_extra("metaworld.env_dict", "sim").ALL_V3_ENVIRONMENTS[task]
    return type(base.__name__, (base,), {"_initialize_simulation": initialize_simulation})


def _check_name(name: str, valid: Sequence[str] | dict[str, str], what: str, where: str) -> None:
    if name not in valid:
        close = difflib.get_close_matches(str(name), list(valid), n=3, cutoff=0.4) or sorted(valid)[:3]
        raise ConfigError(
            f"unknown {what} {name!r}", where=where, found=name, expected=f"one of {len(valid)}, such as {close}"
        )
