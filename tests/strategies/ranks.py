"""Runs a function on real gloo ranks and brings back what each returned."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(world_size: int, function: Callable[..., Any], directory: Path, *args: Any) -> list[Any]:
    """Calls `function(rank, *args)` on every rank of a new process group; returns the results in order of rank.

    An exception of a rank is raised here, as a RuntimeError with its traceback.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, (world_size, port, function, str(directory), args), nprocs=world_size)
    results = [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        raise RuntimeError(errors[0])
    return [result["value"] for result in results]


def _rank(rank: int, world_size: int, port: int, function: Callable[..., Any], directory: str, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size)
    )
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        result = {"value": function(rank, *args)}
    except BaseException:
        result = {"error": traceback.format_exc()}
    torch.save(result, Path(directory) / f"rank{rank}.pt")
    dist.destroy_process_group()
