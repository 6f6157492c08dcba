"""pi0.5, whose two towers share attention: sharding changes no number and divides the memory."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import seed_everything
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_embodied.errors import CheckpointError
from lightning_embodied.models import Pi05Policy, load_policy
from lightning_embodied.strategies import FSDP2Strategy, consolidate
from tests.models.conftest import make_trainer
from tests.models.pi_golden import CAMERAS, Golden
from tests.strategies.ranks import PeakMemory, run_ranks

SAMPLE = {
    "observation.state": torch.zeros(1, 4),
    "task": ["w1"],
    CAMERAS[0]: torch.zeros(1, 3, 40, 56, dtype=torch.uint8),
}
TOWER = {"width": 512, "depth": 6, "heads": 8, "kv_heads": 1, "head_dim": 32}
LARGE = {
    "language": {**TOWER, "mlp_width": 2048},
    "expert": {**TOWER, "width": 128, "mlp_width": 512},
    "vision": {"image_size": 28, "patch_size": 14},
    "vocab_size": 200,
    "max_action_dim": 8,
    "max_state_dim": 8,
}


def batches(golden: Golden, policy: Pi05Policy, rank: int) -> DataLoader:
    samples = [0, 1] if rank % 2 == 0 else [2, 3]
    return DataLoader([golden.batch(policy, "mixed", samples)] * 3, batch_size=None)


def train_golden(rank: int, path: Path) -> dict[str, tuple[dict, torch.Tensor]]:
    golden, found = Golden("pi05"), {}
    options = {"units": ["GemmaLayer", "_Layer"], "forward_methods": ["predict_action_chunk"]}
    for name, strategy in {
        "ddp": "ddp",
        "fsdp": FSDP2Strategy(**options),
        "hsdp": FSDP2Strategy(**options, replicate=2, activation_checkpointing=["GemmaLayer"]),
    }.items():
        policy = golden.policy(learning_rate=1e-3)
        trainer = make_trainer(max_steps=3, devices=2, strategy=strategy, gradient_clip_val=1.0)
        seed_everything(0, verbose=False)
        trainer.fit(policy, batches(golden, policy, rank))
        state = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in policy.named_parameters()}
        found[name] = state, policy.predict_action_chunk(SAMPLE)
        if name == "fsdp":
            trainer.save_checkpoint(path / "sharded.ckpt")
        assert type(policy).__qualname__ == "Pi05Policy"
    return found


def test_weights_and_actions_are_those_of_ddp(tmp_path):
    for found in run_ranks(2, train_golden, tmp_path / "ranks", tmp_path):
        weights, actions = found["ddp"]
        for kind in ("fsdp", "hsdp"):
            for name, value in weights.items():
                if name.endswith("k_proj.bias"):
                    continue  # its gradient is zero but for rounding, which AdamW magnifies
                torch.testing.assert_close(found[kind][0][name], value, rtol=1e-4, atol=1e-6, msg=f"{kind}: {name}")
            torch.testing.assert_close(found[kind][1], actions, rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match="consolidate"):
        load_policy(tmp_path)
    consolidate(str(tmp_path / "sharded.ckpt"), str(tmp_path / "one" / "policy.ckpt"))
    policy = load_policy(tmp_path / "one")
    torch.testing.assert_close(policy.predict_action_chunk(SAMPLE), found["fsdp"][1], rtol=1e-5, atol=1e-6)


def large() -> Pi05Policy:
    policy = Pi05Policy(sizes=LARGE, preset="tiny")
    policy.spec = Golden("pi05").spec()
    return policy


def memory(rank: int, ranks: int, weights: Path, options: dict) -> dict[str, int]:
    golden = Golden("pi05")
    policy = golden.policy()
    data = batches(golden, policy, rank)
    make_trainer(max_steps=1, devices=ranks, strategy=FSDP2Strategy()).fit(policy, data)  # loads what torch loads late
    trainer = make_trainer(max_steps=2, devices=ranks, strategy=FSDP2Strategy(**options, weights=str(weights)))
    with PeakMemory() as peak:
        policy = large()
        trainer.fit(policy, data)
    state = [t for values in trainer.optimizers[0].state.values() for t in values.values() if isinstance(t, DTensor)]
    gradients = [param.grad for param in policy.parameters() if param.grad is not None]
    held = sum(tensor.to_local().nbytes for tensor in [*policy.parameters(), *gradients, *state])
    return {"peak": peak.bytes, "held": held}


@pytest.mark.slow
def test_memory_of_a_rank_falls_with_their_number(tmp_path):
    policy = large()
    policy.configure_model()
    params = dict(policy.named_parameters())
    save_file(params, tmp_path / "model.safetensors")
    size = sum(param.nbytes for param in params.values())
    layer = sum(param.nbytes for param in policy.model.language.layers[0].parameters())
    plan = size + 3 * sum(param.nbytes for param in params.values() if param.requires_grad)
    units, peaks = {"units": ["GemmaLayer", "_Layer"]}, {}
    for name, ranks, options in (*((n, n, units) for n in (1, 2, 4)), ("one unit", 4, {"units": []})):
        for found in run_ranks(ranks, memory, tmp_path / "ranks", ranks, tmp_path / "model.safetensors", options):
            assert found["held"] == pytest.approx(plan / ranks, rel=0.02)
            peaks[name] = max(peaks.get(name, 0), found["peak"])
    print({ranks: f"{peak / 2**20:.0f} MiB" for ranks, peak in peaks.items()}, f"plan: {plan / 2**20:.0f} MiB / ranks")
    assert peaks[2] < 0.7 * peaks[1]
    assert peaks[4] < 0.5 * peaks[1] < 0.7 * peaks["one unit"], peaks
    assert all(peaks[n] < plan / n + 3 * layer + 40 * 2**20 for n in (1, 2, 4)), peaks
