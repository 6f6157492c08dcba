"""`lightning-embodied plan` on the shipped configurations, small sizes, a thousand ranks."""

import json

import pytest

from lightning_embodied.cli import main


def run(capsys, *options):
    code = main(["plan", *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(("name", "unit"), [("pi05", "GemmaLayer"), ("groot", "_Layer")])
def test_a_fit_configuration_is_planned(capsys, tmp_path, name, unit):
    options = ["--config", f"configs/{name}.yaml", "--ranks=1024", "--trainer.precision=bf16-mixed", "--micro_batch=2"]
    code, out, _ = run(capsys, *options, "--json", "--output", str(tmp_path))
    assert code == 0
    plan = json.loads(out)
    assert plan == json.loads((tmp_path / "plan.json").read_text())
    whole, hybrid = plan["candidates"]
    assert [whole["strategy"], hybrid["strategy"]] == ["ddp", "hsdp 128 x 8"]
    assert unit in hybrid["sharding"]["units"]
    assert "Block" not in hybrid["sharding"]["units"], "GR00T's cross-attention is reached into"
    assert hybrid["memory"]["parameters"] < whole["memory"]["parameters"] / 6
    assert whole["memory"]["parameters"] >= 4 * plan["parameters"]
    assert plan["scaling"][-1]["ranks"] == 1024
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 2
    assert "http" not in page


def test_the_tables_say_what_to_take(capsys):
    code, out, _ = run(capsys, "--config", "configs/quickstart.yaml", "--ranks=8", "--micro_batch=4", "--gpu=a100")
    assert code == 0
    assert "take: ddp" in out
    for title in ("Memory of a rank", "An optimizer step", "Scaling", "Storage and failures"):
        assert title in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu=h9000"], "h200"),
        (["--network=fast"], "3.2Tb"),
        (["--trainer.precision=int4"], "precision"),
        (["--units=[Layer]"], "GemmaLayer"),
        (["--ranks=0"], "too small"),
    ],
)
def test_bad_options_are_one_message(capsys, options, words):
    code, _, err = run(capsys, "--config", "configs/pi05.yaml", "--micro_batch=1", *options)
    assert code == 2
    assert words in err
    assert "Traceback" not in err


def test_a_datamodule_without_packing_is_refused(capsys):
    code, _, err = run(capsys, "--config", "configs/pi05.yaml", "--data.collator", "null")
    assert code == 2
    assert "make_plan" in err
