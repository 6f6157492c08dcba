"""Places of workers in one attempt of a run. Light: the controller and the board import no torch."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Beginning:
    """How an attempt starts.

    Args:
        attempt: Its number.
        checkpoint: What it resumes from; None when it starts as the user asked.
        step: Optimizer steps of that checkpoint.
    """

    attempt: int
    checkpoint: str | None = None
    step: int = 0


@dataclass(frozen=True)
class Assignment:
    """The place of one worker in one attempt of a run.

    Args:
        attempt: 0 for the first start, one more for each restart.
        rank: Of all workers.
        world_size: Number of workers.
        local_rank: Among the workers of its node.
        local_world_size: Workers on its node.
        node_rank: Of its node.
        main_address: Where rank 0 listens.
        main_port: The port it listens on.
        checkpoint: What a restart resumes from; None in attempt 0 and before the first checkpoint.
        step: Optimizer steps of that checkpoint.
    """

    attempt: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    main_address: str
    main_port: int
    checkpoint: str | None = None
    step: int = 0

    def export(self) -> None:
        """Sets the environment variables of torchrun, which many libraries read."""
        values = {
            "MASTER_ADDR": self.main_address,
            "MASTER_PORT": self.main_port,
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "NODE_RANK": self.node_rank,
            "GROUP_RANK": self.node_rank,
        }
        os.environ.update({name: str(value) for name, value in values.items()})


@dataclass
class WorkerRecord:
    """One worker of the attempt.

    Args:
        rank: Its rank.
        pid: Its process.
        node_id: Ray's id of its node.
        node: The node's host name.
        heard: When it last gave a sign of life, in this process's monotonic seconds.
        knows_stop: Whether it has been told to stop.
        hung: Whether it went silent.
    """

    rank: int
    pid: int
    node_id: str
    node: str
    heard: float
    knows_stop: bool = False
    hung: bool = False


def assign(nodes: list[str], address: str, port: int, beginning: Beginning) -> list[Assignment]:
    """Ranks for workers that are listed in rank order.

    Args:
        nodes: The node of each worker.
        address: Where rank 0 listens.
        port: The port it listens on.
        beginning: How the attempt starts.

    Returns:
        One assignment a worker; local ranks count up on each node, nodes in order of appearance.
    """
    order = list(dict.fromkeys(nodes))
    return [
        Assignment(
            attempt=beginning.attempt,
            rank=rank,
            world_size=len(nodes),
            local_rank=nodes[:rank].count(node),
            local_world_size=nodes.count(node),
            node_rank=order.index(node),
            main_address=address,
            main_port=port,
            checkpoint=beginning.checkpoint,
            step=beginning.step,
        )
        for rank, node in enumerate(nodes)
    ]


sigterm_received = threading.Event()  # in this process since its job began


def notice_sigterm() -> None:
    """Lets a SIGTERM to this process stop the whole run in order. Call it in the main thread.

    The handler only leaves a note, which the thread of the signs of life passes on: where it interrupts the main
    thread, Ray cannot be called.
    """
    sigterm_received.clear()
    signal.signal(signal.SIGTERM, lambda number, frame: sigterm_received.set())
