"""pi0.5 as openpi and LeRobot compute it, over the weights of a `Pi05Policy`: the baseline of `pi05_step.py`.

Every sample has three pictures and 200 prompt tokens, whatever it has; a dense `[B, 1, T, T]` float mask hides what is
not there, attention is transformers' eager one, and the last prefix layer is computed whole (LeRobot 0.6,
`modeling_pi05.py`: `compute_layer_complete`, `denoise_step` with its cloned cache).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lightning_embodied.models import Pi05Policy
from lightning_embodied.models.pi.gemma import GemmaLayer
from lightning_embodied.models.pi.precision import to_compute_dtype
from lightning_embodied.models.rotary import rotate_halves, rotation_of

MASKED = -2.3819763e38

KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PaddedBatch:
    """Samples as openpi and LeRobot hand them to the network.

    Attributes:
        pictures: uint8 `[B, views, 3, H, W]`, black where there is none.
        views: bool `[B, views]`: which pictures are there.
        words: int64 `[B, prompt]`.
        valid: bool `[B, prompt]`: which words are there.
    """

    pictures: Tensor
    views: Tensor
    words: Tensor
    valid: Tensor


class DensePi05:
    """Velocities and actions of padded batches.

    Args:
        policy: Its network is used as it is.
    """

    def __init__(self, policy: Pi05Policy) -> None:
        self.net = policy.model
        self.dim = policy.network_sizes.language.head_dim

    def velocity(self, batch: PaddedBatch, noisy: Tensor, time: Tensor) -> Tensor:
        """Both towers layer by layer, as in training: `[B, H, max_action_dim]` at `[B]`."""
        prefix, valid = self._prefix(batch)
        actions, condition = self._suffix(noisy, time)
        valid = torch.cat((valid, valid.new_ones(noisy.shape[:2])), dim=1)
        block = torch.arange(valid.shape[1], device=valid.device) >= prefix.shape[1]
        seen = (block[None, None, :] <= block[None, :, None]) & valid[:, None] & valid[:, :, None]
        mask, positions = _float_mask(seen), valid.cumsum(1) - 1
        streams = [prefix, actions]
        for layers in zip(self.net.language.layers, self.net.expert.layers, strict=True):
            streams = self._layer(layers, streams, (None, condition), mask, positions)
        self.net.language.norm(streams[0])
        return self._out(streams[1], condition)

    def denoiser(self, batch: PaddedBatch, horizon: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Velocities of chunks `[B, H, max_action_dim]` by a cached prefix, which every call clones."""
        cache, valid = self._cache(batch)
        seen = torch.cat((valid, valid.new_ones(valid.shape[0], horizon)), dim=1)
        mask = _float_mask(seen[:, None].expand(-1, horizon, -1))
        positions = valid.sum(1)[:, None] + torch.arange(horizon, device=valid.device)

        def velocity(noisy: Tensor, time: Tensor) -> Tensor:
            x, condition = self._suffix(noisy, time)
            for layer, (keys, values) in zip(self.net.expert.layers, cache, strict=True):
                normed, gate = layer.input_layernorm(x, condition)
                query, key, value = self._heads(layer, normed, positions)
                key, value = torch.cat((keys.clone(), key), dim=2), torch.cat((values.clone(), value), dim=2)
                x = _finish(layer, x, eager(query, key, value, mask), gate, condition)
            return self._out(x, condition)

        return velocity

    def _prefix(self, batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        """Embeddings `[B, P, width]` of all views and the whole prompt, and which of them are real."""
        pictures = self.net.embed_pictures(batch.pictures.flatten(0, 1)).unflatten(0, batch.views.shape)
        words = self.net.language.embed(batch.words)
        valid = torch.cat((batch.views.repeat_interleave(pictures.shape[2], dim=1), batch.valid), dim=1)
        return to_compute_dtype(torch.cat((pictures.flatten(1, 2), words), dim=1)), valid

    def _suffix(self, noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        actions, condition = self.net._embed_suffix(noisy, time, noisy[:, 0, :0])
        assert condition is not None
        return to_compute_dtype(actions), condition

    def _out(self, x: Tensor, condition: Tensor) -> Tensor:
        x, _ = self.net.expert.norm(x, condition)
        with torch.autocast(x.device.type, enabled=False):
            velocity: Tensor = self.net.action_out_proj(x.float())
        return velocity

    def _heads(self, layer: GemmaLayer, normed: Tensor, positions: Tensor) -> list[Tensor]:
        """Queries, keys and values `[B, heads, T, D]`, rotated."""
        attention = layer.self_attn
        query, key, value = (
            projection(normed).unflatten(-1, (-1, self.dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        return [_rotate(query, positions), _rotate(key, positions), value]

    def _layer(
        self,
        layers: Sequence[GemmaLayer],
        streams: Sequence[Tensor],
        conditions: Sequence[Tensor | None],
        mask: Tensor,
        positions: Tensor,
    ) -> list[Tensor]:
        """One layer of both towers, whose tokens attend together."""
        widths = [x.shape[1] for x in streams]
        parts = list(zip(layers, streams, conditions, positions.split(widths, dim=1), strict=True))
        normed = [layer.input_layernorm(x, condition) for layer, x, condition, _ in parts]
        heads = [self._heads(layer, rows, at) for (layer, _, _, at), (rows, _) in zip(parts, normed, strict=True)]
        query, key, value = (torch.cat(rows, dim=2) for rows in zip(*heads, strict=True))
        attended = eager(query, key, value, mask).split(widths, dim=1)
        return [
            _finish(layer, x, rows, gate, condition)
            for (layer, x, condition, _), (_, gate), rows in zip(parts, normed, attended, strict=True)
        ]

    def _cache(self, batch: PaddedBatch) -> tuple[list[KeyValue], Tensor]:
        """Keys and values of the padded prefix."""
        x, valid = self._prefix(batch)
        mask, positions = _float_mask(valid[:, None] & valid[:, :, None]), valid.cumsum(1) - 1
        cache: list[KeyValue] = []
        for layer in self.net.language.layers:
            normed, _ = layer.input_layernorm(x)
            query, key, value = self._heads(layer, normed, positions)
            x = _finish(layer, x, eager(query, key, value, mask), None, None)
            cache.append((key, value))
        return cache, valid


def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As transformers' `eager_attention_forward`: keys repeated, mask added, softmax in float32.

    Takes `[B, heads, T, D]`, gives `[B, T, heads * D]`.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5 + mask
    attended = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value
    return attended.transpose(1, 2).flatten(2)


def _float_mask(seen: Tensor) -> Tensor:
    return torch.where(seen[:, None], 0.0, MASKED)


def _rotate(rows: Tensor, positions: Tensor) -> Tensor:
    """`[B, heads, T, D]` at positions `[B, T]`."""
    rotation = rotation_of(positions.flatten(), rows.shape[-1])
    flat = rotate_halves(rows.transpose(1, 2).flatten(0, 1), rotation)
    return flat.unflatten(0, positions.shape).transpose(1, 2)


def _finish(layer: GemmaLayer, x: Tensor, attended: Tensor, gate: Tensor | None, condition: Tensor | None) -> Tensor:
    """What follows the attention in a Gemma layer."""
    out = layer.self_attn.o_proj(attended)
    x = x + (out if gate is None else out * gate)
    normed, gate = layer.post_attention_layernorm(x, condition)
    out = layer.mlp(normed)
    return x + (out if gate is None else out * gate)
