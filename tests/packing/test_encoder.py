"""SampleEncoder: token order, any string, missing cameras, one path for training and inference, errors that name."""

from __future__ import annotations

import json
import pickle
import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packing_samples import make_sample
from tokenizers import Tokenizer

from lightning_embodied.errors import ConfigError, DatasetError
from lightning_embodied.packing import SampleEncoder, VarlenPackingCollator, resize_with_pad

ROOT = Path(__file__).parents[2]
ENCODER = SampleEncoder()
PATIENT = SampleEncoder(max_instruction_tokens=10_000)
TOKENIZER = Tokenizer.from_str(ENCODER.to_config()["tokenizer_json"])


def test_order_is_images_by_camera_name_then_instruction_then_state():
    sample = make_sample(("wrist", "front"))
    encoded = ENCODER.encode(sample)
    text = len(ENCODER.encode(make_sample(())).input_ids) - 1
    kinds = [ENCODER.image_token_id] * 2 * ENCODER.tokens_per_image
    assert encoded.input_ids[: len(kinds)].tolist() == kinds
    assert encoded.input_ids[-1] == ENCODER.state_token_id
    assert len(encoded.input_ids) == len(kinds) + text + 1 == ENCODER.length(sample)
    assert torch.equal(encoded.pixel_values[0], sample["observation.images.front"])
    assert torch.equal(encoded.pixel_values[1], sample["observation.images.wrist"])
    assert int(encoded.input_ids.max()) < ENCODER.vocab_size


@given(st.text(max_size=60))
def test_any_string_encodes_and_decodes(text):
    ids = PATIENT.encode(make_sample((), text)).input_ids[:-1]
    decoded = TOKENIZER.decode(ids.tolist())
    assert decoded in (text, " " + text)


def test_robot_instructions_take_about_a_token_a_word():
    tasks = ["pick up the red block and place it on the plate", "open the drawer", "turn on the stove"]
    tokens = sum(ENCODER.count_tokens(0, task) - 1 for task in tasks)
    assert tokens <= 1.2 * sum(len(task.split()) for task in tasks)


def test_shipped_tokenizer_is_what_its_script_trains():
    script = runpy.run_path(str(ROOT / "docs" / "train_instruction_tokenizer.py"))
    assert json.loads(script["train"]().to_str()) == json.loads(ENCODER.to_config()["tokenizer_json"])


def test_length_needs_no_pictures():
    sample = make_sample(("a", "b", "c"))
    metadata = {key: None if "image" in key else value for key, value in sample.items()}
    assert ENCODER.length(metadata) == len(ENCODER.encode(sample).input_ids)
    assert ENCODER.count_tokens(3, sample["task"]) == ENCODER.length(metadata)


def test_config_round_trip_is_json_and_needs_no_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(ENCODER.to_config()["tokenizer_json"])
    encoder = SampleEncoder(tokenizer=str(path), image_size=(32, 48), patch_size=8, max_instruction_tokens=9)
    path.unlink()
    again = SampleEncoder.from_config(json.loads(json.dumps(encoder.to_config())))
    assert again.to_config() == encoder.to_config()
    sample = make_sample(size=(20, 30))
    assert torch.equal(again.encode(sample).pixel_values, encoder.encode(sample).pixel_values)
    assert torch.equal(pickle.loads(pickle.dumps(again)).encode(sample).input_ids, encoder.encode(sample).input_ids)  # noqa: S301


def test_training_and_inference_see_the_same_tokens():
    samples = [
        make_sample(("front", "wrist"), task, size=(48, 80), seed=i) for i, task in enumerate(["a b", "open it"])
    ]
    packed = VarlenPackingCollator(ENCODER)(samples)
    observations = {
        key: torch.stack([sample[key] for sample in samples])
        for key in ("observation.images.front", "observation.images.wrist", "observation.state")
    }
    seen = ENCODER.encode_observations({**observations, "task": [sample["task"] for sample in samples]})
    for name in ("input_ids", "position_ids", "cu_seqlens", "pixel_values", "state"):
        assert torch.equal(getattr(packed, name), getattr(seen, name)), name
    assert seen.actions.shape == (2, 0, 0)
    assert seen.max_seqlen == packed.max_seqlen


def test_state_is_the_named_keys_in_order_and_may_be_absent():
    sample = make_sample(**{"observation.environment_state": torch.arange(3.0)})
    both = SampleEncoder(state_keys=("observation.state", "observation.environment_state")).encode(sample)
    assert torch.equal(both.state, torch.cat([sample["observation.state"], torch.arange(3.0)]))
    none = SampleEncoder(state_keys=()).encode(sample)
    assert none.state.shape == (0,)
    assert len(none.input_ids) == len(both.input_ids) - 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"action": None}, "'action'"),
        ({"action": torch.zeros(3)}, "float32 [H, A]"),
        ({"action": torch.zeros(8, 4, dtype=torch.int64)}, "int64"),
        ({"action_is_pad": torch.zeros(7, dtype=torch.bool)}, "bool [8]"),
        ({"observation.state": torch.zeros(1, 5)}, "float32 [1, 5]"),
        ({"observation.images.front": torch.zeros(3, 8, 8)}, "uint8 [C, H, W]"),
        ({"observation.images.front": torch.zeros(8, 8, 3, dtype=torch.uint8)}, "uint8 [8, 8, 3]"),
        ({"observation.images.front": torch.zeros(3, 0, 8, dtype=torch.uint8)}, "uint8 [3, 0, 8]"),
        ({"action_is_pad": [False] * 8}, "bool [8]"),
        ({"task": 3}, "int"),
        ({"task": "word " * 60}, "max_instruction_tokens"),
    ],
)
def test_errors_name_the_sample_and_what_was_found(change, word):
    with pytest.raises(DatasetError) as caught:
        ENCODER.encode(make_sample(seed=17, **change))
    assert word in str(caught.value)
    assert "dataset 0, episode 3, frame 17" in str(caught.value)


@pytest.mark.parametrize("key", ["action", "observation.state", "task"])
def test_a_missing_key_is_named(key):
    sample = make_sample()
    del sample[key]
    with pytest.raises(DatasetError, match=key):
        ENCODER.encode(sample)


def test_observations_of_one_instruction_are_a_list_of_one():
    with pytest.raises(DatasetError, match="a list of B instructions"):
        ENCODER.encode_observations({"observation.state": torch.zeros(1, 5), "task": "go"})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda config: config.pop("tokenizer_json"), "tokenizer_json"),
        (lambda config: config.update(tokenizer_json="{}"), "token path"),
        (lambda config: config.update(wings=2), "wings"),
        (lambda config: config.update(prompt="pi1"), "pi05"),
    ],
)
def test_a_damaged_configuration_is_told(change, word):
    config = ENCODER.to_config()
    change(config)
    with pytest.raises(ConfigError, match=word):
        SampleEncoder.from_config(config)


def test_bad_settings_are_config_errors(tmp_path):
    for options in ({"prompt": "pi1"}, {"resize": "cubic"}, {"state_keys": "observation.state"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            SampleEncoder(**options)
    with pytest.raises(ConfigError, match="multiples of the patch size"):
        SampleEncoder(image_size=(60, 64))
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no\.json"):
        SampleEncoder(tokenizer=str(tmp_path / "no.json"))
    with pytest.raises(ConfigError, match="absent"):
        SampleEncoder(tokenizer=str(tmp_path / "absent.json"))


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 40), st.integers(1, 40))
def test_resizing_keeps_the_aspect_and_pads_with_black(height, width, rows, columns):
    image = torch.full((2, 3, height, width), 200, dtype=torch.uint8)
    out = resize_with_pad(image, (rows, columns))
    assert out.shape == (2, 3, rows, columns)
    assert set(out.unique().tolist()) <= {0, 200}
    inside = out[0, 0] == 200
    ratio = max(height / rows, width / columns)
    expected = max(1, int(height / ratio)) * max(1, int(width / ratio))
    assert int(inside.sum()) == (rows * columns if (height, width) == (rows, columns) else expected)
