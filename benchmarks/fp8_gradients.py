"""Error of the gradient in FP8 against float32: same weights, same batch, same noise. Two small policies, all recipes.

    python -m benchmarks.fp8_gradients

The bound is what bfloat16 does; the no-gain case is FP8 in every layer that has the sizes for it, action inputs and
outputs, flow time and modulations included. Also: where the error comes from, other random weights, a deeper network,
and how much of the published networks the default exclusions leave in FP8. Emulated: the numbers of any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from benchmarks.timing import table
from lightning_embodied.models.groot.policy import GrootNetwork
from lightning_embodied.models.groot.sizes import PRESETS as GROOT_PRESETS
from lightning_embodied.models.pi.network import PiNetwork
from lightning_embodied.models.pi.sizes import PRESETS as PI_PRESETS
from lightning_embodied.precision import FP8Precision, LayerVerdict
from lightning_embodied.precision.products import EmulatedProducts
from lightning_embodied.precision.recipes import RECIPES
from tests.precision.networks import cosine, gradients, relative_error, small_dit, tiny_pi05

PRODUCTS = ("output", "grad_input", "grad_weight")
LEFT_OUT = {
    "inputs, outputs, time, modulations": ["*action_*", "*time_mlp*", "*norm.dense"],
    "and v_proj": ["*v_proj"],
    "and o_proj, out_proj": ["*o_proj", "*.out_proj"],
    "and the expert's first block": ["*gemma_expert.model.layers.0.*"],
}


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


def where_it_comes_from() -> list[dict[str, object]]:
    """The error on pi0.5 as more layers are left out, and with one of the three products alone in FP8."""
    module, loss = tiny_pi05()
    reference = gradients(module, loss)
    excluded: list[str] = []
    rows = []
    for what, patterns in LEFT_OUT.items():
        excluded += patterns
        arguments = {"exclude": excluded, "safe_defaults": False}
        row = {recipe: errors(module, loss, reference, recipe=recipe, **arguments)[0] for recipe in RECIPES}
        for name in PRODUCTS:
            with only_product(name):
                row[f"{name} alone"] = errors(module, loss, reference, recipe="rowwise", **arguments)[0]
        rows.append({"left out": what, **row})
    return rows


@contextmanager
def only_product(name: str) -> Iterator[None]:
    """Within this context, emulated products other than the named one are computed in high precision."""
    exact = {
        "output": lambda self, x, w, amax: x @ w.t(),
        "grad_input": lambda self, g, w, amax: g @ w,
        "grad_weight": lambda self, g, x, amax: g.t() @ x,
    }
    before = {other: getattr(EmulatedProducts, other) for other in PRODUCTS}
    try:
        for other in set(PRODUCTS) - {name}:
            setattr(EmulatedProducts, other, exact[other])
        yield
    finally:
        for other, product in before.items():
            setattr(EmulatedProducts, other, product)


def other_networks() -> list[dict[str, object]]:
    rows = []
    for depth, seeds in ((3, range(6)), (9, range(2))):
        for seed in seeds:
            module, loss = tiny_pi05(depth=depth, seed=100 * seed)
            reference = gradients(module, loss)
            found = {recipe: errors(module, loss, reference, recipe=recipe)[0] for recipe in RECIPES}
            rows.append({"layers": depth, "weights": seed, **found})
    return rows


def shares() -> list[dict[str, object]]:
    """Share of the weights of linear layers in FP8, and for pi0.5 of the multiplications with them."""
    networks = {
        "pi0.5": lambda: PiNetwork(PI_PRESETS["base"], adaptive=True),
        "GR00T N1.5": lambda: GrootNetwork(GROOT_PRESETS["base"]),
    }
    rows = []
    for name, build in networks.items():
        with torch.device("meta"):
            network = build()
        plugin = FP8Precision("rowwise", "emulated")
        plugin.convert_module(network)
        unread = getattr(network, "unread_parameters", ())
        verdicts = [v for v in plugin.report.values() if f"{v.name}.weight" not in unread and "lm_head" not in v.name]
        row = {"network": name, "weights": share(verdicts, lambda verdict: 1)}
        rows.append(row | {"multiplications": share(verdicts, pi05_tokens) if name == "pi0.5" else "-"})
    return rows


def share(verdicts: Sequence[LayerVerdict], rows: Callable[[LayerVerdict], int]) -> str:
    done = {fp8: sum(v.weights * rows(v) for v in verdicts if v.fp8 is fp8) for fp8 in (True, False)}
    return f"{done[True] / sum(done.values()):.1%}"


def pi05_tokens(verdict: LayerVerdict) -> int:
    """Rows that a layer multiplies for one observation of three cameras, a prompt of 50 tokens and a chunk of 50."""
    if "vision_tower" in verdict.name or "projector" in verdict.name:
        return 3 * 256
    if "language_model" in verdict.name:
        return 3 * 256 + 50
    return 1 if "norm" in verdict.name or "time" in verdict.name else 50


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
    table("pi0.5: where the error comes from", where_it_comes_from())
    table("pi0.5, other weights and depths: error", other_networks())
    table("published sizes: share in FP8", shares())


if __name__ == "__main__":
    main()
