"""Nodes come and go: several of Ray's on this machine, one worker each."""

import threading
import time

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_embodied.data import SampleOrder
from lightning_embodied.strategies import RayDDPStrategy
from tests.strategies.elastic import SAMPLES, Ledger, NumberedData, lines, trained
from tests.strategies.ray_models import Regression

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOM = {"room": 1}
PATIENCE = 150.0  # seconds, for what takes ten on a machine with nothing else to do


class Beside(threading.Thread):
    """Trains in a thread, for Ray's test cluster changes in the main thread only."""

    def __init__(self, trainer, model, data):
        super().__init__(daemon=True)
        self.trainer, self.model, self.data, self.error = trainer, model, data, None
        self.start()

    def run(self):
        try:
            self.trainer.fit(self.model, self.data)
        except BaseException as error:
            self.error = error

    def until(self, condition):
        """Waits until something is so, or the run has ended."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.is_alive(), f"the run ended before: {self.error!r}"
            assert time.monotonic() < deadline, "it did not happen in time"
            self.join(0.1)

    def end(self):
        self.join(PATIENCE)
        assert not self.is_alive(), "the run did not end in time"
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("restart", ["warm", "cold"])
def test_goes_on_with_fewer_ranks_after_a_node_is_lost_and_with_more_when_one_comes(ray_cluster, tmp_path, restart):
    nodes = [ray_cluster.add_node(num_cpus=0, resources=ROOM) for _ in range(2)]
    seed_everything(3)
    book = tmp_path / "book"
    trainer = Trainer(
        strategy=RayDDPStrategy(num_workers=[1, 2], restart=restart, resize_interval=1.0, resources_per_worker=ROOM),
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ledger(book, attempts=3), ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=3)],
    )
    model = Regression()
    run = Beside(trainer, model, NumberedData())
    run.until(lambda: any(line["step"] >= 7 for line in lines(book)))
    ray_cluster.remove_node(nodes[1], allow_graceful=False)
    run.until(lambda: any(line["ranks"] == 1 for line in lines(book)))
    nodes[1] = ray_cluster.add_node(num_cpus=0, resources=ROOM)
    run.end()
    for node in nodes:
        ray_cluster.remove_node(node)

    steps = trained(book)
    sizes = [step[0]["ranks"] for step in steps]
    assert [size for place, size in enumerate(sizes) if place == 0 or sizes[place - 1] != size] == [2, 1, 2]
    assert [len(step) for step in steps] == sizes
    taken = [number for step in steps for line in step for number in line["ids"]]
    assert taken == SampleOrder(SAMPLES, seed=5).indices(0, 0, len(taken)).tolist()
    saved = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert not any(name.startswith("resized-") for name in saved)
    assert trainer.global_step == len(steps)
    assert torch.cat([p.flatten() for p in model.parameters()]).isfinite().all()
