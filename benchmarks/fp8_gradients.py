"""Error of the gradient in FP8 against float32: same weights, same batch, same noise. Two small policies, all recipes.

    python -m benchmarks.fp8_gradients

The bound is what bfloat16 does; the no-gain case is FP8 in every layer that has the sizes for it, action inputs and
outputs, flow time and modulations included. Emulated, so the numbers are those of any device.
"""

from __future__ import annotations

import torch

from benchmarks.timing import table
from lightning_embodied.precision import FP8Precision, propose_exclusions
from lightning_embodied.precision.recipes import RECIPES
from tests.precision.networks import cosine, gradients, relative_error, small_dit, tiny_pi05


def errors(module, loss, reference, **arguments) -> tuple[str, str]:
    plugin = FP8Precision(backend="emulated", **arguments)
    plugin.convert_module(module)
    found = gradients(module, loss)
    plugin.teardown()
    return f"{relative_error(found, reference):.4f}", f"{cosine(found, reference):.5f}"


def in_bfloat16(module, loss, reference) -> tuple[str, str]:
    def rounded(each):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(each)

    found = gradients(module, rounded)
    return f"{relative_error(found, reference):.4f}", f"{cosine(found, reference):.5f}"


def proposal_row(module, loss, bound: float) -> str:
    plugin = FP8Precision("rowwise", "emulated")
    plugin.convert_module(module)
    proposal = propose_exclusions(module, lambda: loss(module), bound)
    plugin.teardown()
    share = sum(plugin.report[name].weights for name in proposal.excluded)
    share /= sum(verdict.weights for verdict in plugin.report.values() if verdict.fp8)
    return (
        f"rowwise under {bound}: without {len(proposal.excluded)} of {len(proposal.alone)} layers "
        f"({share:.1%} of their weights) {proposal.remaining.relative:.4f}, cosine {proposal.remaining.cosine:.5f}"
    )


def main() -> None:
    for title, network in {"pi0.5, preset tiny": tiny_pi05, "DiT, three layers": small_dit}.items():
        module, loss = network()
        reference = gradients(module, loss)
        rows: list[dict[str, object]] = []
        for recipe in RECIPES:
            error, angle = errors(module, loss, reference, recipe=recipe)
            everywhere = errors(module, loss, reference, recipe=recipe, safe_defaults=False)[0]
            rows.append({"recipe": recipe, "error": error, "cosine": angle, "in every layer": everywhere})
        error, angle = in_bfloat16(module, loss, reference)
        rows.append({"recipe": "bfloat16 autocast", "error": error, "cosine": angle, "in every layer": "-"})
        table(title, rows)
        print("  " + proposal_row(module, loss, 0.04))


if __name__ == "__main__":
    main()
