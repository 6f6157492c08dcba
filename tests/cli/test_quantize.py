"""`lightning-embodied quantize` on a run as `fit` leaves it, and on one that was evaluated in closed loop."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from lightning_embodied.cli import main
from lightning_embodied.models import load_policy as load_checkpoint
from lightning_embodied.quantization import load_policy

DOCS = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text()
DATASET = Path(__file__).parents[1] / "fixtures" / "lerobot_v30_image" / "dataset"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps on a dataset of two cameras, with a seed that is not the default."""
    folder = tmp_path_factory.mktemp("runs") / "arm"
    encoder = {"class_path": "SampleEncoder", "init_args": {"image_size": [16, 16], "patch_size": 8}}
    config = {
        "seed_everything": 3,
        "model": {
            "class_path": "FlowMatchingPolicy",
            "init_args": {"width": 32, "expert_width": 32, "depth": 2, "heads": 2, "head_dim": 16, "stem_channels": 8},
        },
        "data": {
            "class_path": "LeRobotDataModule",
            "init_args": {
                "root": str(DATASET),
                "collator": {"class_path": "VarlenPackingCollator", "init_args": {"encoder": encoder}},
                "action_horizon": 4,
                "batch_size": 4,
                "val_episodes": 1,
            },
        },
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 2,
            "default_root_dir": str(folder),
            "limit_val_batches": 0,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
        "wandb": "disabled",
    }
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", str(path)]) == 0
    return folder


def quantize(run, out, *options):
    return main(["quantize", "--checkpoint", str(run), "--out", str(out), "--frames=12", *options])


def test_a_run_is_quantised_and_its_actions_are_compared(run, tmp_path, capsys):
    pytest.importorskip("onnxscript")
    out = tmp_path / "robot"
    options = ["--calibration_frames=6", "--weights=fp8_row", '--exclude=["*.mlp.down"]', "--onnx=push"]
    assert quantize(run, out, *options) == 0
    text = capsys.readouterr().out
    assert "no closed loop" in text
    assert "3 kept, excluded by '*.mlp.down'" in text
    assert "on 12 held-out frames" in text
    assert "onnxruntime and torch differ by" in text
    report = json.loads((out / "report.json").read_text())
    assert report["bytes"]["float32"] == 4 * sum(p.numel() for p in load_checkpoint(run).parameters())
    assert report["bytes"]["model.safetensors"] == (out / "model.safetensors").stat().st_size
    actions = report["actions"]
    assert actions["frames"] == 12
    assert all(
        0 < change < 0.2 * spread for change, spread in zip(actions["change_rms"], actions["spread"], strict=True)
    )
    policy = load_policy(out)
    manifest = json.loads((out / "manifest.json").read_text())
    assert set(manifest["files"]) == {"model.safetensors", "denoising_step.onnx"}
    assert all(layer["input_scale"] > 0 for layer in manifest["layers"].values())
    assert policy.expert.layers[0].qkv.codes.dtype == torch.float8_e4m3fn


def test_without_the_dataset_the_rest_is_done(run, tmp_path, capsys):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["init_args"]["root"] = str(tmp_path / "elsewhere")
    other = tmp_path / "run"
    (other / "checkpoints").mkdir(parents=True)
    (other / "checkpoints" / "last.ckpt").write_bytes((run / "checkpoints" / "last.ckpt").read_bytes())
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    assert quantize(other, tmp_path / "robot") == 0
    assert "actions were not compared: there is no dataset here" in capsys.readouterr().out
    assert quantize(other, tmp_path / "robot", "--overwrite", f"--data_root={DATASET}") == 0
    assert "on 12 held-out frames" in capsys.readouterr().out
    assert quantize(other, tmp_path / "more", "--calibration_frames=4") == 2
    assert "there is no dataset here" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()


def test_held_out_frames_are_those_that_were_held_out(run, tmp_path, capsys):
    """The split follows from the run's seed; frames of another split may have been trained on."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["seed_everything"] = 5  # holds out another episode than 3
    other = tmp_path / "run"
    (other / "checkpoints").mkdir(parents=True)
    (other / "checkpoints" / "last.ckpt").write_bytes((run / "checkpoints" / "last.ckpt").read_bytes())
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    assert quantize(other, tmp_path / "robot") == 0
    assert "or not the split" in capsys.readouterr().out


COMMANDS = re.findall(r"^    lightning-embodied (quantize .*)", DOCS.replace("\\\n", " "), re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_documented_commands_parse(command, capsys):
    assert main([*shlex.split(command), "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["checkpoint"] == "runs/quickstart"


def test_bad_input_ends_before_anything_is_computed(run, tmp_path, capsys):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").touch()
    assert quantize(run, tmp_path / "notes", "--overwrite") == 2
    assert "something else than a quantised policy" in capsys.readouterr().err
    assert quantize(run, tmp_path / "robot", "--weights=int4") == 2
    assert quantize(run, tmp_path / "robot", '--include=["*.wings"]') == 2
    assert "quantize.include" in capsys.readouterr().err
    assert quantize(run, tmp_path / "robot", "--weights=int8_row", "--calibration_frames=4") == 2
    assert quantize(tmp_path / "nowhere", tmp_path / "robot") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes"]
