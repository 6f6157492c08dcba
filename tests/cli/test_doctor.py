"""`doctor` tries what it reports, survives what is broken, and says it as a table and as JSON."""

import json

import pytest
import torch

from lightning_embodied.cli import doctor as doctor_module
from lightning_embodied.cli import main
from lightning_embodied.cli.doctor import examine
from lightning_embodied.cli.rendering import RenderOutcome, try_rendering

SECTIONS = {"machine", "packages", "torch", "attention", "fp8", "video", "rendering"}


@pytest.fixture
def quick(monkeypatch):
    """Without drawing a picture, which takes seconds."""
    monkeypatch.setattr(
        doctor_module, "try_rendering", lambda backend: RenderOutcome(backend == "egl", "drew a picture")
    )


@pytest.mark.usefixtures("quick")
def test_json_has_every_section_and_what_this_machine_is(capsys):
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {finding["section"] for finding in findings} == SECTIONS
    found = {finding["name"]: finding for finding in findings}
    assert torch.__version__ in found["build"]["value"]
    assert found["torch"]["status"] == "ok"
    assert sum("used here" in finding["value"] for finding in findings if finding["section"] == "attention") == 1
    assert any("h264" in name for name in found)


@pytest.mark.usefixtures("quick")
def test_what_is_missing_is_named_with_the_extra(capsys, monkeypatch):
    real = doctor_module._version
    monkeypatch.setattr(doctor_module, "_version", lambda name: None if name in ("ray", "wandb") else real(name))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ray: pip install 'lightning-embodied[ray]'" in out
    assert "wandb: pip install 'lightning-embodied[wandb]'" in out


@pytest.mark.usefixtures("quick")
def test_a_broken_package_is_reported_and_the_rest_still_looked_at(monkeypatch, capsys):
    monkeypatch.setattr(doctor_module, "_has_codec", lambda *_: 1 / 0)
    assert main(["doctor", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    broken = [finding for finding in findings if finding["status"] == "broken"]
    assert [finding["section"] for finding in broken] == ["video"]
    assert "ZeroDivisionError" in broken[0]["value"]
    assert {finding["section"] for finding in findings} == SECTIONS


@pytest.mark.usefixtures("quick")
def test_full_disk_is_broken(monkeypatch):
    monkeypatch.setattr(doctor_module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2**20}))
    assert [finding.name for finding in examine() if finding.status == "broken"] == ["disk"]


@pytest.mark.sim
def test_rendering_is_really_tried():
    assert not try_rendering("no_such_backend").works
    assert any(try_rendering(backend).works for backend in ("egl", "osmesa"))
