"""Writes a policy as the checkpoint directory that LeRobot's `from_pretrained` reads.

LeRobot insists on the two language heads that nothing reads, so they are written: PaliGemma's is its token embedding,
the expert's is zero.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from lightning_embodied.models.pi.config_json import config_of
from lightning_embodied.models.pi.directory import CONFIG, EMBEDDING, EXPERT_HEAD, INDEX, PREFIX, TIED_HEAD, WEIGHTS
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
    directory, sizes = Path(path), policy.network_sizes
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in policy.model.state_dict().items()}
    tensors[TIED_HEAD] = tensors[EMBEDDING].clone()
    tensors[EXPERT_HEAD] = tensors[EMBEDDING].new_zeros(sizes.vocab_size, sizes.expert.width)
    scalings = policy.state_normalization, policy.action_normalization
    config = config_of(policy.lerobot_type, sizes, policy.denoising_steps, spec, scalings)
    unfinished = directory / f"{WEIGHTS}.unfinished"
    save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, unfinished, metadata={"format": "pt"})
    for name in (CONFIG, INDEX):  # a directory whose weights are being replaced does not open
        (directory / name).unlink(missing_ok=True)
    unfinished.replace(directory / WEIGHTS)
    (directory / CONFIG).write_text(json.dumps(config, indent=1) + "\n", "utf-8")
