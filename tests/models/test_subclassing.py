"""The policy of docs/subclassing.md, taken from the page, trained and loaded."""

import importlib
import re
import sys
from pathlib import Path

import torch

from lightning_embodied.models import load_policy
from tests.models.conftest import HORIZON, TinyDataModule, make_samples, make_trainer, observations_of

PAGE = Path(__file__).parents[2] / "docs" / "subclassing.md"


def test_the_documented_policy_trains_acts_and_loads(tmp_path, monkeypatch):
    source = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    assert len(source.splitlines()) < 60
    (tmp_path / "my_policy.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    policy = importlib.import_module("my_policy").RegressionPolicy(width=32, learning_rate=1e-2)
    trainer = make_trainer(max_epochs=20, limit_val_batches=0)
    trainer.fit(policy, datamodule=TinyDataModule(make_samples(8), 4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = load_policy(tmp_path / "a.ckpt")
    observations = observations_of(make_samples(4)[3:])
    assert torch.equal(loaded.predict_action_chunk(observations), policy.predict_action_chunk(observations))
    assert loaded.predict_action_chunk(observations).shape == (1, HORIZON, 3)
    assert loaded.hparams["width"] == 32
    sys.modules.pop("my_policy")
