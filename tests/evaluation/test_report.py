"""The report read back as a browser would: every section, no outside resources, playable videos, no secrets."""

import base64
import io
import json
from html.parser import HTMLParser

import av
import numpy as np
import pytest

from lightning_embodied.errors import ConfigError
from lightning_embodied.evaluation import EpisodeResult, EvaluationResult, build_report
from lightning_embodied.evaluation.redaction import REDACTED, redact, redact_text
from lightning_embodied.evaluation.result import Effort
from lightning_embodied.evaluation.video import write_video

WANDB_KEY = "0123456789abcdef" * 2 + "01234567"
TASKS = ["drawer-open-v3", "button-press-topdown-v3", "<script>alert(1)</script>"]


class Page(HTMLParser):
    """Collects what the tests look at."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.videos, self.tags, self.words, self.by_section = set(), [], [], [], [], {}
        self.section = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.ids |= {attrs["id"]} if "id" in attrs else set()
        self.section = attrs.get("id", self.section)
        self.links += [attrs[name] for name in ("src", "href", "srcset", "poster") if name in attrs]
        self.videos += [attrs["src"]] if tag == "video" else []

    def handle_data(self, data):
        self.by_section[self.section] = self.by_section.get(self.section, "") + data


def episodes(policy, share):
    return [
        EpisodeResult(policy, task, seed, seed < share * 20, 60 + seed, f"do {task}", f"{task}{seed}")
        for task in TASKS
        for seed in range(20)
    ]


@pytest.fixture
def run_dir(tmp_path):
    run = tmp_path / "runs" / "quickstart"
    dataset = tmp_path / "demonstrations"
    (dataset / "meta").mkdir(parents=True)
    image = {"dtype": "video", "shape": [64, 96, 3], "names": None}
    vector = {"dtype": "float32", "shape": [4], "names": None}
    features = {"observation.images.front": image, "observation.state": vector, "action": vector}
    info = {"total_episodes": 150, "total_frames": 12345, "fps": 80, "robot_type": "sawyer", "features": features}
    (dataset / "meta" / "info.json").write_text(json.dumps(info))
    (dataset / "meta" / "tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "open the drawer"}) + "\n")
    (dataset / "meta" / "collection.json").write_text(json.dumps({"episodes": [], "failed": 7}))
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(
        f"seed_everything: 0\ntrainer:\n  logger:\n    api_key: {WANDB_KEY}\n    other: {WANDB_KEY}\n"
        f"data:\n  root: {dataset}\n  collator:\n    init_args:\n      token_budget: 4096\n"
        "      encoder:\n        init_args:\n          state_keys: [observation.state, observation.environment_state]\n"
    )
    rows = ["epoch,step,train/loss,val/loss,train/tokens_per_second,train/data_wait_share"]
    rows += [f"0,{step},{2 / (1 + step / 40)},,{9000 + step},{0.05}" for step in range(0, 2000, 5)]
    rows += [f"0,{step},,{2.2 / (1 + step / 40)},," for step in range(100, 2000, 100)]
    (run / "metrics.csv").write_text("\n".join(rows) + "\n")
    frames = [np.full((64, 96, 3), 8 * i, np.uint8) for i in range(24)]
    write_video(run / "evaluation" / "videos" / "first.mp4", frames, fps=10)
    EvaluationResult(
        episodes=episodes("checkpoint", 0.95) + episodes("expert", 1.0) + episodes("untrained", 0.0),
        settings={
            "env_id": "lightning_embodied/MetaWorld-v0",
            "tasks": TASKS,
            "episodes_per_task": 20,
            "first_seed": 10_000,
        },
        planned_episodes=180,
        complete=True,
        effort={"checkpoint": Effort(12.5, 5000, 600)},
        checkpoint={"path": "runs/quickstart/checkpoints/last.ckpt", "sha256": "ab" * 32},
        training_data={"root": str(dataset), "training_episodes": 150, "seen_starts": 0},
        versions={"torch": "2.13", "python": "3.11"},
        videos={TASKS[0]: "videos/first.mp4"},
    ).save(run / "evaluation" / "results.json")
    return run


def test_report_has_every_section_and_needs_nothing_else(run_dir):
    page = Page(build_report(run_dir).read_text())
    assert page.ids >= {"verdict", "success", "videos", "data", "training", "reproduce"}
    assert all(link.startswith("data:") for link in page.links)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert page.by_section["verdict"].count("57 of 60") == 1
    assert "This policy does the job: 95% success." in page.by_section["verdict"]
    assert "between 86% and 98%" in page.by_section["verdict"]
    assert "12,345 frames at 80 frames/s" in page.by_section["data"]
    assert "7 (not kept)" in page.by_section["data"]
    assert "front (96 \u00d7 64)" in page.by_section["data"]
    for word in ("Loss", "Tokens per second", "waiting for data", "token_budget: 4096"):
        assert word in page.by_section["training"]
    assert "--first_seed 10000" in page.by_section["reproduce"]
    assert "ab" * 32 in page.by_section["reproduce"]
    assert page.tags.count("svg") == 3 + 12  # curves, and intervals of three policies on three tasks and overall


def test_the_video_in_the_report_plays(run_dir):
    (source,) = Page(build_report(run_dir).read_text()).videos
    header, data = source.split(",")
    assert header == "data:video/mp4;base64"
    with av.open(io.BytesIO(base64.b64decode(data))) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert len(list(container.decode(video=0))) == 24


def test_secrets_do_not_reach_the_report(run_dir):
    text = build_report(run_dir).read_text()
    assert WANDB_KEY not in text
    assert text.count(REDACTED) == 2


def test_a_run_without_evaluation_says_so(run_dir, tmp_path):
    (run_dir / "evaluation" / "results.json").unlink()
    (run_dir / "metrics.csv").unlink()
    out = build_report(run_dir, tmp_path / "elsewhere" / "r.html")
    page = Page(out.read_text())
    assert "Not known yet" in page.by_section["verdict"]
    assert "No closed-loop evaluation yet" in page.by_section["success"]
    assert "No metrics.csv" in page.by_section["training"]


def test_an_evaluation_alone_is_enough(run_dir, tmp_path):
    (run_dir / "config.yaml").unlink()
    (run_dir / "metrics.csv").unlink()
    page = Page(build_report(run_dir).read_text())
    assert "57 of 60" in page.by_section["verdict"]
    assert "No config.yaml" in page.by_section["training"]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.8])
def test_the_verdict_never_promises_more_than_the_interval(run_dir, share):
    path = run_dir / "evaluation" / "results.json"
    result = EvaluationResult.load(path)
    value = result.to_dict()
    value["episodes"] = [row for row in value["episodes"] if row["policy"] != "checkpoint"]
    value["episodes"] = [vars(row) for row in episodes("checkpoint", share)] + value["episodes"]
    EvaluationResult.from_dict(value).save(path)
    headline = Page(build_report(run_dir).read_text()).by_section["verdict"]
    assert "This policy does the job:" not in headline


def test_nothing_to_report_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="no such run directory"):
        build_report(tmp_path / "absent")
    with pytest.raises(ConfigError, match="nothing to report"):
        build_report(tmp_path)
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "results.json").write_text('{"schema_version": 1')
    with pytest.raises(ConfigError, match="cannot be read"):
        build_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_redaction_keeps_options_and_hides_credentials():
    config = {
        "action_key": "action",
        "state_keys": ["observation.state"],
        "max_instruction_tokens": 48,
        "image_token_id": 3,
        "hf_token": "abc",
        "WANDB_API_KEY": "abc",
        "password": None,
        "nested": [{"secret": {"a": 1}}, "https://user:hunter22@example.org/x", "hf_" + "a" * 30],
    }
    hidden = redact(config)
    kept = ("action_key", "state_keys", "max_instruction_tokens", "image_token_id", "password")
    assert {key: hidden[key] for key in kept} == {key: config[key] for key in kept}
    assert hidden["hf_token"] == hidden["WANDB_API_KEY"] == REDACTED
    assert hidden["nested"] == [{"secret": REDACTED}, f"https://{REDACTED}@example.org/x", REDACTED]
    assert "s3cr3tvalue" not in redact_text("run --trainer.logger.api_key s3cr3tvalue --api-key=s3cr3tvalue")
