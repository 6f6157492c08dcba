"""The gradient of any packing, accumulation and number of ranks is that of one padded batch on one process, in fp64."""

import math

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional

from lightning_embodied.attention import varlen_attention
from lightning_embodied.data import ResumableLoader, SampleOrder
from lightning_embodied.models import LossTerms, PolicyModule
from lightning_embodied.packing import PackingOptions
from tests.models.conftest import ACTION, HORIZON, TinyDataModule, make_collator, make_samples, make_spec, make_trainer
from tests.strategies.ranks import run_ranks

HEADS, DIM = 2, 4
WIDTH = HEADS * DIM


class AttentionPolicy(PolicyModule):
    """Regresses the chunk from one attention layer, packed with cumulative lengths or padded with a mask."""

    def build(self, spec):
        torch.manual_seed(0)
        self.words = nn.Embedding(self.encoder.vocab_size, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, HORIZON * ACTION)

    def regress(self, last, batch):
        chunks = self.head(last).unflatten(-1, (HORIZON, ACTION))
        losses = (chunks - self.normalized_actions(batch)).square()
        return LossTerms.of_actions(losses, batch.action_is_pad, batch.loss_weight)

    def forward(self, batch):
        x, cu, longest = self.words(batch.input_ids), batch.cu_seqlens, batch.max_seqlen
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(1)
        x = x + varlen_attention(query, key, value, cu, cu, longest, longest).flatten(1)
        return self.regress(x[cu[1:].long() - 1], batch)

    def padded(self, batch):
        lengths = batch.cu_seqlens.diff()
        here = torch.arange(batch.max_seqlen) < lengths[:, None]
        ids = torch.zeros(here.shape, dtype=torch.int64)
        ids[here] = batch.input_ids
        x = self.words(ids)
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=here[:, None, None])
        x = x + attended.transpose(1, 2).flatten(2)
        return self.regress(x[torch.arange(len(lengths)), lengths - 1], batch)

    def sample_actions(self, batch, *, generator=None):
        raise NotImplementedError


def make_policy():
    policy = AttentionPolicy(learning_rate=0.0)
    policy.spec = make_spec()
    policy.configure_model()
    return policy


class Data(TinyDataModule):
    """The samples in batches by tokens or by samples."""

    def __init__(self, samples, batching):
        super().__init__(samples, 1)
        self.batching = batching

    def train_dataloader(self):
        lengths = [self.collator.encoder.length(sample) for sample in self.samples]
        by_tokens = {"lengths": lengths} if "token_budget" in self.batching else {}
        place = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        order = SampleOrder(len(self.samples))
        return ResumableLoader(
            self.samples, order, trainer=self.trainer, collate_fn=self.collator, **by_tokens, **self.batching, **place
        )


class Keep(Callback):
    """Gradients as the optimizer saw them, and the samples of this rank that they are of."""

    def __init__(self):
        self.seen, self.sizes, self.steps = [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen += batch.frame_index.tolist()
        self.sizes.append(batch.batch_size)
        if trainer.global_step > len(self.steps):
            found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
            self.steps.append((self.seen, found))
            self.seen = []


BATCHINGS = {
    "one sample at a time": {"batch_size": 1},
    "by samples": {"batch_size": 3},
    "by tokens": {"token_budget": 40},
    "offline": {"token_budget": 64, "packing": PackingOptions("first-fit-decreasing")},
    "all at once": {"token_budget": 10_000},
}


def train(path, world, accumulation, batching):
    """Trains an epoch on this rank; keeps each optimizer step's samples and gradient."""
    keep = Keep()
    trainer = make_trainer(
        max_epochs=1,
        strategy="ddp" if world > 1 else "auto",
        devices=world,
        precision="64-true",
        accumulate_grad_batches=accumulation,
        callbacks=[keep],
        limit_val_batches=0,
    )
    trainer.fit(make_policy(), datamodule=Data(make_samples(25), BATCHINGS[batching]))
    torch.save((keep.steps, keep.sizes), path / f"{batching}-{accumulation}-{trainer.global_rank}.pt")


def train_all(rank, world, path):
    for batching in BATCHINGS:
        for accumulation in (1, 3):
            train(path, world, accumulation, batching)


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def trained(request, tmp_path_factory):
    """Ranks, and where they left their gradients."""
    world, path = request.param, tmp_path_factory.mktemp("ranks")
    if world == 1:
        train_all(0, 1, path)
    else:
        run_ranks(world, train_all, path, world, path)
    return world, path


def reference(frames):
    """Mean over every valid target of the samples, in one plain padded pass."""
    policy = make_policy().double()
    samples = make_samples(25)
    terms = policy.padded(make_collator()([samples[frame] for frame in frames]))
    (terms.total / terms.count).backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("batching", BATCHINGS)
def test_gradient_is_that_of_one_padded_batch(trained, batching, accumulation):
    world, path = trained
    ranks = [torch.load(path / f"{batching}-{accumulation}-{rank}.pt") for rank in range(world)]
    steps = list(zip(*(steps for steps, _ in ranks), strict=True))
    assert len(steps) == math.ceil(len(ranks[0][1]) / accumulation)
    assert sorted(frame for step in steps for seen, _ in step for frame in seen) == list(range(25))
    if world > 1 and batching == "by tokens":
        assert any(len(set(sizes)) > 1 for sizes in zip(*(sizes for _, sizes in ranks), strict=True))
    for step in steps:
        expected = reference([frame for seen, _ in step for frame in seen])
        for _, found in step:
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                error = (found[name] - value).abs().max() / value.abs().max()
                assert found[name].dtype == torch.float64
                assert error <= 1e-6, name
