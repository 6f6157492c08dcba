"""Tabletop in closed loop: a policy that follows language fails the scene's goal when it is told another one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_embodied.envs import TABLETOP_INSTRUCTIONS, TabletopEnv
from lightning_embodied.errors import ConfigError
from lightning_embodied.evaluation import EvaluationConfig, evaluate
from lightning_embodied.evaluation.report import give_verdict

TASKS = ("red-block-blue-pad", "green-block-white-pad")
CONFIG = EvaluationConfig(
    env_id="lightning_embodied/Tabletop-v0",
    tasks=TASKS,
    episodes_per_task=5,
    policies=("checkpoint", "swapped", "expert"),
    execute_steps=1,
    slots=4,
)


class Obedient:
    """The scripted expert as a policy: it reads positions from the observation and the goal from the instruction."""

    def predict_action_chunk(self, observations):
        rows = zip(
            observations["observation.environment_state"],
            observations["observation.state"],
            observations["task"],
            strict=True,
        )
        return torch.from_numpy(np.stack([self.act(*row) for row in rows]))[:, None]

    def act(self, places, state, instruction):
        env = TabletopEnv(image_size=16)
        env.reset(seed=0, options={"instruction": instruction})
        points = places.numpy().astype(np.float64).reshape(4, 2)
        env.blocks, env.pads, env.gripper = points[:2], points[2:], state[:2].numpy().astype(np.float64)
        distances = np.linalg.norm(env.blocks - env.gripper, axis=1)
        env.held = int(distances.argmin()) if state[2] > 0.5 else None
        return env.expert().act()


@pytest.fixture(scope="module")
def result():
    return evaluate(Obedient(), CONFIG)


def test_success_depends_on_the_instruction_alone(result):
    assert result.success_rate("expert").rate == 1.0
    assert result.success_rate("checkpoint").rate == 1.0
    assert result.success_rate("swapped").rate == 0.0
    right, wrong = result.select("checkpoint"), result.select("swapped")
    assert [row.initial_state for row in right] == [row.initial_state for row in wrong]
    assert {row.instruction for row in right} == {TABLETOP_INSTRUCTIONS[task] for task in TASKS}
    assert all(a.instruction != b.instruction for a, b in zip(right, wrong, strict=True))
    assert result.compare("checkpoint", "swapped").p_value == pytest.approx(2 / 2**10)
    assert any("another goal" in line and "0 of 10" in line for line in give_verdict(result).details)


def test_processes_and_slots_change_nothing(result):
    assert evaluate(Obedient(), replace(CONFIG, asynchronous=False, slots=3)).episodes == result.episodes


def test_unknown_tasks_are_answered_with_the_closest():
    with pytest.raises(ConfigError, match="red-block-blue-pad"):
        evaluate(Obedient(), replace(CONFIG, tasks=("red-block-blu-pad",)))
