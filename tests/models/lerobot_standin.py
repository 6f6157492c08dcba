"""LeRobot's documented interface (0.6) with two tiny policies, to put where `import lerobot` finds it.

`tests/crosscheck/lerobot_policies.py` runs the same module on LeRobot itself.
"""

import json
import sys
from collections import deque
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_model, save_model
from torch import nn


class FeatureType(StrEnum):
    STATE, VISUAL, ENV, ACTION = "STATE", "VISUAL", "ENV", "ACTION"


class NormalizationMode(StrEnum):
    MIN_MAX, MEAN_STD, IDENTITY = "MIN_MAX", "MEAN_STD", "IDENTITY"


@dataclass
class PolicyFeature:
    type: FeatureType
    shape: tuple[int, ...]


@dataclass
class AdamWPreset:
    lr: float
    grad_clip_norm: float

    def build(self, params):
        return torch.optim.AdamW(params, lr=self.lr)


class WarmupPreset:
    def build(self, optimizer, num_training_steps):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (num_training_steps + 1))


@dataclass
class PreTrainedConfig:
    n_obs_steps: int = 1
    input_features: dict | None = field(default_factory=dict)
    output_features: dict | None = field(default_factory=dict)
    device: str | None = None
    pretrained_path: str | None = None
    normalization_mapping: dict = field(
        default_factory=lambda: {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MIN_MAX"}
    )

    def __post_init__(self):
        self.device = self.device or "cpu"
        for features in (self.input_features, self.output_features):
            for key, value in features.items():
                if isinstance(value, dict):
                    features[key] = PolicyFeature(FeatureType(value["type"]), tuple(value["shape"]))

    @classmethod
    def get_known_choices(cls):
        return {"chunk": ChunkConfig, "history": HistoryConfig}

    @property
    def type(self):
        return next(name for name, choice in self.get_known_choices().items() if choice is type(self))

    def save_pretrained(self, directory):
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "config.json").write_text(json.dumps({"type": self.type, **asdict(self)}))

    @classmethod
    def from_pretrained(cls, directory):
        values = json.loads((Path(directory) / "config.json").read_text())
        choice = cls.get_known_choices()[values.pop("type")]
        if unknown := set(values) - {entry.name for entry in fields(choice)}:
            raise ValueError(f"The fields {sorted(unknown)} are not valid for {choice.__name__}")
        return choice(**values)

    reward_delta_indices = None


@dataclass
class ChunkConfig(PreTrainedConfig):
    """Like ACT's: one observation, two groups of parameters."""

    chunk_size: int = 6
    n_action_steps: int = 4
    width: int = 8
    observation_delta_indices = None

    @property
    def action_delta_indices(self):
        return list(range(self.chunk_size))

    def get_optimizer_preset(self):
        return AdamWPreset(lr=1e-2, grad_clip_norm=0.05)

    def get_scheduler_preset(self):
        return None


@dataclass
class HistoryConfig(ChunkConfig):
    """Like diffusion's: several observations, actions from the first of them on, a schedule."""

    n_obs_steps: int = 2

    @property
    def observation_delta_indices(self):
        return list(range(1 - self.n_obs_steps, 1))

    @property
    def action_delta_indices(self):
        return list(range(1 - self.n_obs_steps, 1 - self.n_obs_steps + self.chunk_size))

    def get_scheduler_preset(self):
        return WarmupPreset()


class ChunkPolicy(nn.Module):
    def __init__(self, config, **kwargs):
        super().__init__()
        assert isinstance(config, PreTrainedConfig)
        self.config = config
        self.state_key = "observation.state"
        self.cameras = [k for k, v in config.input_features.items() if v.type is FeatureType.VISUAL]
        (self.action,) = config.output_features.values()
        inputs = config.n_obs_steps * (config.input_features[self.state_key].shape[0] + 3 * len(self.cameras))
        self.backbone = nn.Linear(inputs, config.width)
        self.head = nn.Linear(config.width, config.chunk_size * self.action.shape[0])
        self.reset()

    def get_optim_params(self):
        return [{"params": list(self.head.parameters())}, {"params": list(self.backbone.parameters()), "lr": 1e-4}]

    def reset(self):
        self._queue = deque(maxlen=self.config.n_action_steps)
        self._seen = deque(maxlen=self.config.n_obs_steps)

    def _chunk(self, batch):
        parts = [batch[self.state_key].flatten(1)]
        parts += [batch[key].mean((-2, -1)).flatten(1) for key in self.cameras]
        hidden = self.backbone(torch.cat(parts, 1)).tanh()
        return self.head(hidden).unflatten(1, (self.config.chunk_size, -1))

    def forward(self, batch):
        error = (self._chunk(batch) - batch["action"]).abs() * ~batch["action_is_pad"][..., None]
        loss = error.mean()
        return loss, {"l1_loss": loss.item(), "loss": loss.item(), "note": "text is not logged"}

    @torch.no_grad()
    def select_action(self, batch):
        self.eval()
        batch = {key: batch[key] for key in (self.state_key, *self.cameras)}
        while len(self._seen) < self.config.n_obs_steps - 1:
            self._seen.append(batch)
        self._seen.append(batch)
        if not self._queue:
            steps = list(self._seen)
            if self.config.n_obs_steps > 1:
                batch = {key: torch.stack([step[key] for step in steps], 1) for key in batch}
            first = self.config.n_obs_steps - 1
            chunk = self._chunk(batch)[:, first : first + self.config.n_action_steps]
            self._queue.extend((chunk + 1e-3 * torch.randn_like(chunk)).transpose(0, 1))
        return self._queue.popleft()

    def save_pretrained(self, directory):
        self.config.save_pretrained(directory)
        save_model(self, str(Path(directory) / "model.safetensors"))

    @classmethod
    def from_pretrained(cls, directory, *, config=None):
        policy = cls(config or PreTrainedConfig.from_pretrained(directory))
        load_model(policy, str(Path(directory) / "model.safetensors"))
        return policy.eval()


class Processor:
    def __init__(self, config, stats, name):
        self.config, self.stats, self.name, self.device = config, stats, name, config.device

    def scale(self, key, feature):
        mode = NormalizationMode(self.config.normalization_mapping[feature.type.value])
        if mode is NormalizationMode.MEAN_STD:
            return self.stats[key]["mean"], self.stats[key]["std"] + 1e-8
        low, high = self.stats[key]["min"], self.stats[key]["max"]
        return (low + high) / 2, (high - low) / 2 + 1e-8

    def save_pretrained(self, directory):
        (Path(directory) / f"policy_{self.name}.json").write_text("{}")


class Preprocessor(Processor):
    def __call__(self, batch):
        features = {**self.config.input_features, **self.config.output_features}
        out = {key: value.to(self.device) if torch.is_tensor(value) else value for key, value in batch.items()}
        for key in features.keys() & batch.keys():
            assert out[key].dtype != torch.uint8, key
            centre, width = self.scale(key, features[key])
            out[key] = (out[key] - centre) / width
        return out


class Postprocessor(Processor):
    def __call__(self, action):
        centre, width = self.scale("action", self.config.output_features["action"])
        return action.cpu() * width + centre


def make_pre_post_processors(policy_cfg, pretrained_path=None, *, dataset_stats=None):
    return (
        Preprocessor(policy_cfg, dataset_stats, "preprocessor"),
        Postprocessor(policy_cfg, dataset_stats, "postprocessor"),
    )


def install(monkeypatch):
    """Makes `import lerobot` find this."""
    modules = {
        "lerobot": {},
        "lerobot.configs": {},
        "lerobot.configs.types": {"FeatureType": FeatureType, "PolicyFeature": PolicyFeature},
        "lerobot.configs.policies": {"PreTrainedConfig": PreTrainedConfig},
        "lerobot.policies": {},
        "lerobot.policies.factory": {
            "get_policy_class": lambda name: ChunkPolicy,
            "make_pre_post_processors": make_pre_post_processors,
        },
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
