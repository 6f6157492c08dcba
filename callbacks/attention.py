"""Forces one attention kernel for a whole run, from YAML: to compare kernels, or to get around one.

Which kernel runs is otherwise chosen per call by device and dtype; `lightning-embodied doctor` shows the choice.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_embodied.attention import attention_backends, force_backend
from lightning_embodied.errors import ConfigError

Backend = Literal[
    "flash-attn-2", "flash-attn-3", "flash-attn-4", "torch-varlen", "cpu-flash", "padded-sdpa", "reference"
]


class ForceAttentionBackend(Callback):
    """Computes all `varlen_attention` of a run with one backend.

    Args:
        backend: Its name, as in `lightning-embodied doctor`.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._forced = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forces it from here on.

        Raises:
            ConfigError: It is not available on this machine; says why.
        """
        (chosen,) = (backend for backend in attention_backends() if backend.name == self.backend)
        if not chosen.available:
            raise ConfigError(
                f"the attention backend {self.backend!r} is not available here",
                where="ForceAttentionBackend.backend",
                found=chosen.reason,
                expected=", ".join(backend.name for backend in attention_backends() if backend.available),
            )
        self._forced.enter_context(force_backend(self.backend))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lets the choice be made again."""
        self._forced.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """A run that breaks off is not torn down."""
        self._forced.close()
