"""Low-rank adaptation (LoRA, arXiv:2106.09685): train a few small matrices beside frozen weights.

An adapted layer computes `x W' + alpha / rank * x A' B'`. Adapters are part of the policy, made where its layers are,
so checkpoints, averaging and sharding treat them like any weight; base weights keep their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Required, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_embodied.counts import check_count
from lightning_embodied.errors import ConfigError


class LoRA(TypedDict, total=False):
    """What `PolicyModule(lora=…)` takes.

    Keys:
        target_modules: Patterns of the linear layers to adapt, matched with their full names: `*.q_proj`,
            `backbone.*.v_proj`.
        rank: Rank of an adapter; default 8.
        alpha: An adapter is scaled by `alpha / rank`; default 16.
        also_train: Patterns of parameters that train beside the adapters: `action_head.action_decoder.*`.
    """

    target_modules: Required[list[str]]
    rank: int
    alpha: float
    also_train: list[str]


class LoRALinear(nn.Linear):
    """A linear layer with an adapter, which starts as zero.

    Args:
        linear: The layer; its parameters are used on and frozen.
        rank: Rank of the adapter.
        alpha: The adapter is scaled by `alpha / rank`.
    """

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return super().forward(input) + F.linear(F.linear(input, self.lora_a), self.lora_b) * self.scale

    def merged_weight(self) -> Tensor:
        """`[out_features, in_features]`: one matrix that does what weight and adapter do; computed in float32."""
        return (self.weight + self.scale * (self.lora_b.float() @ self.lora_a.float())).to(self.weight.dtype)


def add_lora(module: nn.Module, lora: LoRA) -> None:
    """Freezes a module and adds adapters to it, which train.

    Args:
        module: Changed in place.
        lora: Which layers, and how.

    Raises:
        ConfigError: A key is unknown, no layer is named, a pattern matches nothing, or the rank is not positive; names
            it.
    """
    keys = LoRA.__annotations__
    if not lora.keys() <= keys.keys() or not lora.get("target_modules"):
        raise ConfigError(
            "this does not say what to adapt",
            where="lora",
            found=dict(lora),
            expected=f"patterns under target_modules, and no other keys than {', '.join(keys)}",
        )
    rank, alpha = check_count(lora.get("rank", 8), "lora.rank"), lora.get("alpha", 16.0)
    layers = {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear}
    targets = _matching(lora["target_modules"], list(layers), "lora.target_modules")
    module.requires_grad_(False)
    for name in targets:
        module.set_submodule(name, LoRALinear(layers[name], rank, alpha))
    parameters = dict(module.named_parameters())
    for name in _matching(lora.get("also_train", []), list(parameters), "lora.also_train"):
        parameters[name].requires_grad_(True)


def merge_lora(module: nn.Module) -> None:
    """Makes ordinary layers of adapted ones, in place: same results, no adapters left.

    Args:
        module: A policy, or a part of one.
    """
    for name, layer in list(_adapted(module)):
        linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(layer.merged_weight().detach(), requires_grad=False)
        linear.bias = layer.bias
        module.set_submodule(name, linear.train(layer.training))


def merged_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """A module's state as if its adapters were merged, which leaves it as it is."""
    state: dict[str, Tensor] = module.state_dict()
    with torch.no_grad():
        for name, layer in _adapted(module):
            state[f"{name}.weight"] = layer.merged_weight()
            del state[f"{name}.lora_a"], state[f"{name}.lora_b"]
    return state


def _adapted(module: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    return ((name, layer) for name, layer in module.named_modules() if isinstance(layer, LoRALinear))


def _matching(patterns: Sequence[str], names: Sequence[str], where: str) -> list[str]:
    found: dict[str, None] = {}
    for pattern in patterns:
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            raise ConfigError(
                "a pattern matches nothing",
                where=where,
                found=pattern,
                expected=f"full names such as {', '.join(names[:: max(1, len(names) // 4)][:4])}",
            )
        found.update(dict.fromkeys(matches))
    return list(found)
