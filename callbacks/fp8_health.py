"""What FP8 costs each layer while it trains: errors, overflow and underflow in the log, a warning when they drift.

Every so many steps, layers compute their outputs and weight gradients a second time in float32 from the operands they
have, and the difference is logged. The step itself is not changed, whatever the strategy.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_embodied.errors import ConfigError
from lightning_embodied.precision import FP8Precision, LayerHealth, Observation, observe


class FP8Health(Callback):
    """Logs the health of a run's FP8 layers.

    - `fp8/output_error` and `fp8/weight_grad_error`: the largest of all layers;
    - `fp8/flushed` and `fp8/saturated`: largest share of an operand's values lost to underflow and overflow;
    - the same for each layer under `fp8/<layer>/…`, with the largest magnitude of each operand: `amax_input`,
      `amax_weight`, `amax_grad`.

    A layer whose error has become `drift` times that of the first measurement, or that saturates, is warned about once.

    Args:
        every_n_steps: Optimizer steps between two measurements; the first is at the first step.
        drift: How many times its first error a layer's error may become.
        max_saturated: Share of an operand's values that may saturate. Only `delayed` can saturate at all.
        per_layer: Whether to log each layer as well.

    Raises:
        ConfigError: A number is not positive, or the run is not in FP8.
    """

    def __init__(
        self, every_n_steps: int = 100, drift: float = 2.0, max_saturated: float = 0.01, per_layer: bool = True
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("drift", drift), ("max_saturated", max_saturated)):
            if not value > 0:
                raise ConfigError("not positive", where=f"FP8Health.{name}", found=value, expected="above 0")
        self.every_n_steps, self.drift, self.max_saturated = every_n_steps, drift, max_saturated
        self.per_layer = per_layer
        self.results: dict[str, LayerHealth] = {}
        self._first: dict[str, dict[str, float]] = {}
        self._warned: set[str] = set()
        self._measured_step: int | None = None
        self._observing = ExitStack()
        self._observation: Observation | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a run without FP8."""
        if not isinstance(trainer.precision_plugin, FP8Precision):
            raise ConfigError(
                "FP8Health has nothing to look at",
                where="trainer.callbacks",
                found=f"precision {type(trainer.precision_plugin).__name__}",
                expected="FP8Precision in trainer.plugins",
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
        """Begins to look when it is time; with gradient accumulation, at the first micro-batch."""
        step = trainer.global_step
        if step % self.every_n_steps == 0 and step != self._measured_step:
            self._measured_step = step
            self._observation = self._observing.enter_context(observe(pl_module))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        """Logs what was found."""
        if self._observation is None:
            return
        self._observing.close()
        self.results, self._observation = self._observation.results(), None
        figures = _figures(self.results, self.per_layer)
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=self._measured_step)
        self._warn(self._measured_step or 0)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """A step that breaks off is not looked at to its end."""
        self._observing.close()
        self._observation = None

    def state_dict(self) -> dict[str, Any]:
        """The first measurement, so that drift is judged from there when the run is resumed."""
        return {"first": self._first}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the first measurement of the resumed run."""
        self._first = dict(state_dict["first"])

    def _warn(self, step: int) -> None:
        found: list[str] = []
        for name, layer in self.results.items():
            first = self._first.setdefault(name, _errors(layer))
            complaints = [
                f"{error.replace('_', ' ')} {value:.2g}, at first {first[error]:.2g}"
                for error, value in _errors(layer).items()
                if value > self.drift * first.get(error, value)
            ]
            complaints += [
                f"{share:.2%} of {operand} saturated"
                for operand, share in layer.saturated.items()
                if share > self.max_saturated
            ]
            if complaints and name not in self._warned:
                self._warned.add(name)
                found.append(f"  {name}: {'; '.join(complaints)}")
        if found:
            rank_zero_warn(
                f"FP8 is getting worse in {len(found)} layers at step {step}; FP8Precision.exclude takes their names:\n"
                + "\n".join(found)
            )


def _errors(layer: LayerHealth) -> dict[str, float]:
    errors = {"output_error": layer.output_error, "weight_grad_error": layer.weight_grad_error}
    return {name: value for name, value in errors.items() if value is not None}


def _figures(results: dict[str, LayerHealth], per_layer: bool) -> dict[str, float]:
    layers = {
        name: {
            **_errors(layer),
            "flushed": max(layer.flushed.values()),
            "saturated": max(layer.saturated.values()),
            **{f"amax_{operand}": value for operand, value in layer.amax.items()},
        }
        for name, layer in results.items()
    }
    figures = {
        f"fp8/{what}": max(values)
        for what in ("output_error", "weight_grad_error", "flushed", "saturated")
        if (values := [layer[what] for layer in layers.values() if what in layer])
    }
    if per_layer:
        figures |= {f"fp8/{name}/{what}": value for name, layer in layers.items() for what, value in layer.items()}
    return figures
