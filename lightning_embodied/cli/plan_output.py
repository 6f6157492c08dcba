"""A plan for the terminal, as plain values for JSON, and as one HTML page without outside resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_embodied.planning import Candidate, Plan

if TYPE_CHECKING:
    from rich.table import Table

Rows = list[tuple[str, ...]]
_GIB = 2**30
_SHORT = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduce"}


def to_plain(value: Any) -> Any:
    """A plan as numbers, strings, lists and dicts; keys name their units as the attributes' documentation does."""
    if is_dataclass(value):
        plain = {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
        if isinstance(value, Candidate):
            plain = {"strategy": value.sharding.label, **plain}
        return plain
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def print_plan(plan: Plan, model: str, tokens: int) -> None:
    """Prints a plan as tables."""
    from rich.console import Console

    console = Console()
    console.print(headline(plan, model, tokens), highlight=False)
    for title, rows in sections(plan).items():
        console.print(_table(title, rows))
    console.print(verdict(plan), highlight=False)


def headline(plan: Plan, model: str, tokens: int) -> str:
    """What was planned, in two lines."""
    request, cluster = plan.request, plan.request.cluster
    return (
        f"{model}: {plan.parameters / 1e6:,.1f} million parameters, {plan.trainable / 1e6:,.1f} train; "
        f"{tokens} tokens a sample, {plan.flops / request.micro_batch / 1e12:.3g} TFLOP\n"
        f"{request.ranks:,} x {cluster.gpu.name} in nodes of {cluster.gpus_per_node}, "
        f"{cluster.network * 8 / 1e12:g} Tb/s a node; micro-batch {request.micro_batch} x {request.accumulate}, "
        f"{request.precision}"
    )


def verdict(plan: Plan) -> str:
    """What to take and why."""
    best = plan.recommended
    lines = ["take: nothing fits"]
    if best is not None:
        batch = max(best.largest_micro_batch, 1)
        lines = [f"take: {best.sharding.label}, micro-batch up to {batch}"]
        if best.sharding.strategy == "ddp":
            lines[0] += f", bucket_cap_mb {best.sharding.bucket_mb:g}, gradient_as_bucket_view true"
        elif best.sharding.units:
            lines[0] += f", units [{', '.join(best.sharding.units)}]"
    return "\n".join([*lines, *(f"  {reason}" for reason in plan.reasons)])


def sections(plan: Plan) -> dict[str, Rows]:
    """Titles to tables; the first row of each is its header."""
    return {
        "Memory of a rank, GiB": _memory(plan),
        "An optimizer step": _step(plan),
        "Scaling": _scaling(plan),
        "Storage and failures": _storage(plan),
    }


def _memory(plan: Plan) -> Rows:
    rows: Rows = [("", "params", "grads", "optim", "activ", "peak", "fits", "max batch")]
    for candidate in plan.candidates:
        memory = candidate.memory
        parts = (memory.parameters, memory.gradients + memory.buckets, memory.optimizer, memory.activations)
        numbers = [f"{part / _GIB:.3g}" for part in (*parts, memory.peak)]
        rows.append(
            (candidate.sharding.label, *numbers, "yes" if candidate.fits else "no", str(candidate.largest_micro_batch))
        )
    return rows


def _step(plan: Plan) -> Rows:
    rows: Rows = [("", "step ms", "compute", "waiting", "samples/s", "GB sent", "collectives")]
    for candidate in plan.candidates:
        time = candidate.time
        calls = ", ".join(f"{traffic.calls} {_SHORT[kind]}" for kind, traffic in time.traffic.items())
        sent = sum(traffic.sent for traffic in time.traffic.values()) / 1e9
        times = [f"{1e3 * seconds:.4g}" for seconds in (time.seconds, time.compute, time.exposed)]
        rows.append((candidate.sharding.label, *times, f"{candidate.samples_per_second:,.0f}", f"{sent:.3g}", calls))
    return rows


def _scaling(plan: Plan) -> Rows:
    rows: Rows = [("GPUs", "step ms", "samples/s", "efficiency")]
    return rows + [
        (
            f"{point.ranks:,}",
            f"{1e3 * point.seconds:.4g}",
            f"{point.samples_per_second:,.0f}",
            f"{point.efficiency:.1%}",
        )
        for point in plan.scaling
    ]


def _storage(plan: Plan) -> Rows:
    shown = plan.recommended or min(plan.candidates, key=lambda candidate: candidate.memory.peak)
    saves, loader = shown.checkpoint, plan.loader
    kinds = (("synchronous", plan.goodput), ("asynchronous", plan.goodput_async))
    rows: Rows = [
        ("", ""),
        ("read by the loaders", f"{loader.read_rate / 1e9:.2f} GB/s, {loader.iops:,.0f} reads/s"),
        ("decoded in a node", f"{loader.frames_per_node:,.0f} frames/s"),
        ("a checkpoint", f"{saves.size / 1e9:.3g} GB, written in {saves.write_seconds:.1f} s, copied to the host in "
                         f"{saves.stall_seconds:.2f} s, read in {saves.load_seconds:.1f} s"),
        ("a failure", f"every {plan.goodput.hours_between_failures:.1f} h"),
    ]  # fmt: skip
    rows += [
        (f"{name} checkpoints", f"every {found.interval / 60:.1f} min: {found.share:.1%} of the time trains")
        for name, found in kinds
    ]
    if plan.law is not None:
        rows.append(("fitted step", f"{plan.law.fixed:.3g} s + {1e3 * plan.law.per_rank:.3g} ms a GPU"))
    return rows


def _table(title: str, rows: Rows) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for number, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if number == 0 or name in ("", "collectives") else "right")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def page_of(plan: Plan, plain: Mapping[str, Any]) -> str:
    """The plan as one HTML page."""
    from markupsafe import escape

    from lightning_embodied.evaluation.charts import line_chart

    curve = {"samples/s": [(point.ranks, point.samples_per_second) for point in plan.scaling]}
    first = plan.scaling[0]
    curve["perfect scaling"] = [
        (point.ranks, point.ranks * first.samples_per_second / first.ranks) for point in plan.scaling
    ]
    charts = [
        line_chart(curve, title="Samples/s against GPUs"),
        line_chart(
            {"efficiency": [(point.ranks, point.efficiency) for point in plan.scaling]},
            title="Efficiency against GPUs",
            percent=True,
        ),
    ]
    tables = "".join(f"<h2>{escape(title)}</h2>{_html_table(rows)}" for title, rows in sections(plan).items())
    head = escape(headline(plan, str(plain["model"]), int(plain["tokens_per_sample"])))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Plan: {escape(plain["model"])}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><main>'
        f"<h1>{escape(verdict(plan).splitlines()[0])}</h1><p>{head}</p>"
        f"<ul>{''.join(f'<li>{escape(reason)}</li>' for reason in plan.reasons)}</ul>"
        f'<div class="charts">{"".join(charts)}</div>{tables}</main></html>'
    )


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    from markupsafe import escape

    lines = [
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in (("th" if number == 0 else "td", row) for number, row in enumerate(rows))
    ]
    return f"<table>{''.join(lines)}</table>"


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#1c1d1f;"
    "background:#fcfcfa}table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:right;"
    "border-bottom:1px solid #e3e3de;font-weight:normal}th{color:#63666b}td:first-child,th:first-child{text-align:left}"
    ".charts{display:flex;flex-wrap:wrap}figure{margin:1rem 1rem 0 0;width:29rem}svg{width:100%}.grid{stroke:#dfdfd9}"
    "text{font-size:11px;fill:#63666b}.line{fill:none;stroke-width:2}.line.s0{stroke:#1f5fbf}.line.s1{stroke:#17805a}"
    ".key{margin-left:1rem}.key i{display:inline-block;width:.8em;height:.2em;margin-right:.3em;vertical-align:middle}"
    "i.s0{background:#1f5fbf}i.s1{background:#17805a}"
)
