"""ForceAttentionBackend: for one run, whether it ends or breaks off, and only what is there."""

from typing import get_args

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_embodied.attention import attention_backends, choose_backend
from lightning_embodied.callbacks import ForceAttentionBackend
from lightning_embodied.callbacks.attention import Backend
from lightning_embodied.errors import ConfigError

QUERY = torch.zeros(1, 1, 4)


class Model(BoringModel):
    def __init__(self, fail=False):
        super().__init__()
        self.fail = fail

    def on_train_batch_start(self, batch, batch_idx):
        self.used = choose_backend(QUERY).name
        if self.fail:
            raise RuntimeError("broken off")


def trainer(backend):
    return Trainer(
        accelerator="cpu", max_steps=1, limit_val_batches=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ForceAttentionBackend(backend)],
    )  # fmt: skip


def test_it_holds_for_the_run():
    model = Model()
    trainer("reference").fit(model)
    assert model.used == "reference"
    assert choose_backend(QUERY).name == "cpu-flash"
    with pytest.raises(RuntimeError, match="broken off"):
        trainer("padded-sdpa").fit(Model(fail=True))
    assert choose_backend(QUERY).name == "cpu-flash"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the backend may be here")
def test_what_is_not_here_is_refused_with_its_reason():
    with pytest.raises(ConfigError, match="no CUDA device"):
        trainer("torch-varlen").fit(Model())


def test_it_knows_all_backends():
    assert set(get_args(Backend)) == {backend.name for backend in attention_backends()}
