"""What `quantize` measures on: frames of the run's dataset, and the evaluation the run was given last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from lightning.pytorch import LightningDataModule

from lightning_embodied.cli.commands import command_parser
from lightning_embodied.cli.config_files import resolve_config
from lightning_embodied.cli.parsing import CommandParser
from lightning_embodied.data import LeRobotDataModule
from lightning_embodied.errors import ConfigError, EmbodiedError
from lightning_embodied.evaluation import EvaluationConfig, EvaluationResult
from lightning_embodied.models import PolicySpec
from lightning_embodied.packing import PackedBatch

_BATCH = 32


@dataclass(frozen=True)
class Frames:
    """Recorded frames, packed.

    Attributes:
        held_out: Batches of episodes that were not trained on.
        training: Batches of those that were.
        reason: Why there are none.
    """

    held_out: list[PackedBatch]
    training: list[PackedBatch]
    reason: str = ""


def frames_of(run: Path, data_root: str | None, spec: PolicySpec, *, held_out: int, training: int) -> Frames:
    """Frames of a run's dataset, evenly spread over its episodes.

    Args:
        run: The run directory.
        data_root: Where the dataset lies now; None for where the run found it.
        spec: Of the policy; says what it was trained on.
        held_out: How many of episodes that were not trained on.
        training: How many of those that were.

    Raises:
        EmbodiedError: Training frames are asked for, or `data_root` is given, and the dataset cannot be used.
    """
    try:
        data = _datamodule(run, data_root)
        data.setup("validate")
        _check_split(data, spec)
        held = [] if data.val_dataset is None else _batches(data, data.val_dataset, held_out)
        return Frames(held, _batches(data, data.train_dataset, training), "" if held else "no episodes were held out")
    except EmbodiedError as error:
        if training or data_root is not None:
            raise
        return Frames([], [], f"{error.problem} ({error.where or error.found})")


def evaluation_of(run: Path, config: str | None, episodes_per_task: int | None) -> EvaluationConfig | None:
    """The evaluation to run: the one asked for, or else the run's last one; None if there is neither.

    Args:
        run: The run directory.
        config: Configuration of an `evaluate`.
        episodes_per_task: Changes its number of episodes.
    """
    results = run / "evaluation" / "results.json"
    if config is not None:
        parser = command_parser("evaluate")
        options = parser.instantiate_classes(parser.parse_args(["--checkpoint=.", "--config", resolve_config(config)]))
        known = EvaluationConfig.__dataclass_fields__
        settings = {key: value for key, value in options.as_dict().items() if key in known}
    elif results.is_file():
        settings = EvaluationResult.load(results).settings
    else:
        return None
    chosen = replace(EvaluationConfig(**settings), policies=("checkpoint",), videos=False)
    if chosen.dataset is not None and not Path(chosen.dataset).exists():
        print(f"starts are not checked to be unseen: the dataset {chosen.dataset} is not here")
        chosen = replace(chosen, dataset=None)
    return chosen if episodes_per_task is None else replace(chosen, episodes_per_task=episodes_per_task)


def _datamodule(run: Path, data_root: str | None) -> LeRobotDataModule:
    path = run / "config.yaml"
    if not path.is_file():
        raise ConfigError("the run has no configuration that says what it was trained on", where=path)
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    section = config.get("data") or {}
    arguments = section.setdefault("init_args", {})
    if arguments.get("seed") is None and isinstance(config.get("seed_everything"), int):
        arguments["seed"] = int(config["seed_everything"])  # as the run had it: it decides what was held out
    if data_root is not None:
        arguments["root"] = data_root
    parser = CommandParser(exit_on_error=False)
    parser.add_argument("--data", type=LightningDataModule)
    data = parser.instantiate_classes(parser.parse_object({"data": section})).data
    if not isinstance(data, LeRobotDataModule) or data.collator is None:
        raise ConfigError(
            "the run's data are no packed LeRobot dataset", where=f"{path}: data", found=section.get("class_path")
        )
    return data


def _check_split(data: LeRobotDataModule, spec: PolicySpec) -> None:
    """Frames count as held out only if the policy was trained on the other episodes, which its statistics tell."""
    here, trained = data.stats[spec.action_key], spec.stats[spec.action_key]
    same = here.count == trained.count and np.allclose(here.mean, trained.mean, rtol=1e-9, atol=1e-12)
    if data.dataset_fingerprint != spec.dataset_fingerprint or not same:
        raise ConfigError(
            "these are not the data, or not the split, that the policy was trained on",
            where=data.root,
            found=f"fingerprint {data.dataset_fingerprint[:12]}, {here.count} training frames",
            expected=f"fingerprint {spec.dataset_fingerprint[:12]}, {trained.count} training frames",
        )


def _batches(data: LeRobotDataModule, dataset: Any, count: int) -> list[PackedBatch]:
    """Evenly spaced frames, in batches."""
    total = min(count, len(dataset))
    chosen = [len(dataset) * number // total for number in range(total)]
    collate = data.collator
    assert collate is not None  # noqa: S101 - for the type checker
    parts: Sequence[list[int]] = [chosen[start : start + _BATCH] for start in range(0, total, _BATCH)]
    return [collate([dataset[index] for index in part]) for part in parts]
