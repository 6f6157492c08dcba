import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_embodied.callbacks import FiniteLoss
from lightning_embodied.errors import ConfigError, TrainingError


class Breaks(LightningModule):
    """The loss of one batch is not finite."""

    def __init__(self, batch, value):
        super().__init__()
        self.batch, self.value, self.net = batch, value, nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        factor = torch.tensor(self.value if batch_idx == self.batch else 1.0)
        return self.net(batch).square().mean() * factor

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("every", [1, 100])
def test_a_loss_that_is_not_finite_is_one_error_and_in_no_checkpoint(tmp_path, value, every):
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, save_last=True, save_on_exception=True)
    trainer = Trainer(
        callbacks=[FiniteLoss(every), saves], max_epochs=1, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(TrainingError, match=r"not finite\n.* step 5"):
        trainer.fit(Breaks(4, value), DataLoader(torch.ones(9, 2)))
    assert {path.name for path in tmp_path.iterdir()} == {"epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt", "last.ckpt"}
    for path in tmp_path.iterdir():
        loaded = torch.load(path, weights_only=True)
        assert loaded["global_step"] <= 4
        assert all(tensor.isfinite().all() for tensor in loaded["state_dict"].values())


def test_batches_between_looks_are_counted_from_one():
    with pytest.raises(ConfigError, match="every_n_batches"):
        FiniteLoss(0)
