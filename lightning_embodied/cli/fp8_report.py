"""`lightning-embodied fp8-report`: what FP8 would cost a run's gradient, layer by layer, and which layers to leave out.

Takes the configuration of a `fit` as it is, builds policy and data, and measures on the first training batch. Nothing
is trained and nothing written, unless a file for the numbers is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_embodied.cli.config_files import resolve_config
from lightning_embodied.cli.lightning_cli import EmbodiedCLI
from lightning_embodied.errors import ConfigError
from lightning_embodied.models import LossTerms, PolicyModule, find_checkpoint
from lightning_embodied.models.loss import positive
from lightning_embodied.precision import (
    Backend,
    ExclusionProposal,
    FP8Precision,
    LayerHealth,
    RecipeName,
    observe,
    propose_exclusions,
)

if TYPE_CHECKING:
    from rich.table import Table


def fp8_report(
    run: str,
    *,
    bound: float = 0.04,
    recipe: RecipeName = "rowwise",
    backend: Backend = "emulated",
    exclude: Sequence[str] = (),
    safe_defaults: bool = True,
    set: Sequence[str] = (),
    rows: int = 20,
    output: str | None = None,
) -> None:
    """Measures what FP8 costs the gradient of one training batch, and proposes layers to exclude.

    Args:
        run: Configuration of a `fit`, for a policy as it starts; or a run directory, for its newest checkpoint.
        bound: Largest error of the gradient wanted, relative to its norm in high precision.
        recipe: As of `FP8Precision`.
        backend: As of `FP8Precision`; `emulated` needs no GPU.
        exclude: Patterns of layers that stay in high precision anyway.
        safe_defaults: Whether sensitive layers stay in high precision anyway.
        set: Changes to the configuration, such as `data.batch_size=8`.
        rows: How many layers to show, worst first.
        output: File to write all numbers to, as JSON.
    """
    from rich.console import Console

    plugin = FP8Precision(recipe, backend, exclude=exclude, safe_defaults=safe_defaults)
    proposal, health = _measured(run, set, plugin, bound)
    Console().print(report_table(proposal, health, rows))
    print(_conclusion(proposal, plugin))
    if output is not None:
        _write(Path(output), proposal, health, plugin)
        print(f"written to {output}")


def _measured(
    run: str, changes: Sequence[str], plugin: FP8Precision, bound: float
) -> tuple[ExclusionProposal, dict[str, LayerHealth]]:
    """What the first training batch of a run says."""
    directory = Path(run).is_dir()
    measured = _Measure(bound, find_checkpoint(run) if directory else None)
    built = _built(str(Path(run) / "config.yaml") if directory else run, changes)
    trainer = Trainer(
        devices=1,
        max_steps=1,
        plugins=plugin,
        callbacks=[measured],
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with suppress(_MeasuredError):
        trainer.fit(built.model, datamodule=built.datamodule)
    if measured.proposal is None:
        raise ConfigError("the data has no training batch", where=run)
    return measured.proposal, measured.health


def _write(path: Path, proposal: ExclusionProposal, health: dict[str, LayerHealth], plugin: FP8Precision) -> None:
    """All numbers as JSON."""
    layers = {name: asdict(layer) | {"alone": proposal.alone[name]} for name, layer in health.items()}
    verdicts = {name: asdict(verdict) for name, verdict in plugin.report.items()}
    names = {"recipe": plugin.recipe, "backend": plugin.backend}
    content = {**names, **asdict(proposal), "layers": layers, "verdicts": verdicts}
    path.write_text(json.dumps(content, indent=2) + "\n")


def report_table(proposal: ExclusionProposal, health: dict[str, LayerHealth], rows: int) -> Table:
    """One row a layer, worst first.

    Args:
        proposal: Errors of the gradient.
        health: Errors of the layers.
        rows: How many to show.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("layer", overflow="fold")
    for column in (
        "gradient,\nit alone",
        "output",
        "weight\ngradient",
        "flushed",
        "saturated",
        "amax input, weight, grad",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    worst = sorted(health, key=lambda name: -proposal.alone[name])
    for name in worst[:rows]:
        layer = health[name]
        numbers = [proposal.alone[name], layer.output_error, layer.weight_grad_error]
        shares = [max(layer.flushed.values()), max(layer.saturated.values())]
        table.add_row(
            Text(name, "bold" if name in proposal.excluded else ""),
            *("-" if number is None else f"{number:.4f}" for number in numbers),
            *(f"{share:.2%}" for share in shares),
            "  ".join(f"{value:.2g}" for value in layer.amax.values()),
        )
    if len(worst) > rows:
        table.add_row(f"… and {len(worst) - rows} more (--rows)")
    return table


def _conclusion(proposal: ExclusionProposal, plugin: FP8Precision) -> str:
    total, remaining, names = proposal.total, proposal.remaining, proposal.excluded
    lines = [
        f"{len(proposal.alone)} layers in FP8 ({plugin.recipe}): gradient error {total.relative:.4f}, "
        f"cosine {total.cosine:.5f}; bound {proposal.bound:g}"
    ]
    if not names:
        return "\n".join([*lines, "no layer needs to be excluded"])
    weights = sum(verdict.weights for verdict in plugin.report.values() if verdict.fp8)
    share = sum(plugin.report[name].weights for name in names) / weights
    lines += [
        f"without {len(names)} of them ({share:.1%} of their weights): {remaining.relative:.4f}, "
        f"cosine {remaining.cosine:.5f}",
        "",
        "trainer:",
        "  plugins:",
        "    - class_path: FP8Precision",
        "      init_args:",
        f"        recipe: {plugin.recipe}",
        "        exclude:",
        *(f"          - {name}" for name in (*plugin.selection.exclude, *names)),
    ]
    return "\n".join(lines)


class _BuildOnly(EmbodiedCLI):
    """Builds what `fit` needs and stops there."""

    def fit(self, **kwargs: Any) -> None:
        pass


def _built(config: str, changes: Sequence[str]) -> _BuildOnly:
    for change in changes:
        if "=" not in change:
            raise ConfigError("no value is given", where="--set", found=change, expected="key=value")
    options = [f"--{change}" for change in changes]
    return _BuildOnly(args=["fit", "--config", resolve_config(config), "--wandb=disabled", *options])


class _MeasuredError(Exception):
    """Ends a run that has measured: a callback has no other way to keep Lightning from the step itself."""


class _Measure(Callback):
    """Measures on the first batch, and ends the run there."""

    def __init__(self, bound: float, checkpoint: Path | None) -> None:
        self.bound, self.checkpoint = bound, checkpoint
        self.proposal: ExclusionProposal | None = None
        self.health: dict[str, LayerHealth] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loads the weights; whatever else a checkpoint holds does not matter here."""
        if self.checkpoint is not None:
            content = torch.load(self.checkpoint, map_location=pl_module.device, weights_only=True)
            pl_module.load_state_dict(content["state_dict"])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measures."""
        loss = _loss_of(pl_module, batch, batch_idx)
        with trainer.precision_plugin.train_step_context():
            with observe(pl_module) as observation:
                torch.autograd.backward(loss())
            self.health = observation.results()
            pl_module.zero_grad()
            self.proposal = propose_exclusions(pl_module, loss, self.bound)
        raise _MeasuredError


def _loss_of(module: LightningModule, batch: Any, batch_idx: int) -> Callable[[], Tensor]:
    """The loss that training would go down, without what a training step does beside it."""
    if isinstance(module, PolicyModule):

        def mean() -> Tensor:
            terms: LossTerms = module(batch)
            return terms.total / positive(terms.count)

        return mean

    def step() -> Tensor:
        output = module.training_step(batch, batch_idx)
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise ConfigError(
                "the training step returns no loss", where=type(module).__name__, found=type(output).__name__
            )
        return loss

    return step
