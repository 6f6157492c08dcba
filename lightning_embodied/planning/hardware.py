"""What a cluster can do: peak rates of accelerators from their data sheets, and the shares of them that training gets.

The shares are assumptions, the same for all: torch reaches about 70 % of the dense peak in large matrix products and
80 % of the bandwidth, and no kernel takes less than a few microseconds. Set them to what was measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch

from lightning_embodied.errors import ConfigError


@dataclass(frozen=True)
class Accelerator:
    """One GPU.

    Attributes:
        name: Name to ask for it by.
        memory: Bytes, as the data sheet counts them.
        flops: Dense peak FLOP/s by dtype; float32 without TF32, as torch multiplies by default.
        bandwidth: Bytes/s of its memory.
        link: Bytes/s to the other GPUs of its node, in one direction.
        source: Where the numbers are from.
        matmul_share: Share of the peak that large matrix products reach.
        bandwidth_share: Share of the bandwidth that the other kernels reach.
        kernel_seconds: Least time of a kernel, launch included.
        usable_share: Share of the memory that tensors may fill; the rest is CUDA's context, NCCL's buffers and
            fragmentation.
    """

    name: str
    memory: float
    flops: dict[torch.dtype, float]
    bandwidth: float
    link: float
    source: str
    matmul_share: float = 0.7
    bandwidth_share: float = 0.8
    kernel_seconds: float = 5e-6
    usable_share: float = 0.92

    def kernel(self, flops: float, moved: float, dtype: torch.dtype) -> float:
        """Seconds of one kernel by the roofline model (Williams et al., 2009).

        Args:
            flops: Its multiplications and additions.
            moved: Bytes it reads and writes.
            dtype: Of its operands.
        """
        peak = self.flops.get(dtype, self.flops[torch.float32])
        compute = flops / (peak * self.matmul_share)
        return max(compute, moved / (self.bandwidth * self.bandwidth_share), self.kernel_seconds)


def _accelerator(
    name: str, gigabytes: float, half: float, single: float, bandwidth: float, link: float, source: str
) -> Accelerator:
    flops = {torch.bfloat16: half * 1e12, torch.float16: half * 1e12, torch.float32: single * 1e12}
    return Accelerator(name, gigabytes * 1e9, flops, bandwidth * 1e12, link * 1e9, source)


ACCELERATORS: dict[str, Accelerator] = {
    gpu.name: gpu
    for gpu in (
        _accelerator("a100", 80, 312, 19.5, 2.039, 300, "NVIDIA A100 80GB SXM data sheet (2021): NVLink 600 GB/s"),
        _accelerator("h100", 80, 989, 67, 3.35, 450, "NVIDIA H100 SXM data sheet (2023): NVLink 900 GB/s"),
        _accelerator("h200", 141, 989, 67, 4.8, 450, "NVIDIA H200 SXM data sheet (2024): NVLink 900 GB/s"),
        _accelerator("b200", 180, 2250, 75, 8.0, 900, "NVIDIA DGX B200 data sheet (2024), an eighth: NVLink 1.8 TB/s"),
        _accelerator("l40s", 48, 362, 91.6, 0.864, 32, "NVIDIA L40S data sheet (2023): PCIe 4.0 x16, 64 GB/s"),
    )
}
"""Dense peaks without sparsity; `link` is half of the data sheet's figure, which counts both directions."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs on one network.

    Attributes:
        gpu: The GPU.
        network: Bytes/s between a node and the others, in one direction, all its cards together.
        gpus_per_node: GPUs in a node.
        network_share: Share of the network's rate that collectives reach.
    """

    gpu: Accelerator
    network: float
    gpus_per_node: int = 8
    network_share: float = field(default=0.85)

    @classmethod
    def of(cls, gpu: str, network: str, gpus_per_node: int = 8) -> Cluster:
        """A cluster as the command line names it.

        Args:
            gpu: A key of `ACCELERATORS`.
            network: Rate of a node, such as `3.2Tb` (bits) or `400GB` (bytes), a second.
            gpus_per_node: GPUs in a node.

        Raises:
            ConfigError: The GPU is unknown, or the rate or the count is none.
        """
        if gpu.lower() not in ACCELERATORS:
            raise ConfigError("unknown GPU", where="gpu", found=gpu, expected=", ".join(ACCELERATORS))
        if gpus_per_node < 1:
            raise ConfigError("too small", where="gpus_per_node", found=gpus_per_node, expected=">= 1")
        return cls(ACCELERATORS[gpu.lower()], parse_rate(network, where="network"), gpus_per_node)


_RATE = re.compile(r"([0-9.]+)\s*([kMGT])(b|B|bit)(?:ps|/s)?")


def parse_rate(text: str, where: str) -> float:
    """Bytes a second from a rate with its unit: `3.2Tb`, `400Gbps`, `50GB/s`.

    Args:
        text: The rate; `b` and `bit` are bits, `B` bytes, prefixes decimal.
        where: The option, for the error.

    Raises:
        ConfigError: It is no rate.
    """
    match = _RATE.fullmatch(text.strip())
    try:
        value = float(match[1]) if match else 0.0
    except ValueError:
        value = 0.0
    if match is None or value <= 0:
        raise ConfigError("this is no rate", where=where, found=text, expected="such as 3.2Tb (bits) or 400GB (bytes)")
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match[2]]
    return value * scale / (1 if match[3] == "B" else 8)
