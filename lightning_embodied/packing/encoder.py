"""Turns one sample of a robot dataset into tokens, the same way in training and on the robot.

The order is PaliGemma's in pi0: the image tokens of each camera that is there, then the instruction, then one token
for the state. An absent camera has no tokens at all, where openpi and LeRobot carry it along as masked zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_embodied.errors import ConfigError, DatasetError
from lightning_embodied.features import FeatureStats
from lightning_embodied.packing.batch import PackedBatch
from lightning_embodied.packing.images import Resize, resize_with_pad
from lightning_embodied.packing.pack import EncodedSample, pack_samples
from lightning_embodied.packing.prompts import PromptStyle
from lightning_embodied.packing.sample import Sample, cameras_of, describe, floats_of, name_of, picture_of, unusable
from lightning_embodied.packing.text import PromptTokenizer
from lightning_embodied.packing.tokenizer import read_tokenizer


class SampleEncoder:
    """Encodes samples as image, instruction and state tokens.

    The placeholders of image and state tokens have ids above the tokenizer's, so `vocab_size` counts them too. An
    encoder is plain values (`to_config`) and travels in a policy's checkpoint, its tokenizer included.

    Args:
        tokenizer: Path of a `tokenizers` JSON file, of a directory that holds `tokenizer.json`, or a hub id. Default:
            the byte-level BPE shipped with this package, which encodes any string.
        image_size: Height and width that pictures are brought to (aspect kept, padded), in pixels.
        patch_size: Side of one square image patch in pixels; one patch is one token.
        state_keys: Keys concatenated into the state, in this order; empty for a policy without state.
        action_key: Key of the action chunk.
        max_instruction_tokens: Longest instruction or prompt allowed, in tokens; a longer one is an error, never cut.
        prompt: `instruction` is the bare instruction and a state token behind it. `pi0`, `pi05` and `eagle` are the
            prompts of pi0, pi0.5 and GR00T N1.5, without a state token: pi0.5 reads the state in the prompt, the
            others take it elsewhere.
        resize: `antialiased`, or `bilinear` as LeRobot feeds pi0 and pi0.5 (see `resize_with_pad`).
        camera_order: Keys of pictures whose tokens come first, in this order; the others follow sorted by name.

    Raises:
        ConfigError: The tokenizer cannot be read, the image size is not a multiple of the patch size, or an option has
            a value that it cannot have.
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
        prompt: PromptStyle = "instruction",
        resize: Resize = "antialiased",
        camera_order: Sequence[str] = (),
    ) -> None:
        for name, found, known in (("prompt", prompt, get_args(PromptStyle)), ("resize", resize, get_args(Resize))):
            if found not in known:
                raise ConfigError("no such way to encode", where=name, found=found, expected=", ".join(known))
        if isinstance(state_keys, str):
            raise ConfigError("the state keys are no list", where="state_keys", found=state_keys, expected="a list")
        self.image_size = (int(image_size[0]), int(image_size[1]))
        self.patch_size = patch_size
        self.state_keys = tuple(state_keys)
        self.action_key = action_key
        self.max_instruction_tokens = max_instruction_tokens
        self.prompt, self.resize, self.camera_order = prompt, resize, tuple(camera_order)
        if patch_size < 1 or min(self.image_size) < 1 or any(side % patch_size for side in self.image_size):
            raise ConfigError(
                "pictures do not divide into patches",
                where="SampleEncoder: image_size, patch_size",
                found=f"{self.image_size[0]} x {self.image_size[1]} pixels, patches of {patch_size}",
                expected="height and width that are multiples of the patch size",
            )
        self._text = PromptTokenizer(read_tokenizer(tokenizer), prompt)

    @property
    def words(self) -> int:
        """Number of ids that text can have, and a model must embed."""
        return self._text.words

    @property
    def has_state_token(self) -> bool:
        """Whether the state is a token of its own, the last one of a sample."""
        return bool(self.state_keys) and self.prompt == "instruction"

    def use_statistics(self, stats: Mapping[str, FeatureStats]) -> None:
        """Learns between which quantiles pi0.5's prompts discretise the state; other prompts need nothing.

        Args:
            stats: Statistics of the training data, the state keys among them.

        Raises:
            ConfigError: A state key has no statistics.
        """
        if self.prompt != "pi05":
            return
        missing = [key for key in self.state_keys if key not in stats]
        if missing:
            raise ConfigError(
                "the dataset has no such numeric feature",
                where="SampleEncoder: state_keys",
                found=", ".join(missing),
                expected=", ".join(sorted(stats)),
            )
        low, high = (
            [float(value) for key in self.state_keys for value in np.ravel(getattr(stats[key], name))]
            for name in ("q01", "q99")
        )
        self._text = PromptTokenizer(self._text.json, self.prompt, (low, high))

    @property
    def image_token_id(self) -> int:
        """Placeholder id of an image token."""
        return self._text.vocab_size

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
        actions = floats_of(sample, self.action_key, 2)
        is_pad = sample.get(f"{self.action_key}_is_pad")
        if is_pad is None:
            is_pad = torch.zeros(actions.shape[0], dtype=torch.bool)
        elif not isinstance(is_pad, Tensor) or is_pad.dtype != torch.bool or is_pad.shape != actions.shape[:1]:
            raise unusable(sample, f"{self.action_key}_is_pad", describe(is_pad), f"bool [{actions.shape[0]}]")
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
        names = [*cameras_of(observations), *self.state_keys]
        tasks = observations.get("task")
        if tasks is None or isinstance(tasks, str):
            raise unusable({}, "task", describe(tasks), "a list of B instructions")
        columns = {name: torch.as_tensor(observations[name]) for name in names if name in observations}
        none = torch.zeros(0, 0), torch.zeros(0, dtype=torch.bool)
        rows = [
            {**{name: column[row] for name, column in columns.items()}, "task": task, "frame_index": row}
            for row, task in enumerate(tasks)
        ]
        return pack_samples([self._encode(row, *none) for row in rows])

    def length(self, sample: Sample) -> int:
        """Number of tokens of a sample, from its cameras and its `task`; as `count_tokens`."""
        return self.count_tokens(len(cameras_of(sample)), sample["task"], where=sample)

    def count_tokens(self, num_images: int, task: str, *, where: Sample | None = None) -> int:
        """Number of tokens of a sample, from metadata alone; with pi0.5's prompts, the most it can have.

        Args:
            num_images: Number of cameras the sample has.
            task: Its instruction.
            where: The sample to name in an error.

        Raises:
            DatasetError: The instruction is longer than `max_instruction_tokens`.
        """
        text = self._text.count(task)
        self._check_length(text, task, where or {})
        around = sum(map(len, self._text.around_pictures(num_images)))
        return num_images * self.tokens_per_image + around + text + self.has_state_token

    def _encode(self, sample: Sample, actions: Tensor, action_is_pad: Tensor) -> EncodedSample:
        cameras = sorted(cameras_of(sample), key=self._camera_place)
        states = [floats_of(sample, key, 1) for key in self.state_keys]
        state = torch.cat(states) if states else torch.zeros(0)
        first, *gaps = self._text.around_pictures(len(cameras))
        ids = [*first]
        for gap in gaps:
            ids += [self.image_token_id] * self.tokens_per_image + gap
        ids += self._instruction(sample, state)
        if self.has_state_token:
            ids.append(self.state_token_id)
        if not ids:
            raise unusable(sample, "observation", "no camera, no instruction, no state", "at least one token")
        pictures = [resize_with_pad(picture_of(sample, name), self.image_size, self.resize) for name in cameras]
        return EncodedSample(
            input_ids=torch.tensor(ids),
            pixel_values=torch.stack(pictures) if pictures else torch.zeros(0, 3, *self.image_size, dtype=torch.uint8),
            state=state,
            actions=actions,
            action_is_pad=action_is_pad,
            dataset=int(sample.get("dataset", 0)),
            episode_index=int(sample.get("episode_index", 0)),
            frame_index=int(sample.get("frame_index", 0)),
            image_keys=tuple(cameras),
        )

    def _camera_place(self, name: str) -> tuple[int, str]:
        first = self.camera_order
        return (first.index(name) if name in first else len(first), name)

    def _instruction(self, sample: Sample, state: Tensor) -> list[int]:
        task = sample.get("task")
        if not isinstance(task, str):
            raise unusable(sample, "task", describe(task), "an instruction, str")
        ids = self._text.encode(task, state.numpy())
        self._check_length(len(ids), task, sample)
        return ids

    def _check_length(self, tokens: int, task: str, sample: Sample) -> None:
        if tokens > self.max_instruction_tokens:
            raise DatasetError(
                "an instruction is longer than the policy's limit",
                where=name_of(sample),
                found=f"{tokens} tokens: {task[:80]!r}",
                expected=f"at most {self.max_instruction_tokens} tokens (max_instruction_tokens)",
                mend="shorten the instruction or raise max_instruction_tokens",
            )

    def to_config(self) -> dict[str, Any]:
        """Plain JSON values, the tokenizer's JSON text among them; `from_config` reads them."""
        return {
            "tokenizer_json": self._text.json,
            "image_size": list(self.image_size),
            "patch_size": self.patch_size,
            "state_keys": list(self.state_keys),
            "action_key": self.action_key,
            "max_instruction_tokens": self.max_instruction_tokens,
            "prompt": self.prompt,
            "resize": self.resize,
            "camera_order": list(self.camera_order),
            "state_range": self._text.state_range and [list(bounds) for bounds in self._text.state_range],
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SampleEncoder:
        """The encoder that wrote `config`, without any file.

        Raises:
            ConfigError: An entry is missing, unknown or damaged.
        """
        values = dict(config)
        try:
            text, state_range = values.pop("tokenizer_json"), values.pop("state_range", None)
            encoder = cls(**values)
            encoder._text = PromptTokenizer(text, encoder.prompt, state_range)
        except ConfigError:
            raise
        except Exception as error:  # `tokenizers` raises bare Exception for a text that it cannot parse
            raise ConfigError(
                "the token path cannot be made again",
                where="SampleEncoder.from_config",
                found=f"{type(error).__name__}: {error}",
                expected="what `SampleEncoder.to_config` of this version gives",
            ) from error
        return encoder
