"""How long collectives take: a latency for each step of the algorithm and a rate for the bytes that must pass.

The form is Hockney's (1994) as NCCL itself tunes by: steps of rings and trees, each protocol with its own latency and
share of the rate, the fastest chosen (constants and formulas: NCCL, `src/graph/tuning.cc`). On a machine that can be
measured, `MeasuredLink` takes the two constants from measurements instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from lightning_embodied.errors import ConfigError
from lightning_embodied.planning.hardware import Cluster

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]

_BASE = {"ring": (6.6e-6, 14.0e-6, 8.4e-6), "tree": (6.8e-6, 14.0e-6, 8.4e-6)}
_LINK = {"ring": (0.6e-6, 1.9e-6, 3.4e-6), "tree": (0.6e-6, 1.25e-6, 4.0e-6)}
_NETWORK = {"ring": (2.7e-6, 4.0e-6, 14.0e-6), "tree": (5.0e-6, 8.5e-6, 14.0e-6)}
_SHARE = (0.5, 0.92, 1.0)
"""Latencies of NCCL's protocols LL, LL128 and Simple, and the share of the rate that each one carries."""
_TREE_SHARE = 0.92


class CollectiveModel(Protocol):
    """Anything that says how long a collective takes."""

    def seconds(self, kind: Kind, size: float, ranks: int, stride: int = 1) -> float:
        """Seconds of one collective.

        Args:
            kind: Which one.
            size: Bytes of the whole tensor: what an all-gather returns, a reduce-scatter or all-reduce is given.
            ranks: Size of the group.
            stride: Ranks between two neighbours of the group: 1 for a run of ranks, the size of the shard group for
                the replicas of HSDP.
        """
        ...


@dataclass(frozen=True)
class NcclModel:
    """NCCL on a cluster.

    Attributes:
        cluster: It.
    """

    cluster: Cluster

    def seconds(self, kind: Kind, size: float, ranks: int, stride: int = 1) -> float:
        """See `CollectiveModel.seconds`."""
        if ranks < 2:
            return 0.0
        per_node = min(ranks, max(1, self.cluster.gpus_per_node // stride))
        nodes = math.ceil(ranks / per_node)
        passes = 2 if kind == "all_reduce" else 1
        ring = size * passes / self._rate(ranks, per_node, nodes)
        options = [
            _BASE["ring"][p]
            + (passes * (ranks - 1) - _between_nodes(nodes, passes)) * max(_LINK["ring"][p], _overhead(nodes, p))
            + _between_nodes(nodes, passes) * _NETWORK["ring"][p]
            + ring / _SHARE[p]
            for p in range(3)
        ]
        if kind == "all_reduce":
            options += [
                _BASE["tree"][p]
                + 2 * ((per_node - 1) * _LINK["tree"][p] + math.log2(nodes) * _NETWORK["tree"][p])
                + ring / (_SHARE[p] * _TREE_SHARE)
                for p in range(3)
            ]
        return min(options)

    def _rate(self, ranks: int, per_node: int, nodes: int) -> float:
        """Bytes/s at which the whole tensor passes once through the narrowest place."""
        cluster = self.cluster
        rates = []
        if per_node > 1:
            rates.append(cluster.gpu.link * cluster.gpu.bandwidth_share * ranks / (ranks - 1))
        if nodes > 1:  # each GPU has its share of the node's cards, also where the group uses one GPU of each node
            cards = cluster.network * cluster.network_share * per_node / cluster.gpus_per_node
            rates.append(cards * nodes / (nodes - 1))
        return min(rates)


def _between_nodes(nodes: int, passes: int) -> int:
    """Steps of a ring that leave a node, as NCCL counts them."""
    if nodes == 1:
        return 0
    return 2 * nodes if passes == 2 else nodes - 1


def _overhead(nodes: int, protocol: int) -> float:
    """Least time of a step in a ring that spans nodes: one microsecond, three for the Simple protocol."""
    if nodes == 1:
        return 0.0
    return 3e-6 if protocol == 2 else 1e-6


@dataclass(frozen=True)
class Measurement:
    """A collective that was timed.

    Attributes:
        kind: Which one.
        size: Bytes of the whole tensor.
        seconds: Its time.
    """

    kind: Kind
    size: float
    seconds: float


@dataclass(frozen=True)
class MeasuredLink:
    """A latency and a rate for each collective, fitted to measurements in one group.

    Attributes:
        ranks: Size of the group that was measured.
        latency: Seconds before the first byte, by collective.
        rate: Bytes of the whole tensor a second, by collective.
    """

    ranks: int
    latency: dict[Kind, float]
    rate: dict[Kind, float]

    @classmethod
    def fit(cls, ranks: int, measurements: Sequence[Measurement]) -> MeasuredLink:
        """Least squares of the relative error, for each collective on its own.

        Args:
            ranks: Size of the group.
            measurements: Of two different sizes at least for each collective.

        Raises:
            ConfigError: There are fewer.
        """
        latency: dict[Kind, float] = {}
        rate: dict[Kind, float] = {}
        for kind in {one.kind for one in measurements}:
            chosen = [one for one in measurements if one.kind == kind]
            if len({one.size for one in chosen}) < 2:
                raise ConfigError(
                    "a latency and a rate need two sizes",
                    where=f"measurements of {kind}",
                    found=f"{len(chosen)} of one size",
                )
            seconds = np.array([one.seconds for one in chosen])
            terms = np.array([[1.0, one.size] for one in chosen]) / seconds[:, None]
            scale = terms.max(axis=0)
            solution = np.linalg.lstsq(terms / scale, np.ones(len(chosen)), rcond=None)[0] / scale
            latency[kind] = max(0.0, float(solution[0]))
            rate[kind] = 1 / max(float(solution[1]), 1e-30)
        return cls(ranks, latency, rate)

    def seconds(self, kind: Kind, size: float, ranks: int, stride: int = 1) -> float:
        """See `CollectiveModel.seconds`.

        Raises:
            ConfigError: Another collective or size of group than was measured.
        """
        if ranks != self.ranks or kind not in self.latency:
            raise ConfigError(
                "this was not measured",
                found=f"{kind} among {ranks} ranks",
                expected=f"{', '.join(sorted(self.latency))} among {self.ranks} ranks",
            )
        return self.latency[kind] + size / self.rate[kind]
