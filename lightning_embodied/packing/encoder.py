"""Turns one sample of a robot dataset into tokens, the same way in training and on the robot.

The order is PaliGemma's in pi0: the image tokens of each camera that is there, then the instruction, then one token
for the state. An absent camera has no tokens at all, where openpi and LeRobot carry it along as masked zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from lightning_embodied.errors import ConfigError, DatasetError
from lightning_embodied.packing.batch import PackedBatch
from lightning_embodied.packing.images import resize_with_pad
from lightning_embodied.packing.pack import EncodedSample, pack_samples

Sample = Mapping[str, Any]
"""One sample: LeRobot's keys to tensors, strings and ints (see `SampleEncoder.encode`)."""

_CAMERA_PREFIX = "observation.image"
_REMEMBERED_INSTRUCTIONS = 4096


class SampleEncoder:
    """Encodes samples as image, instruction and state tokens.

    The placeholders of image and state tokens have ids above the tokenizer's, so `vocab_size` counts them too. An
    encoder is plain values (`to_config`) and travels in a policy's checkpoint, its tokenizer included.

    Args:
        tokenizer: Path of a `tokenizers` JSON file. Default: the byte-level BPE shipped with this package, which
            encodes any string.
        image_size: Height and width that pictures are brought to (aspect kept, padded), in pixels.
        patch_size: Side of one square image patch in pixels; one patch is one token.
        state_keys: Keys concatenated into the state, in this order; empty for a policy without state.
        action_key: Key of the action chunk.
        max_instruction_tokens: Longest instruction allowed, in tokens; a longer one is an error, never cut.

    Raises:
        ConfigError: The tokenizer cannot be read, or the image size is not a multiple of the patch size.
    """

    def __init__(
        self,
        *,
        tokenizer: str | None = None,
        image_size: tuple[int, int] = (64, 64),
        patch_size: int = 16,
        state_keys: Sequence[str] = ("observation.state",),
        action_key: str = "action",
        max_instruction_tokens: int = 48,
    ) -> None:
        self.image_size = (int(image_size[0]), int(image_size[1]))
        self.patch_size = patch_size
        self.state_keys = tuple(state_keys)
        self.action_key = action_key
        self.max_instruction_tokens = max_instruction_tokens
        if patch_size < 1 or min(self.image_size) < 1 or any(side % patch_size for side in self.image_size):
            raise ConfigError(
                "pictures do not divide into patches",
                where="SampleEncoder: image_size, patch_size",
                found=f"{self.image_size[0]} x {self.image_size[1]} pixels, patches of {patch_size}",
                expected="height and width that are multiples of the patch size",
            )
        self._use_tokenizer(_read_tokenizer(tokenizer))

    def _use_tokenizer(self, text: str) -> None:
        self._tokenizer_json = text
        self._tokenizer = Tokenizer.from_str(text)
        self._instructions: dict[str, list[int]] = {}

    @property
    def image_token_id(self) -> int:
        """Placeholder id of an image token."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def state_token_id(self) -> int:
        """Placeholder id of the state token."""
        return self.image_token_id + 1

    @property
    def vocab_size(self) -> int:
        """Number of ids: the tokenizer's and the two placeholders."""
        return self.image_token_id + 2

    @property
    def tokens_per_image(self) -> int:
        """Number of tokens of one picture."""
        return (self.image_size[0] // self.patch_size) * (self.image_size[1] // self.patch_size)

    def encode(self, sample: Sample) -> EncodedSample:
        """Encodes a training sample.

        Args:
            sample: `observation.images.<camera>` uint8 `[C, H, W]` for the cameras it has, every state key and the
                action key float32 (`[D]` and `[H, A]`), `task` str; `action_is_pad` bool `[H]` and the ints
                `dataset`, `episode_index`, `frame_index` if known.

        Raises:
            DatasetError: A required key is missing, or a value has a wrong dtype or shape; names the sample.
        """
        actions = _floats(sample, self.action_key, 2)
        is_pad = sample.get(f"{self.action_key}_is_pad")
        if is_pad is None:
            is_pad = torch.zeros(actions.shape[0], dtype=torch.bool)
        elif is_pad.dtype != torch.bool or is_pad.shape != actions.shape[:1]:
            raise _unusable(sample, f"{self.action_key}_is_pad", _describe(is_pad), f"bool [{actions.shape[0]}]")
        return self._encode(sample, actions, is_pad)

    def encode_observations(self, observations: Mapping[str, Tensor | Sequence[str]]) -> PackedBatch:
        """Encodes what a robot sees, token for token as `encode` does in training.

        Args:
            observations: `observation.images.<camera>` uint8 `[B, C, H, W]`, state keys `[B, D]`, `task` list of
                `B` strings; other keys are ignored.

        Returns:
            A batch on the CPU whose `actions` are `[B, 0, 0]`.

        Raises:
            DatasetError: As `encode`; the frame is the row of the batch.
        """
        names = [*_cameras(observations), *self.state_keys]
        tasks = observations.get("task")
        if tasks is None:
            raise _unusable({}, "task", "nothing", "a list of B instructions")
        columns = {name: torch.as_tensor(observations[name]) for name in names if name in observations}
        none = torch.zeros(0, 0), torch.zeros(0, dtype=torch.bool)
        rows = [
            {**{name: column[row] for name, column in columns.items()}, "task": task, "frame_index": row}
            for row, task in enumerate(tasks)
        ]
        return pack_samples([self._encode(row, *none) for row in rows])

    def length(self, sample: Sample) -> int:
        """Number of tokens of a sample. Looks only at which cameras it has and at its `task`, at no picture."""
        return self.count_tokens(len(_cameras(sample)), sample["task"], where=sample)

    def count_tokens(self, num_images: int, task: str, *, where: Sample | None = None) -> int:
        """Number of tokens of a sample, from metadata alone.

        Args:
            num_images: Number of cameras the sample has.
            task: Its instruction.
            where: The sample to name in an error.

        Raises:
            DatasetError: The instruction is longer than `max_instruction_tokens`.
        """
        text = len(self._instruction(task, where or {}))
        return num_images * self.tokens_per_image + text + bool(self.state_keys)

    def _encode(self, sample: Sample, actions: Tensor, action_is_pad: Tensor) -> EncodedSample:
        cameras = _cameras(sample)
        if "task" not in sample:
            raise _unusable(sample, "task", "nothing", "an instruction")
        ids = [self.image_token_id] * (len(cameras) * self.tokens_per_image)
        ids += self._instruction(sample["task"], sample)
        if self.state_keys:
            ids.append(self.state_token_id)
        if not ids:
            raise _unusable(sample, "observation", "no camera, no instruction, no state", "at least one token")
        pictures = [resize_with_pad(_picture(sample, name), self.image_size) for name in cameras]
        state = [_floats(sample, key, 1) for key in self.state_keys]
        return EncodedSample(
            input_ids=torch.tensor(ids),
            pixel_values=torch.stack(pictures) if pictures else torch.zeros(0, 3, *self.image_size, dtype=torch.uint8),
            state=torch.cat(state) if state else torch.zeros(0),
            actions=actions,
            action_is_pad=action_is_pad,
            dataset=int(sample.get("dataset", 0)),
            episode_index=int(sample.get("episode_index", 0)),
            frame_index=int(sample.get("frame_index", 0)),
            image_keys=tuple(cameras),
        )

    def _instruction(self, task: object, sample: Sample) -> list[int]:
        if not isinstance(task, str):
            raise _unusable(sample, "task", type(task).__name__, "str")
        ids = self._instructions.get(task)
        if ids is None:
            ids = self._tokenizer.encode(task, add_special_tokens=False).ids
            if len(self._instructions) < _REMEMBERED_INSTRUCTIONS:
                self._instructions[task] = ids
        if len(ids) > self.max_instruction_tokens:
            raise DatasetError(
                "an instruction is longer than the policy's limit",
                where=_name(sample),
                found=f"{len(ids)} tokens: {task[:80]!r}",
                expected=f"at most {self.max_instruction_tokens} tokens (max_instruction_tokens)",
                mend="shorten the instruction or raise max_instruction_tokens",
            )
        return ids

    def to_config(self) -> dict[str, Any]:
        """Plain JSON values, the tokenizer's JSON text among them; `from_config` reads them."""
        return {
            "tokenizer_json": self._tokenizer_json,
            "image_size": list(self.image_size),
            "patch_size": self.patch_size,
            "state_keys": list(self.state_keys),
            "action_key": self.action_key,
            "max_instruction_tokens": self.max_instruction_tokens,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SampleEncoder:
        """The encoder that wrote `config`, without any file."""
        values = dict(config)
        text = values.pop("tokenizer_json")
        encoder = cls(**values)
        encoder._use_tokenizer(text)
        return encoder


def _read_tokenizer(path: str | None) -> str:
    if path is None:
        return resources.files("lightning_embodied.packing").joinpath("instruction_tokenizer.json").read_text("utf-8")
    try:
        text = Path(path).read_text("utf-8")
        Tokenizer.from_str(text)
    except Exception as error:  # `tokenizers` raises bare Exception for a file it cannot parse
        raise ConfigError(
            "the tokenizer cannot be read",
            where=path,
            found=f"{type(error).__name__}: {error}",
            expected="a JSON file written by the `tokenizers` library",
        ) from error
    return text


def _cameras(sample: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in sample if key.startswith(_CAMERA_PREFIX) and not key.endswith("_is_pad"))


def _floats(sample: Sample, key: str, dims: int) -> Tensor:
    value = sample.get(key)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != dims:
        raise _unusable(sample, key, _describe(value), f"float32 {'[D]' if dims == 1 else '[H, A]'}")
    return value.to("cpu", torch.float32)


def _picture(sample: Sample, key: str) -> Tensor:
    value = sample[key]
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 3 or value.shape[0] not in (1, 3):
        raise _unusable(sample, key, _describe(value), "uint8 [C, H, W] with 1 or 3 channels")
    return value.expand(3, -1, -1)


def _unusable(sample: Sample, key: str, found: str, expected: str) -> DatasetError:
    present = ", ".join(sorted(sample)) or "none"
    return DatasetError(
        f"a sample cannot be encoded: {key!r}",
        where=f"{_name(sample)} (keys: {present})",
        found=found,
        expected=expected,
        mend="check the dataset's features, or name other keys in SampleEncoder (state_keys, action_key)",
    )


def _name(sample: Sample) -> str:
    known = [(key, sample[key]) for key in ("dataset", "episode_index", "frame_index") if key in sample]
    return ", ".join(f"{key.removesuffix('_index')} {int(value)}" for key, value in known) or "a sample"


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "nothing" if value is None else type(value).__name__
