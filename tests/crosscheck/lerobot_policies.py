"""LeRobot's own ACT, diffusion and a tiny SmolVLA train under Lightning exactly as under LeRobot.

Not part of the test suite: run by `make crosscheck` in an environment with LeRobot and this package. Needs no hub: the
tiny SmolVLA's configuration and tokenizer are written to a directory first.

    python tests/crosscheck/lerobot_policies.py DIRECTORY
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from lightning_embodied.data import LeRobotDataModule, LeRobotDatasetWriter
from lightning_embodied.features import Feature
from lightning_embodied.models import LeRobotPolicyModule, load_policy

CAMERA = "observation.images.top"
TASKS = ("pick the block", "open the drawer")
STEPS = 3
TOKENS = ("<pad>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "\n")


def record(root: Path) -> None:
    """Writes a small dataset of pictures, states and actions."""
    features = {
        CAMERA: Feature("image", (96, 96, 3), ["height", "width", "channels"]),
        "observation.state": Feature("float32", (6,)),
        "action": Feature("float32", (6,)),
    }
    random = np.random.default_rng(0)
    with LeRobotDatasetWriter(root, fps=10, features=features) as writer:
        for episode in range(3):
            for _ in range(24):
                frame = {
                    CAMERA: random.integers(0, 256, (96, 96, 3), dtype=np.uint8),
                    "observation.state": random.normal(size=6).astype(np.float32),
                    "action": random.normal(size=6).astype(np.float32),
                    "task": TASKS[episode % 2],
                }
                writer.add_frame(frame)
            writer.save_episode()


def write_tiny_smolvlm(root: Path) -> str:
    """A SmolVLM of two layers: configuration, tokenizer and processor as LeRobot reads them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
    from transformers.models.smolvlm import SmolVLMVideoProcessor

    words = {word: index for index, word in enumerate([*TOKENS, *sorted(set(" ".join(TASKS).split()))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
        extra_special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    )
    heads = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    SmolVLMConfig(
        text_config={"model_type": "llama", **heads, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
                     "pad_token_id": 0},
        vision_config={**heads, "image_size": 64, "patch_size": 16},
        scale_factor=2,
        image_token_id=2,
        pad_token_id=0,
    ).save_pretrained(root)  # fmt: skip
    SmolVLMProcessor(
        SmolVLMImageProcessor(), fast, SmolVLMVideoProcessor(), chat_template="{{ messages }}"
    ).save_pretrained(root)
    return str(root)


def policies(directory: Path) -> dict[str, dict[str, Any]]:
    """Options of each policy, small and without downloads."""
    return {
        "act": {"chunk_size": 8, "n_action_steps": 5, "dim_model": 32, "n_heads": 2, "dim_feedforward": 64,
                "pretrained_backbone_weights": None, "dropout": 0.0},
        "diffusion": {"horizon": 16, "n_action_steps": 4, "down_dims": [32, 64], "n_groups": 4,
                      "pretrained_backbone_weights": None, "use_group_norm": True, "num_inference_steps": 2,
                      "crop_is_random": False},
        "smolvla": {"chunk_size": 8, "n_action_steps": 5, "vlm_model_name": write_tiny_smolvlm(directory / "smolvlm"),
                    "load_vlm_weights": False, "num_vlm_layers": 2, "resize_imgs_with_padding": [64, 64],
                    "freeze_vision_encoder": False, "train_expert_only": False, "num_steps": 2},
    }  # fmt: skip


class Keep(Callback):
    """The batches, and the policy before its first step."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.start: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Copies what the step is given; the random state belongs to it."""
        if self.start is None:
            self.start = copy.deepcopy(pl_module.policy)
        self.batches.append(copy.deepcopy(batch))
        torch.manual_seed(batch_idx)


def train_as_lerobot(start: Any, module: LeRobotPolicyModule, batches: list[dict[str, Any]]) -> Any:
    """The body of `lerobot_train.py`: pictures to floats, preprocessor, forward, backward, clip, step, schedule."""
    from lerobot.policies.factory import make_pre_post_processors

    from lightning_embodied.models.lerobot_policy import _dataset_stats

    policy, config = start.train(), module.lerobot_config
    preprocessor, _ = make_pre_post_processors(config, dataset_stats=_dataset_stats(module.spec))
    preset = config.get_optimizer_preset()
    optimizer = preset.build(policy.get_optim_params())
    schedule = config.get_scheduler_preset()
    scheduler = None if schedule is None else schedule.build(optimizer, STEPS)
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        batch[CAMERA] = batch[CAMERA].to(torch.float32) / 255.0
        loss, _ = policy.forward(preprocessor(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), preset.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return policy


def check(policy_type: str, options: dict[str, Any], directory: Path) -> None:
    """Trains both ways from the same weights on the same batches, and acts from checkpoint and saved policy."""
    keep = Keep()
    data = LeRobotDataModule(str(directory / "dataset"), batch_size=4, val_episodes=1)
    trainer = Trainer(
        accelerator="cpu", max_steps=STEPS, limit_val_batches=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[keep], num_sanity_val_steps=0,
    )  # fmt: skip
    module = LeRobotPolicyModule(policy_type, options)
    trainer.fit(module, datamodule=data)
    own = train_as_lerobot(keep.start, module, keep.batches)
    for (name, ours), theirs in zip(module.policy.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{policy_type} {name}: {text}")
    last = (slice(None), -1) if module.lerobot_config.observation_delta_indices else slice(None)
    seen = {k: v if k == "task" else v[last] for k, v in keep.batches[0].items() if k in module.observation_keys}
    seen[CAMERA] = (seen[CAMERA] * 255).round().to(torch.uint8) if seen[CAMERA].is_floating_point() else seen[CAMERA]
    trainer.save_checkpoint(directory / f"{policy_type}.ckpt")
    module.save_pretrained(directory / policy_type)
    saved = LeRobotPolicyModule(pretrained_path=str(directory / policy_type))
    saved.spec = module.spec
    saved.configure_model()
    chunks = []
    for policy in (module, load_policy(directory / f"{policy_type}.ckpt"), saved):
        torch.manual_seed(0)
        chunks.append(policy.eval().predict_action_chunk(seen))
    assert chunks[0].shape == (4, module.lerobot_config.n_action_steps, 6), chunks[0].shape
    for chunk in chunks[1:]:
        torch.testing.assert_close(chunk, chunks[0])
    print(f"{policy_type}: {STEPS} steps, weights and actions as LeRobot's")


def main() -> None:
    """Checks every policy."""
    directory = Path(sys.argv[1])
    record(directory / "dataset")
    for policy_type, options in policies(directory).items():
        check(policy_type, options, directory)


if __name__ == "__main__":
    main()
