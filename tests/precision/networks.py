"""A three-layer DiT for action chunks (adaLN-zero's shape, all weights random) as a LightningModule."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_embodied.models import Pi05Policy
from lightning_embodied.packing import SampleEncoder, VarlenPackingCollator
from tests.models.conftest import make_samples, make_spec

ACTIONS, HORIZON, WIDTH = 7, 5, 64


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, condition):
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.adaLN_modulation(condition)[:, None].chunk(6, dim=-1)
        qkv = self.qkv(self.norm(x) * (1 + scale) + shift)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + gate * self.attention_out(attended)
        return x + mlp_gate * self.fc2(F.gelu(self.fc1(self.norm(x) * (1 + mlp_scale) + mlp_shift)))


class DiT(nn.Module):
    def __init__(self, width: int = WIDTH, depth: int = 3, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.action_in = nn.Linear(ACTIONS, width)
        self.time_mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.final_norm = nn.LayerNorm(width, bias=False)
        self.action_out = nn.Linear(width, ACTIONS)

    def forward(self, noisy, time):
        frequencies = torch.arange(1, self.action_in.out_features // 2 + 1, device=time.device)
        angles = time[:, None] * frequencies
        condition = self.time_mlp(torch.cat((angles.sin(), angles.cos()), dim=-1))
        x = self.action_in(noisy)
        for block in self.blocks:
            x = checkpoint(block, x, condition, use_reentrant=False) if self.recompute else block(x, condition)
        return self.action_out(self.final_norm(x))


class FlowModule(LightningModule):
    """Flow matching on given noise and times; remembers the dtypes of what it was handed."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = DiT(recompute=recompute)
        self.register_buffer("action_std", torch.full((ACTIONS,), 0.12345679))
        self.seen_dtypes: set[torch.dtype] = set()
        self.losses: list[float] = []

    def forward(self, batch):
        self.seen_dtypes |= {value.dtype for value in batch.values()}
        actions, noise, time = batch["actions"] / self.action_std, batch["noise"], batch["time"]
        noisy = time[:, None, None] * noise + (1 - time[:, None, None]) * actions
        return (self.net(noisy, time).float() - (noise - actions)).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def tiny_pi05(size: int = 16, depth: int = 3, seed: int = 0):
    """The `tiny` preset of pi0.5 with nothing left at zero, and its loss on a batch of synthetic samples."""
    torch.manual_seed(seed)
    towers = {tower: {"depth": depth} for tower in ("language", "expert")}
    sizes = {"vision": {"image_size": 16, "patch_size": 8}, "max_action_dim": 16, **towers}
    policy = Pi05Policy(preset="tiny", sizes=sizes, noise_samples_per_observation=4)
    encoder = SampleEncoder(image_size=(16, 16), patch_size=8, prompt="pi05").to_config()
    policy.spec = make_spec(encoder={**encoder, "state_range": [[-10.0] * 5, [10.0] * 5]})
    policy.configure_model()
    with torch.no_grad():
        for parameter in policy.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    packed = VarlenPackingCollator(policy.encoder)(make_samples(size))

    def loss(module):
        torch.manual_seed(seed + 1)
        terms = module(packed)
        return terms.total / terms.count

    return policy, loss


def small_dit(size: int = 16):
    """The DiT and its loss on a batch."""
    one = batch(size)
    return FlowModule(), lambda module: module(one)


def samples(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "actions": torch.randn(HORIZON, ACTIONS, generator=generator) * 0.1,
            "noise": torch.randn(HORIZON, ACTIONS, generator=generator),
            "time": torch.rand((), generator=generator),
        }
        for _ in range(count)
    ]


def batch(size: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    return next(iter(loader(size, size, seed)))


def loader(count: int = 24, size: int = 6, seed: int = 0) -> DataLoader:
    return DataLoader(samples(count, seed), batch_size=size)


def trainer(**arguments) -> Trainer:
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**quiet, **arguments})


def gradients(module: nn.Module, loss) -> dict[str, torch.Tensor]:
    """Gradients of a loss by parameter name; none is left behind."""
    module.zero_grad()
    loss(module).backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    module.zero_grad()
    return found


def relative_error(found, expected) -> float:
    """Of all gradients together."""
    difference = sum(float((found[name] - value).square().sum()) for name, value in expected.items())
    return (difference / sum(float(value.square().sum()) for value in expected.values())) ** 0.5


def cosine(found, expected) -> float:
    product = sum(float((found[name] * value).sum()) for name, value in expected.items())
    lengths = [sum(float(value.square().sum()) for value in each.values()) ** 0.5 for each in (found, expected)]
    return product / (lengths[0] * lengths[1])
