"""Writes a policy as the checkpoint directory that LeRobot's `from_pretrained` reads.

LeRobot insists on the two language heads that nothing reads, so they are written: PaliGemma's is its token embedding,
the expert's is zero.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from lightning_embodied.models.directory import write_directory
from lightning_embodied.models.lora import merged_state_dict
from lightning_embodied.models.pi.config_json import config_of
from lightning_embodied.models.pi.directory import EMBEDDING, EXPERT_HEAD, PREFIX, TIED_HEAD
from lightning_embodied.models.spec import PolicySpec

if TYPE_CHECKING:
    from lightning_embodied.models.pi.policy import PiPolicy


def save_directory(policy: PiPolicy, path: str | PathLike[str], spec: PolicySpec | None) -> None:
    """Writes `config.json` and `model.safetensors`; see `PiPolicy.save_pretrained`.

    Args:
        policy: Its weights, sizes and scalings are written.
        path: The directory.
        spec: What `config.json` says of features and horizon, if it is known.
    """
    sizes = policy.network_sizes
    tensors = merged_state_dict(policy.model)
    tensors[TIED_HEAD] = tensors[EMBEDDING].clone()
    tensors[EXPERT_HEAD] = tensors[EMBEDDING].new_zeros(sizes.vocab_size, sizes.expert.width)
    scalings = policy.state_normalization, policy.action_normalization
    config = config_of(policy.lerobot_type, sizes, policy.denoising_steps, spec, scalings)
    write_directory(path, {PREFIX + name: tensor for name, tensor in tensors.items()}, config)
