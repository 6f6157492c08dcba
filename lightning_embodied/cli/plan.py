"""`lightning-embodied plan`: what a fit YAML would cost on a thousand GPUs, worked out on this machine in a minute."""

from __future__ import annotations

import json as json_module
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from lightning_embodied.cli.plan_inputs import batch_of, build_from, fit_options, optimizer_of, sample_size, spec_of
from lightning_embodied.cli.plan_output import page_of, print_plan, to_plain
from lightning_embodied.errors import ConfigError
from lightning_embodied.models import PolicyModule
from lightning_embodied.planning import (
    META_HOURS_BETWEEN_FAILURES,
    Cluster,
    PlanRequest,
    Storage,
    make_plan,
    parse_rate,
)
from lightning_embodied.planning.sharding import Strategy


def plan(
    model: PolicyModule,
    data: LightningDataModule,
    *,
    ranks: int = 1024,
    gpu: str = "h200",
    network: str = "3.2Tb",
    gpus_per_node: int = 8,
    micro_batch: int | None = None,
    strategies: list[Strategy] | None = None,
    units: list[str] | None = None,
    shard_size: int | None = None,
    cameras: int = 2,
    picture_size: tuple[int, int] = (480, 640),
    state_dim: int = 8,
    action_dim: int = 7,
    instruction: str = "pick up the red cube and place it in the bowl on the left",
    encoded_bytes_per_pixel: float = 0.1,
    storage_node: str = "5GB",
    storage_total: str = "100GB",
    hours_between_failures: float = META_HOURS_BETWEEN_FAILURES,
    restart_seconds: float = 120.0,
    measured: dict[int, float] | None = None,
    output: str | None = None,
    json: bool = False,
    trainer: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    lr_scheduler: dict[str, Any] | None = None,
    seed_everything: bool | int | None = None,
    wandb: str | None = None,
    ckpt_path: str | None = None,
) -> None:
    """Plans a training run: memory, communication, step time, scaling, storage and goodput, and which strategy to take.

    Takes the YAML of `fit` and the options below. Nothing is allocated or sent: the policy is built on the meta device,
    sharded by torch's own code over an imagined process group, and one step of it is run without numbers.

    Args:
        model: The policy, as for `fit`. Pretrained weights are not read.
        data: The DataModule, as for `fit`. If its dataset is here, features are read from it; else the options
            `cameras` to `action_dim` describe it.
        ranks: GPUs.
        gpu: a100, h100, h200, b200 or l40s.
        network: Rate between a node and the others, such as 3.2Tb (bits) or 400GB (bytes) a second.
        gpus_per_node: GPUs in a node.
        micro_batch: Samples of a rank's forward pass; default: `batch_size` of the DataModule.
        strategies: Which of ddp, hsdp and fsdp to look at, ddp always; default: fsdp only where hsdp does not fit or
            there is but one node.
        units: Classes of the layers that FSDP gathers one at a time; default: the repeated ones.
        shard_size: Ranks that share one copy under HSDP; default: those of a node.
        cameras: Pictures of a sample, if there is no dataset.
        picture_size: Height and width of the recorded pictures, if there is no dataset.
        state_dim: Numbers of the state, if there is no dataset.
        action_dim: Numbers of an action, if there is no dataset.
        instruction: Its length in tokens is that of every instruction.
        encoded_bytes_per_pixel: Size of the recorded videos.
        storage_node: Rate at which one node writes checkpoints.
        storage_total: Rate that the storage takes from all nodes together.
        hours_between_failures: Of one GPU; default: as in Llama 3's training on 16,384 H100.
        restart_seconds: From a failure to the next step, without reading the checkpoint.
        measured: Seconds of a step by number of GPUs; the scaling curve is then fitted to them.
        output: Directory for `plan.json` and `plan.html`.
        json: Print the plan as JSON instead of tables.
        trainer: As for `fit`; `precision` and `accumulate_grad_batches` count.
        optimizer: As for `fit`; its states are counted.
        lr_scheduler: As for `fit`; not used.
        seed_everything: As for `fit`; not used.
        wandb: As for `fit`; not used.
        ckpt_path: As for `fit`; not used.
    """
    features, stats = spec_of(
        data, cameras=cameras, picture_size=picture_size, state_dim=state_dim, action_dim=action_dim
    )
    policy = fit_options(model, data, trainer or {})
    encoded, build = build_from(policy, features, stats, instruction)
    micro_batch = micro_batch or policy.batch_size
    request = PlanRequest(
        ranks=ranks,
        cluster=Cluster.of(gpu, network, gpus_per_node),
        micro_batch=micro_batch,
        sample=sample_size(features, encoded, encoded_bytes_per_pixel),
        storage=Storage(parse_rate(storage_node, "storage_node"), parse_rate(storage_total, "storage_total")),
        accumulate=policy.accumulate,
        precision=policy.precision,
        strategies=None if strategies is None else tuple(strategies),
        units=None if units is None else tuple(units),
        shard_size=shard_size,
        hours_between_failures=hours_between_failures,
        restart_seconds=restart_seconds,
        measured=measured or {},
    )
    answer = make_plan(build, lambda size: batch_of(encoded, size), request, optimizer=optimizer_of(optimizer))
    plain = {"model": type(model).__name__, "tokens_per_sample": len(encoded.input_ids), **to_plain(answer)}
    if json:
        print(json_module.dumps(plain, indent=2))
    else:
        print_plan(answer, type(model).__name__, len(encoded.input_ids))
    if output is not None:
        _write(Path(output), {"plan.json": json_module.dumps(plain, indent=2), "plan.html": page_of(answer, plain)})


def _write(folder: Path, texts: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            part = folder / f"{name}.part"
            part.write_text(text + "\n")
            os.replace(part, folder / name)
    except OSError as error:
        raise ConfigError("the plan cannot be written", where="output", found=error) from error
