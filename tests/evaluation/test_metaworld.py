"""Meta-World in closed loop: the same episodes in processes and in line, and videos of what happened."""

from dataclasses import replace

import av
import pytest
import torch

from lightning_embodied.errors import ConfigError
from lightning_embodied.evaluation import EvaluationConfig, evaluate

pytestmark = pytest.mark.sim
CONFIG = EvaluationConfig(
    tasks=("button-press-topdown-v3", "drawer-open-v3"),
    episodes_per_task=2,
    policies=("checkpoint", "expert"),
    execute_steps=8,
    horizon=120,
    image_size=48,
)


class StandsStill:
    def predict_action_chunk(self, observations):
        assert observations["observation.images.workspace"].shape[1:] == (3, 48, 48)
        return torch.zeros(len(observations["task"]), 8, 4)


@pytest.mark.slow
def test_experts_succeed_and_processes_change_nothing(tmp_path):
    apart = evaluate(StandsStill(), replace(CONFIG, slots=3), output_dir=tmp_path)
    assert apart.success_rate("expert").rate == 1.0
    assert apart.success_rate("checkpoint").rate == 0.0
    assert apart.distinct_initial_states == 4
    in_line = evaluate(StandsStill(), replace(CONFIG, slots=2, asynchronous=False, policies=("expert",)))
    assert in_line.episodes == apart.select("expert")
    with av.open(str(tmp_path / apart.videos["drawer-open-v3"])) as container:
        assert len(list(container.decode(video=0))) == 1 + 120 // 8


@pytest.mark.parametrize(
    ("change", "closest"),
    [({"tasks": ("drawer-opne-v3",)}, "drawer-open-v3"), ({"cameras": ("corner9",)}, "corner")],
)
def test_unknown_names_are_answered_with_the_closest(change, closest):
    with pytest.raises(ConfigError, match=closest):
        evaluate(StandsStill(), replace(CONFIG, **change))
