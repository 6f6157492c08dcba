"""Small modules to shard: ordinary layers, and two towers with a joint attention whose layers are never called."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TowerLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the towers' parts are called, never a layer")


class JointTowers(nn.Module):
    """Reaches into the layers of two towers, as the pi0 of other projects does."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, width), nn.Linear(width, 1)
        self.left = nn.ModuleList(TowerLayer(width) for _ in range(depth))
        self.right = nn.ModuleList(TowerLayer(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        a = b = self.stem(x)[:, None]
        for left, right in zip(self.left, self.right, strict=True):
            query, key, value = (
                torch.cat((getattr(left, part)(a), getattr(right, part)(b)), dim=1)
                for part in ("query", "key", "value")
            )
            attended = F.scaled_dot_product_attention(query, key, value)
            a, b = a + left.out(attended[:, :1]), b + right.out(attended[:, 1:])
        return self.head((a + b)[:, 0])


class Handless(Stack):
    """Calls the parts of layers that have no `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Module() for _ in range(2))
        for block in self.blocks:
            block.up, block.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block.down(torch.relu(block.up(x)))
        return self.head(x)


class Regression(LightningModule):
    """Learns the sum of its inputs with any network; builds it in `configure_model` if given a function."""

    def __init__(self, network: nn.Module | None = None, build=None, lr: float = 1e-2) -> None:
        super().__init__()
        self.network, self.build, self.lr = network, build, lr

    def configure_model(self) -> None:
        if self.network is None and self.build is not None:
            self.network = self.build()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) - x.sum(-1, keepdim=True)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)
