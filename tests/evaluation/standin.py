"""A point that walks to one of two corners: a robot environment small enough to run thousands of episodes."""

import gymnasium
import numpy as np
import torch

from lightning_embodied.errors import ConfigError
from lightning_embodied.features import Feature

GOALS = {"left": np.array([-1.0, -1.0]), "right": np.array([1.0, 1.0])}
NAME = "standin/Reach-v0"
ENV_ID = f"standin:{NAME}"  # gymnasium imports this module first, in worker processes too


class Expert:
    def __init__(self, env):
        self.env = env

    def act(self):
        return np.clip(self.env.goal - self.env.position, -0.2, 0.2).astype(np.float32)


class ReachEnv(gymnasium.Env):
    fps = 10
    robot_type = "point"

    def __init__(self, task="walk", image_size=16, cameras=("top",), forgetful=False, goals=2):
        if task not in ("walk", "stroll"):
            raise ConfigError("there is no such task", where="task", found=task, expected="walk, stroll")
        for camera in cameras:
            if camera != "top":
                raise ConfigError("there is no such camera", where="cameras", found=camera, expected="top")
        self.task, self.size, self.forgetful, self.goals = task, image_size, forgetful, goals
        box = gymnasium.spaces.Box
        self.observation_space = gymnasium.spaces.Dict(
            {
                "observation.images.top": box(0, 255, (image_size, image_size, 3), np.uint8),
                "observation.state": box(-np.inf, np.inf, (2,), np.float32),
            }
        )
        self.action_space = box(-0.2, 0.2, (2,), np.float32)
        self.features = {
            "observation.images.top": Feature("video", (image_size, image_size, 3)),
            "observation.state": Feature("float32", (2,)),
            "action": Feature("float32", (2,)),
        }

    @property
    def instruction(self):
        return f"{self.task} {self.side}"

    @property
    def other_instruction(self):
        if self.goals == 1:
            return None
        return f"{self.task} {'left' if self.side == 'right' else 'right'}"

    def expert(self):
        return Expert(self)

    def reset(self, *, seed=None, options=None):
        rng = np.random.default_rng(None if self.forgetful else [seed, len(self.task)])
        self.position, self.steps = rng.uniform(-0.6, 0.6, 2), 0
        self.side = ("left", "right")[int(rng.integers(2))]
        self.goal = GOALS[self.side]
        return self._observation(), {}

    def step(self, action):
        self.position, self.steps = self.position + np.clip(action, -0.2, 0.2), self.steps + 1
        success = bool(np.abs(self.position - self.goal).max() < 0.15)
        return self._observation(), 0.0, success, self.steps >= 40, {"success": success}

    def _observation(self):
        picture = np.zeros((self.size, self.size, 3), np.uint8)
        row, column = np.clip((self.position + 1.5) / 3 * self.size, 0, self.size - 1).astype(int)
        picture[row, column] = 255
        return {"observation.images.top": picture, "observation.state": self.position.astype(np.float32)}


class NoisyWalker:
    """Goes where it is told, with noise from the generators it is given."""

    horizon = 4

    def __init__(self, noise=0.25):
        self.noise, self.batch_sizes = noise, []

    def plan(self, observations):
        goals = [GOALS["right" if "right" in text else "left"] for text in observations["task"]]
        assert observations["observation.images.top"].dtype == torch.uint8
        assert observations["observation.images.top"].shape[1:] == (3, 16, 16)
        self.batch_sizes.append(len(goals))
        step = (torch.tensor(np.stack(goals), dtype=torch.float32) - observations["observation.state"]).clamp(-0.1, 0.1)
        return step[:, None].expand(-1, self.horizon, -1)

    def predict_action_chunk(self, observations, *, generator=None):
        chunk = self.plan(observations)
        return chunk + self.noise * torch.stack([torch.randn(chunk.shape[1:], generator=g) for g in generator])


class GlobalWalker(NoisyWalker):
    """The same with noise from torch's random state, as a policy of someone else's would."""

    def predict_action_chunk(self, observations):
        chunk = self.plan(observations)
        return chunk + self.noise * torch.randn(chunk.shape)


if NAME not in gymnasium.registry:
    gymnasium.register(NAME, entry_point=ReachEnv)
