"""A driver script, `ADDRESS CHECKPOINTS WORKERS [MOST]`: trains without end, goes on where it was, says each step."""

import os
import sys

from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_embodied.strategies import RayDDPStrategy
from tests.strategies.ray_models import Data, Regression


class Says(Callback):
    def on_train_batch_end(self, trainer, *details):
        if trainer.is_global_zero:
            print(
                f"step {trainer.global_step} ranks {trainer.world_size} seed {os.environ['PL_GLOBAL_SEED']}", flush=True
            )


if __name__ == "__main__":
    seed_everything(11)
    workers = [int(number) for number in sys.argv[3:]]
    Trainer(
        strategy=RayDDPStrategy(num_workers=workers if len(workers) > 1 else workers[0], address=sys.argv[1]),
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=[Says(), ModelCheckpoint(sys.argv[2], every_n_train_steps=5, save_last=True)],
    ).fit(Regression(), Data(), ckpt_path="last")
