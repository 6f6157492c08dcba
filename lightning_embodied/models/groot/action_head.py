"""GR00T N1.5's action head: flow matching by a DiT that reads the backbone's features (arXiv:2503.14734).

Flow time runs from 0 (noise) to 1 (actions), the other way round than pi0's, and is an integer between 0 and 1000 to
the network. Everything that does not depend on it (features, their keys and values, the state token) is computed once
an observation and serves all noise draws in training and all denoising steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_embodied.models.groot.embodiment import ActionEncoder, Embodiment, EmbodimentMLP
from lightning_embodied.models.groot.qwen3 import Rows
from lightning_embodied.models.groot.transformer import DiT, Segments, SelfAttention, TransformerSizes
from lightning_embodied.models.prefix import KeyValue

_DIT = TransformerSizes(num_layers=16, num_attention_heads=32, attention_head_dim=48)
_SELF_ATTENTION = TransformerSizes(num_layers=4, num_attention_heads=32, attention_head_dim=64)


@dataclass(frozen=True)
class ActionHeadSizes:
    """Sizes of the head, under the names of NVIDIA's configuration; the defaults are the published ones.

    Attributes:
        hidden_size: Hidden width of state encoder and action decoder, and width that the DiT ends in.
        max_state_dim: Width of the state vectors; shorter ones are padded with zeros.
        max_action_dim: Width of the action vectors; shorter ones are padded with zeros.
        max_num_embodiments: Sets of weights for different robots.
        max_seq_len: Longest action chunk.
        num_target_vision_tokens: Learned tokens between state and actions.
        num_timestep_buckets: Flow times the network can tell apart.
        noise_beta_alpha: First parameter of the Beta distribution that flow times are drawn from.
        noise_beta_beta: Its second parameter.
        noise_s: Flow time is `(noise_s - draw) / noise_s`.
        diffusion_model: The DiT.
        vl_self_attention: The transformer over the backbone's features, of their width.
    """

    hidden_size: int = 1024
    max_state_dim: int = 64
    max_action_dim: int = 32
    max_num_embodiments: int = 32
    max_seq_len: int = 1024
    num_target_vision_tokens: int = 32
    num_timestep_buckets: int = 1000
    noise_beta_alpha: float = 1.5
    noise_beta_beta: float = 1.0
    noise_s: float = 0.999
    diffusion_model: TransformerSizes = _DIT
    vl_self_attention: TransformerSizes = _SELF_ATTENTION


@dataclass(frozen=True)
class Observed:
    """What the head has made of `B` observations, for all noise draws and denoising steps.

    Attributes:
        contexts: Keys and values of the features, for each layer of the DiT that reads them.
        rows: Where the samples lie among the features.
        state: `[B, 1, width]`, the state tokens.
        embodiment: Which robots the samples are of.
    """

    contexts: list[KeyValue]
    rows: Rows
    state: Tensor
    embodiment: Embodiment


class ActionHead(nn.Module):
    """Features of the backbone, states and noisy actions to velocities.

    Args:
        sizes: Of the head.
    """

    def __init__(self, sizes: ActionHeadSizes) -> None:
        super().__init__()
        self.sizes = sizes
        robots, width, hidden = sizes.max_num_embodiments, sizes.diffusion_model.width, sizes.hidden_size
        context = sizes.vl_self_attention.width
        self.model = DiT(sizes.diffusion_model, context, hidden)
        self.state_encoder = EmbodimentMLP(robots, sizes.max_state_dim, hidden, width)
        self.action_encoder = ActionEncoder(robots, sizes.max_action_dim, width)
        self.action_decoder = EmbodimentMLP(robots, hidden, hidden, sizes.max_action_dim)
        self.future_tokens = nn.Embedding(sizes.num_target_vision_tokens, width)
        self.vlln = nn.LayerNorm(context)
        self.vl_self_attention = SelfAttention(sizes.vl_self_attention)
        self.position_embedding = nn.Embedding(sizes.max_seq_len, width)
        for embedding in (self.future_tokens, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.02)

    def features(self, backbone_features: Tensor, rows: Rows) -> Tensor:
        """The backbone's features `[T, width]` after norm and self-attention, each sample for itself."""
        cu, longest = rows.cu_seqlens, rows.max_seqlen
        features: Tensor = self.vl_self_attention(self.vlln(backbone_features), Segments(cu, cu, longest, longest))
        return features

    def observe(self, backbone_features: Tensor, rows: Rows, state: Tensor, embodiment: Embodiment) -> Observed:
        """Everything that does not depend on flow time.

        Args:
            backbone_features: `[T, width]`, packed.
            rows: Where the `B` samples lie.
            state: `[B, max_state_dim]`, normalised and padded.
            embodiment: Which robots the samples are of.
        """
        contexts = self.model.contexts(self.features(backbone_features, rows))
        return Observed(contexts, rows, self.state_encoder(state[:, None], embodiment), embodiment)

    def forward(self, observed: Observed, noisy: Tensor, timestep: Tensor) -> Tensor:
        """Velocities of `R` noisy chunks for each observation.

        Args:
            observed: The `B` observations.
            noisy: `[B, R, H, max_action_dim]`.
            timestep: int64 `[B, R]`, flow times from 0 to `num_timestep_buckets`.

        Returns:
            float32, shaped like `noisy`.
        """
        batch, draws, horizon, _ = noisy.shape
        chunks, embodiment = (draws, horizon), observed.embodiment
        times = timestep.repeat_interleave(horizon, dim=1)
        actions = self.action_encoder(noisy.flatten(1, 2), times, embodiment).unflatten(1, chunks)
        actions = actions + self.position_embedding.weight[:horizon]
        state = observed.state[:, None].expand(-1, draws, -1, -1)
        future = self.future_tokens.weight.expand(batch, draws, -1, -1)
        tokens = torch.cat((state, future, actions), dim=2).flatten(0, 1)
        queries = draws * tokens.shape[1]
        starts = torch.arange(batch + 1, dtype=torch.int32, device=tokens.device) * queries
        reading = Segments(starts, observed.rows.cu_seqlens, queries, observed.rows.max_seqlen)
        result = self.model(tokens, timestep.flatten(), observed.contexts, reading)
        decoded = self.action_decoder(result[:, -horizon:].reshape(batch, draws * horizon, -1), embodiment)
        velocity: Tensor = decoded.unflatten(1, chunks).float()
        return velocity

    def discretize(self, time: Tensor) -> Tensor:
        """Flow times in [0, 1] as the network reads them: int64."""
        return (time * self.sizes.num_timestep_buckets).long()

    def sample_time(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Draws flow times from torch's random state, float32; the noisy end, near 0, is favoured."""
        numbers = (self.sizes.noise_beta_alpha, self.sizes.noise_beta_beta)
        alpha, beta = torch.tensor(numbers, device=device, dtype=torch.float32)
        draw = torch.distributions.Beta(alpha, beta).sample(shape)
        return (self.sizes.noise_s - draw) / self.sizes.noise_s
