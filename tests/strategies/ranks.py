"""Runs a function on real gloo ranks and brings back what each returned."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

PRELOAD = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "lightning.pytorch", "lightning_embodied.models"]


def run_ranks(world_size: int, function: Callable[..., Any], directory: Path, *args: Any) -> list[Any]:
    """Calls `function(rank, *args)` on every rank of a new process group; returns the results in order of rank.

    An exception of a rank is raised here, as a RuntimeError with its traceback. Ranks are forked from a server that
    has imported torch and Lightning once.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.set_forkserver_preload(PRELOAD)
    arguments = (world_size, port, function, str(directory), args)
    start_processes(_rank, arguments, nprocs=world_size, start_method="forkserver")
    results = [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        raise RuntimeError("\n".join(errors))
    return [result["value"] for result in results]


def _rank(rank: int, world_size: int, port: int, function: Callable[..., Any], directory: str, args: tuple) -> None:
    torch.set_num_threads(1)
    size = str(world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0", TORCHELASTIC_RUN_ID="tests")
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    try:
        result = {"value": function(rank, *args)}
    except BaseException:
        result = {"error": f"rank {rank}:\n{traceback.format_exc()}"}
    torch.save(result, Path(directory) / f"rank{rank}.pt")
    dist.destroy_process_group()


class PeakMemory:
    """A context that measures by how many bytes the process grew at most, of what it holds and of what it frees."""

    def __enter__(self) -> PeakMemory:
        ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: what is freed goes back to the system
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._status("VmRSS")
        return self

    def __exit__(self, *exception: object) -> None:
        self.bytes = self._status("VmHWM") - self._before

    @staticmethod
    def _status(key: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024
