"""`lightning-embodied stats`: a dataset's exact statistics as a table, and as `stats.json` when asked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_embodied.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from lightning_embodied.features import Feature, FeatureStats

_COLUMNS = ("mean", "std", "min", "q01", "q50", "q99", "max")


def stats(
    root: str,
    *,
    keys: list[str] | None = None,
    episodes: list[int] | None = None,
    images: bool = False,
    output: str | None = None,
) -> None:
    """Computes the exact statistics of a LeRobot dataset's features and prints them.

    Quantiles are those of all frames together, not averages over episodes.

    Args:
        root: Directory of the dataset.
        keys: Features to describe, such as `action`; all but pictures when not given.
        episodes: Numbers of the episodes to use; all when not given.
        images: Also describe pictures, which decodes every video.
        output: File to write the statistics to, as LeRobot's `meta/stats.json` has them.
    """
    from rich.console import Console

    from lightning_embodied.data import LeRobotDataset, compute_stats

    dataset = LeRobotDataset(root, episodes=episodes)
    chosen = keys if keys is not None else _default_keys(dataset.features, images=images)
    computed = compute_stats(dataset, chosen)
    print(f"{root}: {len(dataset):,} frames, {len(dataset.episodes):,} episodes, {dataset.fps} frames/s")
    Console().print(stats_table(dataset.features, computed))
    if output is not None:
        _write(Path(output), computed)
        print(f"written to {output}")


def stats_table(features: dict[str, Feature], computed: dict[str, FeatureStats]) -> Table:
    """One row per dimension of each feature.

    Args:
        features: The dataset's features; give the dimensions' names.
        computed: Their statistics.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for key, stat in computed.items():
        columns = [np.ravel(getattr(stat, column)) for column in _COLUMNS]
        table.add_row(Text(key, "bold"))
        for i, name in enumerate(_names(features[key], columns[0].size)):
            table.add_row(Text(f"  {name}"), *(f"{column[i]:.3g}" for column in columns))
        table.add_section()
    return table


def _default_keys(features: dict[str, Feature], *, images: bool) -> list[str]:
    bookkeeping = ("timestamp", "frame_index", "episode_index", "index", "task_index")
    return [
        key
        for key, feature in features.items()
        if key not in bookkeeping and feature.dtype != "string" and (images or not feature.is_visual)
    ]


def _names(feature: Feature, size: int) -> list[str]:
    names = feature.names
    if feature.is_visual:
        names = ["red", "green", "blue"]
    elif isinstance(names, dict):
        names = next(iter(names.values()), None)
    if isinstance(names, Iterable) and not isinstance(names, str) and len(listed := [str(n) for n in names]) == size:
        return listed
    return [str(i) for i in range(size)]


def _write(path: Path, computed: dict[str, FeatureStats]) -> None:
    text = json.dumps({key: stat.to_dict() for key, stat in computed.items()}, indent=2)
    fresh = path.with_name(path.name + ".part")
    try:
        fresh.write_text(text + "\n")
        os.replace(fresh, path)
    except OSError as error:
        raise ConfigError("the statistics cannot be written", where="output", found=error) from error
