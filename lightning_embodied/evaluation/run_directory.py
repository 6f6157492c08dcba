"""What a run directory tells the report: configuration, curves and the data it was trained on.

Files are those of Lightning (`config.yaml` of the CLI, `metrics.csv` of the `CSVLogger`) and of LeRobot
(`meta/info.json`); `meta/collection.json` adds how many demonstrations failed. What is absent is None, not an error.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_embodied.errors import ConfigError

Curve = list[tuple[float, float]]
"""`(step, value)` in ascending steps."""


@dataclass(frozen=True)
class DatasetSummary:
    """What the policy learnt from.

    Attributes:
        root: Where the dataset lies.
        episodes: Number of episodes.
        frames: Number of frames.
        fps: Frames per second.
        robot_type: Kind of robot, if recorded.
        tasks: The instructions.
        cameras: Camera name to picture size `(height, width)`.
        vectors: Names of the numeric features a policy may read.
        failed_demonstrations: Demonstrations that failed and were not kept; None if not recorded.
    """

    root: Path
    episodes: int
    frames: int
    fps: float
    robot_type: str | None
    tasks: list[str]
    cameras: dict[str, tuple[int, int]]
    vectors: list[str]
    failed_demonstrations: int | None


def find_newest(run_dir: Path, name: str) -> Path | None:
    """The file of this name in a run directory; below it, the most recently written one."""
    direct = run_dir / name
    if direct.is_file():
        return direct
    return max(run_dir.rglob(name), key=lambda path: path.stat().st_mtime, default=None)


def read_config(run_dir: Path) -> dict[str, Any] | None:
    """The resolved configuration of a run.

    Raises:
        ConfigError: There is one, and it is not a YAML mapping.
    """
    path = find_newest(run_dir, "config.yaml")
    if path is None:
        return None
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError("the run's configuration cannot be read", where=path, found=error) from error
    if not isinstance(config, dict):
        raise ConfigError("the run's configuration is not a mapping", where=path, found=type(config).__name__)
    return config


def find_values(config: object, key: str) -> list[Any]:
    """Every value under a key, at any depth of nested plain values."""
    found: list[Any] = []
    if isinstance(config, Mapping):
        for name, value in config.items():
            found += [value] if name == key else find_values(value, key)
    elif isinstance(config, list):
        for item in config:
            found += find_values(item, key)
    return found


def read_curves(run_dir: Path) -> dict[str, Curve]:
    """The columns of `metrics.csv` as curves over training steps.

    Returns:
        Column name to curve; columns without a finite number are left out. Of a step written twice (a resumed run)
        the later value counts.

    Raises:
        ConfigError: The file has no `step` column.
    """
    path = find_newest(run_dir, "metrics.csv")
    if path is None:
        return {}
    values: dict[str, dict[float, float]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if "step" not in (rows.fieldnames or []):
            raise ConfigError("the metrics file has no column named step", where=path, found=rows.fieldnames)
        for row in rows:
            step = _number(row.pop("step"))
            for name, text in row.items():
                value = _number(text)
                if step is not None and value is not None and name != "epoch":
                    values.setdefault(name, {})[step] = value
    return {name: sorted(points.items()) for name, points in values.items()}


def read_dataset(root: Path) -> DatasetSummary | None:
    """The summary of a LeRobot dataset from its `meta` folder; None if there is no `info.json` to read."""
    info = _read_json(root / "meta" / "info.json")
    if info is None:
        return None
    features: dict[str, dict[str, Any]] = info.get("features", {})
    cameras = {name: f["shape"] for name, f in features.items() if f.get("dtype") in ("image", "video")}
    collection = _read_json(root / "meta" / "collection.json") or {}
    failed = [n for name in ("failed_demonstrations", "failed", "discarded") for n in find_values(collection, name)]
    return DatasetSummary(
        root=root,
        episodes=int(info.get("total_episodes", 0)),
        frames=int(info.get("total_frames", 0)),
        fps=float(info.get("fps", 0)),
        robot_type=info.get("robot_type"),
        tasks=_read_tasks(root),
        cameras={name.removeprefix("observation.images."): (int(s[0]), int(s[1])) for name, s in cameras.items()},
        vectors=[name for name in features if name.startswith("observation.") and name not in cameras],
        failed_demonstrations=sum(int(n) for n in failed if isinstance(n, int)) if failed else None,
    )


def _read_tasks(root: Path) -> list[str]:
    table, lines = root / "meta" / "tasks.parquet", root / "meta" / "tasks.jsonl"
    if table.is_file():
        import pyarrow.parquet as pq

        columns = pq.read_table(table).to_pydict()  # LeRobot v3.0 keeps the instruction in pandas' index column
        return [str(text) for name in ("task", "__index_level_0__") for text in columns.get(name, [])]
    if lines.is_file():
        return [str(json.loads(line)["task"]) for line in lines.read_text(encoding="utf-8").splitlines() if line]
    return []


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError("this file cannot be read", where=path, found=error) from error
    return value if isinstance(value, dict) else None


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
