"""`report.html`: one file that says whether the robot can do the job, on what data, and how sure that is.

Everything is inline (style, curves as SVG, videos as base64), without scripts or outside resources, so the file can
be mailed, archived and opened from disk on a phone. The order is the reader's: verdict, evidence, then the means.
"""

from __future__ import annotations

import base64
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from lightning_embodied.errors import ConfigError
from lightning_embodied.evaluation.charts import interval_bar, line_chart
from lightning_embodied.evaluation.redaction import redact, redact_text
from lightning_embodied.evaluation.result import EvaluationResult, write_atomically
from lightning_embodied.evaluation.run_directory import (
    Curve,
    DatasetSummary,
    find_values,
    read_config,
    read_curves,
    read_dataset,
)
from lightning_embodied.version import __version__

POLICY_LABELS = {
    "checkpoint": "this policy",
    "swapped": "this policy, told another goal",
    "expert": "scripted expert",
    "untrained": "untrained policy",
}
"""How the report and the terminal call the built-in policies."""


@dataclass(frozen=True)
class Verdict:
    """The first thing a reader sees.

    Attributes:
        tone: `good`, `fair`, `bad` or `unknown`.
        headline: One plain sentence.
        details: Sentences that support it.
    """

    tone: str
    headline: str
    details: list[str]


def build_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Writes the report of a run. Pieces that are not there (yet) are named in it.

    Args:
        run_dir: Directory of a run (`config.yaml`, `metrics.csv`, `evaluation/results.json`).
        out: File to write; default `<run_dir>/report.html`.

    Returns:
        The file written; it is replaced in one step.

    Raises:
        ConfigError: No such directory, nothing in it to report, or a file in it that cannot be read.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ConfigError("there is no such run directory", where=run_dir, mend="pass the directory `fit` wrote")
    config, curves = read_config(run_dir), read_curves(run_dir)
    results = run_dir / "evaluation" / "results.json"
    result = EvaluationResult.load(results) if results.is_file() else None
    if config is None and not curves and result is None:
        raise ConfigError(
            "there is nothing to report in this directory",
            where=run_dir,
            expected="config.yaml, metrics.csv or evaluation/results.json",
            mend="pass the directory `fit` or `evaluate` wrote",
        )
    environment = Environment(
        loader=PackageLoader("lightning_embodied.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.jinja").render(
        run=run_dir.resolve().name,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        verdict=give_verdict(result),
        dataset=_dataset_of(config, result),
        reads=_observations_read(config),
        config=None if config is None else yaml.safe_dump(redact(config), sort_keys=False, allow_unicode=True),
        charts=draw_curves(curves),
        result=result,
        rows=[] if result is None else _table(result),
        comparisons=[] if result is None else _comparisons(result),
        videos=[] if result is None else _videos(result, results.parent),
        labels=POLICY_LABELS,
        settings={} if result is None else redact(result.settings),
        versions=_versions(result),
        commands=[redact_text(line) for line in _commands(run_dir, config, result)],
    )
    return write_atomically(Path(out) if out is not None else run_dir / "report.html", page)


def give_verdict(result: EvaluationResult | None) -> Verdict:
    """Says in plain words whether the robot can do the job.

    The words follow the interval and not the rate alone: "does the job" needs the whole interval above 80 %, "cannot"
    the whole interval below 20 %; between them stands what the measured rate makes likely.
    """
    if result is None or result.subject is None:
        return Verdict("unknown", "Not known yet: this policy has not been evaluated.", [])
    name = result.subject
    rate = result.success_rate(name)
    low, high = rate.interval
    who = POLICY_LABELS.get(name, f"the policy {name}")
    cases = [
        (low >= 0.8, "good", "does the job"),
        (rate.rate >= 0.8, "good", "probably does the job"),
        (low >= 0.5, "fair", "does the job most of the time"),
        (high <= 0.2, "bad", "cannot do the job"),
        (rate.rate <= 0.2, "bad", "probably cannot do the job"),
        (high <= 0.5, "bad", "mostly fails at the job"),
        (True, "fair", "does the job some of the time"),
    ]
    tone, words = next((tone, words) for holds, tone, words in cases if holds)
    details = [
        f"It succeeded in {rate.successes} of {rate.episodes} episodes; "
        f"the true rate lies between {low:.0%} and {high:.0%} (Wilson's 95\u00a0% interval)."
    ]
    per_task = sorted(
        (result.success_rate(name, task).rate, task) for task in result.tasks if result.select(name, task)
    )
    if per_task[0][0] < per_task[-1][0]:
        details.append(f"Weakest task: {per_task[0][1]} ({result.success_rate(name, per_task[0][1])}).")
    for pair in result.comparisons():
        other = result.success_rate(pair.second)
        details.append(_versus(pair.second, other.successes, other.episodes))
    planned_starts = len({(row.task, row.seed) for row in result.episodes})
    if result.distinct_initial_states < planned_starts:
        details.insert(0, f"Only {result.distinct_initial_states} of {planned_starts} starts were distinct.")
    if not result.complete:
        details.insert(0, f"Stopped early: {len(result.episodes)} of {result.planned_episodes} episodes were run.")
    return Verdict(tone, f"{who[0].upper()}{who[1:]} {words}: {rate.rate:.0%} success.", details)


def draw_curves(curves: Mapping[str, Curve]) -> list[Markup]:
    """Draws what `metrics.csv` recorded of loss, throughput, waiting for data and padding."""
    kinds = [
        ("Loss", "loss", False),
        ("Tokens per second", "tokens", False),
        ("Share of the step spent waiting for data", "wait", True),
        ("Share of padding", "padding", True),
    ]
    charts = []
    for title, word, percent in kinds:
        chosen = {name: points for name, points in curves.items() if word in name.lower()}
        if word == "loss":  # with Lightning's `_step` and `_epoch` twins, the one with more points says it all
            chosen = {n: p for n, p in chosen.items() if not (n.endswith("_epoch") and f"{n[:-6]}_step" in chosen)}
        if chosen:
            charts.append(line_chart(chosen, title=title, percent=percent))
    return charts


def _versus(name: str, successes: int, episodes: int) -> str:
    if name == "swapped":
        return (
            f"Told another goal on the same scenes, it still reached the original goal in {successes} of {episodes}: "
            "the fewer, the more it listens to the instruction."
        )
    who = POLICY_LABELS.get(name, f"policy {name}")
    article = "An" if who[0] in "aeiou" else "The"
    return f"{article} {who} succeeded in {successes} of {episodes} from the same starts."


def _table(result: EvaluationResult) -> list[dict[str, Any]]:
    rows = []
    for task in (*result.tasks, None):
        for series, policy in enumerate(sorted(result.policies, key=lambda name: name != result.subject)):
            rate = result.success_rate(policy, task)
            if not rate.episodes:
                continue
            low, high = rate.interval
            steps = result.steps_to_success(policy, task)
            rows.append(
                {
                    "task": task,
                    "policy": POLICY_LABELS.get(policy, policy),
                    "series": series,
                    "rate": f"{rate.rate:.0%}",
                    "count": f"{rate.successes}/{rate.episodes}",
                    "interval": f"{low:.0%} to {high:.0%}",
                    "bar": interval_bar(low, rate.rate, high, series),
                    "steps": "-" if steps is None else f"{steps:.0f}",
                    "first": series == 0,
                }
            )
    return rows


def _comparisons(result: EvaluationResult) -> list[dict[str, str]]:
    return [
        {
            "pair": " against ".join(POLICY_LABELS.get(name, name) for name in (pair.first, pair.second)),
            "only_first": str(pair.only_first),
            "only_second": str(pair.only_second),
            "p": f"{pair.p_value:.2g}",
        }
        for pair in result.comparisons()
    ]


def _videos(result: EvaluationResult, folder: Path) -> list[dict[str, Any]]:
    videos = []
    for task, name in result.videos.items():
        path = folder / name
        row = next(iter(result.select(result.subject, task)), None) if result.subject else None
        if path.is_file() and row is not None:
            data = base64.b64encode(path.read_bytes()).decode("ascii")
            videos.append({"task": task, "row": row, "source": f"data:video/mp4;base64,{data}"})
    return videos


def _dataset_of(config: Mapping[str, Any] | None, result: EvaluationResult | None) -> DatasetSummary | None:
    roots = [root for root in find_values((config or {}).get("data"), "root") if isinstance(root, str)]
    if result is not None and result.training_data is not None:
        roots.append(str(result.training_data["root"]))
    return next((summary for root in roots if (summary := read_dataset(Path(root))) is not None), None)


def _observations_read(config: Mapping[str, Any] | None) -> list[str]:
    keys = find_values((config or {}).get("data"), "state_keys")
    return [str(key) for key in keys[0]] if keys and isinstance(keys[0], list) else []


def _versions(result: EvaluationResult | None) -> dict[str, str]:
    if result is not None and result.versions:
        return result.versions
    return {"lightning_embodied": __version__, "python": platform.python_version()}


def _commands(run_dir: Path, config: Mapping[str, Any] | None, result: EvaluationResult | None) -> list[str]:
    commands = []
    if config is not None:
        commands.append(f"lightning-embodied fit --config {run_dir / 'config.yaml'}")
    if result is not None:
        s = result.settings
        flags = [
            f"--{name} {_flag(s[name])}" for name in ("env_id", "tasks", "episodes_per_task", "first_seed") if name in s
        ]
        flags += [f"--{name} {_flag(s[name])}" for name in ("horizon", "execute_steps") if s.get(name) is not None]
        commands.append(" ".join([f"lightning-embodied evaluate --checkpoint {run_dir}", *flags]))
    return [*commands, f"lightning-embodied report {run_dir}"]


def _flag(value: object) -> str:
    return "'[" + ", ".join(str(item) for item in value) + "]'" if isinstance(value, list | tuple) else str(value)
