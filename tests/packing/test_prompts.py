"""Prompts of pi0 and pi0.5, where tokenizers come from, the order of cameras, pictures resized as LeRobot does."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packing_samples import make_sample
from tokenizers import AddedToken, Tokenizer

from lightning_embodied.errors import ConfigError, DatasetError
from lightning_embodied.features import FeatureStats
from lightning_embodied.packing import SampleEncoder, VarlenPackingCollator, resize_with_pad
from lightning_embodied.packing.prompts import state_bins

PLAIN = SampleEncoder(state_keys=(), max_instruction_tokens=300)


def stats_of(low, high) -> dict[str, FeatureStats]:
    low, high = np.array(low, dtype=np.float64), np.array(high, dtype=np.float64)
    values = dict.fromkeys(("min", "mean", "std", "q01", "q10", "q50"), low)
    return {"observation.state": FeatureStats(**values, max=high, q90=high, q99=high, count=9)}


def pi05(**arguments) -> SampleEncoder:
    encoder = SampleEncoder(prompt="pi05", max_instruction_tokens=300, **arguments)
    encoder.use_statistics(stats_of([-1.0] * 5, [1.0] * 5))
    return encoder


def text_of(text: str) -> torch.Tensor:
    return PLAIN.encode(make_sample((), text)).input_ids


def test_pi0_ends_the_instruction_with_a_line_break_and_has_no_state_token():
    sample = make_sample(("front",), " Push_the block\n")
    encoder = SampleEncoder(prompt="pi0")
    encoded = encoder.encode(sample)
    assert torch.equal(encoded.input_ids[encoder.tokens_per_image :], text_of("Push the block\n"))
    assert torch.equal(encoded.state, sample["observation.state"])
    assert encoder.length(sample) == len(encoded.input_ids)


def test_pi05_writes_the_state_into_the_prompt():
    state = torch.tensor([-1.0, 1.0, 0.0, -1.5, 0.999])
    encoded = pi05().encode(make_sample((), "push it", **{"observation.state": state}))
    assert torch.equal(encoded.input_ids, text_of("Task: push it, State: 0 255 128 -1 255;\nAction: "))


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.01, 5), st.floats(-20, 20)), min_size=1, max_size=6))
def test_bins_are_equal_parts_of_the_range(dimensions):
    low, width, state = (np.array(column, dtype=np.float32) for column in zip(*dimensions, strict=True))
    found = state_bins(state, low.tolist(), (low + width).tolist())
    exact = (state.astype(np.float64) - low) / ((low + width).astype(np.float32) - low).astype(np.float64) * 256
    for number, place in zip(found, exact, strict=True):
        assert -1 <= number <= 255
        assert abs(number + 0.5 - np.clip(place, -0.5, 255.5)) <= 0.5 + 1e-3 * max(1.0, abs(place))


def test_a_state_that_never_varied_still_has_a_bin():
    assert state_bins(np.array([1.0, 2.0, 0.0], dtype=np.float32), [1.0] * 3, [1.0] * 3) == [0, 255, -1]


def test_counting_from_metadata_is_never_too_low():
    encoder = pi05()
    generator = torch.Generator().manual_seed(0)
    most = 0
    for _ in range(200):
        state = torch.randn(5, generator=generator) * 2
        sample = make_sample(("front",), "open it", **{"observation.state": state})
        tokens = len(encoder.encode(sample).input_ids)
        assert tokens <= encoder.length(sample) == encoder.count_tokens(1, "open it")
        most = max(most, tokens)
    assert encoder.count_tokens(1, "open it") <= most + 5


def chat_tokenizer(folder) -> str:
    """A byte-level BPE that splits text as Qwen's does, with Eagle's special tokens."""
    from tokenizers import Regex, models, pre_tokenizers

    split = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("i", "m"), ("Ċ", "<")]  # a merge across "user\n" and "<image" must not happen
    vocabulary = {token: number for number, token in enumerate([*alphabet, "im", "Ċ<"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    specials = ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize("cameras", [(), ("front",), ("front", "top", "wrist")])
def test_eagles_chat_is_the_whole_text_tokenised_at_once(cameras, tmp_path):
    path = chat_tokenizer(tmp_path)
    encoder = SampleEncoder(tokenizer=path, prompt="eagle")
    sample = make_sample(cameras, "Pick up the 2 blocks.")
    pictures = "".join(
        f"<image {number + 1}><img>{'<IMG_CONTEXT>' * encoder.tokens_per_image}</img>" for number in range(len(cameras))
    )
    text = (
        f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{pictures}"
        "Pick up the 2 blocks.<|im_end|>\n<|im_start|>assistant\n"
    )
    tokenizer = Tokenizer.from_file(path)
    expected = torch.tensor(tokenizer.encode(text).ids)
    expected[expected == tokenizer.token_to_id("<IMG_CONTEXT>")] = encoder.image_token_id
    encoded = encoder.encode(sample)
    assert torch.equal(encoded.input_ids, expected)
    assert encoder.length(sample) == len(expected)
    again = SampleEncoder.from_config(encoder.to_config())
    assert torch.equal(again.encode(sample).input_ids, expected)


def test_the_state_range_travels_and_statistics_change_nothing_else():
    encoder = pi05()
    again = SampleEncoder.from_config(json.loads(json.dumps(encoder.to_config())))
    sample = make_sample((), "push", seed=3)
    assert torch.equal(again.encode(sample).input_ids, encoder.encode(sample).input_ids)
    assert again.to_config() == encoder.to_config()
    plain = SampleEncoder()
    before = plain.to_config()
    plain.use_statistics({})
    assert plain.to_config() == before


def test_an_encoder_of_an_older_checkpoint_is_read():
    config = SampleEncoder().to_config()
    older = {key: config[key] for key in config if key not in ("prompt", "resize", "camera_order", "state_range")}
    assert SampleEncoder.from_config(older).to_config() == config


def test_without_statistics_the_prompt_says_so():
    with pytest.raises(ConfigError, match="use_statistics"):
        SampleEncoder(prompt="pi05").encode(make_sample())
    with pytest.raises(ConfigError, match=r"observation\.state"):
        SampleEncoder(prompt="pi05").use_statistics({})


def test_a_long_prompt_is_an_error_that_names_the_sample():
    encoder = SampleEncoder(prompt="pi05", max_instruction_tokens=10)
    encoder.use_statistics(stats_of([-1.0] * 5, [1.0] * 5))
    with pytest.raises(DatasetError, match="frame 7"):
        encoder.encode(make_sample(seed=7))


def special_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_str(PLAIN.to_config()["tokenizer_json"])
    tokenizer.add_special_tokens([AddedToken("<bos>"), AddedToken("<image>")])
    return tokenizer


def test_a_tokenizer_directory_with_a_start_token(tmp_path):
    special_tokenizer().save(str(tmp_path / "tokenizer.json"))
    start = special_tokenizer().token_to_id("<bos>")
    for prompt, first in (("pi0", [start]), ("instruction", [])):
        encoder = SampleEncoder(tokenizer=str(tmp_path), prompt=prompt)
        ids = encoder.encode(make_sample((), "push")).input_ids.tolist()
        assert ids[: len(first)] == first
        assert (start in ids) == bool(first)
        assert encoder.words == start + 1  # `<image>` is never embedded as a word
        assert encoder.image_token_id > start + 1


def test_a_tokenizer_that_is_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in (str(tmp_path / "absent"), "nobody/nothing-here"):
        with pytest.raises(ConfigError, match=name.rsplit("/", maxsplit=1)[-1]):
            SampleEncoder(tokenizer=name)


def test_cameras_in_a_wanted_order_then_by_name():
    sample = make_sample(("a", "b", "c", "d"))
    keys = {name: f"observation.images.{name}" for name in "abcd"}
    encoded = SampleEncoder(camera_order=(keys["c"], "absent", keys["b"])).encode(sample)
    assert encoded.image_keys == (keys["c"], keys["b"], keys["a"], keys["d"])
    for key, picture in zip(encoded.image_keys, encoded.pixel_values, strict=True):
        assert torch.equal(picture, sample[key])


def test_bilinear_pictures_are_not_rounded():
    sample = make_sample(("front",), size=(80, 112))
    picture = sample["observation.images.front"]
    encoded = SampleEncoder(resize="bilinear").encode(sample)
    assert encoded.pixel_values.dtype == torch.float32
    expected = torch.nn.functional.interpolate(picture[None] / 255, size=(45, 64), mode="bilinear") * 255
    assert torch.allclose(encoded.pixel_values[:, :, 9:54], expected, atol=1e-3)
    assert not encoded.pixel_values[:, :, :9].any()
    same = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    assert resize_with_pad(same, (64, 64), "bilinear").dtype == torch.uint8
    both = VarlenPackingCollator(SampleEncoder(resize="bilinear"))([sample, make_sample(("front",))])
    assert torch.equal(both.pixel_values[1], make_sample(("front",))["observation.images.front"].float())
