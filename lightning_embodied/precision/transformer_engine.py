"""The Transformer Engine backend: its `Linear` computes, on the layer's own weight, and owns no parameter of ours.

Its layers are kept beside the module, not in it, so names, checkpoints and sharding do not know them. Every call sees
the weight as it is then, which under FSDP2 is the gathered one. Imported only here and only when asked for: a half
installed Transformer Engine raises RuntimeError on import.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

from torch import Tensor, nn

from lightning_embodied.errors import import_extra

_RECIPES = {
    "tensorwise": "Float8CurrentScaling",
    "delayed": "DelayedScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


class EngineLinear:
    """Computes one layer with Transformer Engine.

    Args:
        layer: Of which only the sizes are read.

    Raises:
        MissingExtraError: Transformer Engine cannot be imported.
    """

    def __init__(self, layer: nn.Linear) -> None:
        engine = import_extra("transformer_engine.pytorch", "cuda")
        self._linear = engine.Linear(
            layer.in_features, layer.out_features, bias=False, params_dtype=layer.weight.dtype, device="meta"
        )

    def __call__(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Rows `[M, K]` and weight `[N, K]` to `[M, N]`."""
        self._linear._parameters["weight"] = weight
        try:
            return cast(Tensor, self._linear(rows))
        finally:
            self._linear._parameters["weight"] = None

    def state(self) -> Any:  # noqa: ANN401
        """Its scaling state, in its own format."""
        return self._linear.get_extra_state()

    def load_state(self, state: Any) -> None:  # noqa: ANN401
        """Takes over a scaling state."""
        self._linear.set_extra_state(state)


def engine_context(recipe: str, amax_history_len: int) -> AbstractContextManager[None]:
    """The context in which Transformer Engine computes in FP8.

    Args:
        recipe: Name of the recipe.
        amax_history_len: Steps that delayed scaling remembers.

    Raises:
        MissingExtraError: Transformer Engine cannot be imported.
    """
    engine = import_extra("transformer_engine.pytorch", "cuda")
    recipes = import_extra("transformer_engine.common.recipe", "cuda")
    options = {"amax_history_len": amax_history_len, "amax_compute_algo": "max"} if recipe == "delayed" else {}
    made = getattr(recipes, _RECIPES[recipe])(**options)
    return cast("AbstractContextManager[None]", engine.autocast(enabled=True, recipe=made))
