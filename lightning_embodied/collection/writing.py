"""Episodes from the workers into the dataset, in order, whatever order they are done in."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import wait

from lightning_embodied.collection.progress import CollectionProgress
from lightning_embodied.collection.provenance import EpisodeOrigin, Provenance, write_provenance
from lightning_embodied.collection.recorder import Episode
from lightning_embodied.collection.schedule import SeedSchedule
from lightning_embodied.data import LeRobotDatasetWriter
from lightning_embodied.envs import WorkerProcess


def write_episodes(
    writer: LeRobotDatasetWriter,
    workers: list[WorkerProcess],
    schedule: SeedSchedule,
    provenance: Provenance,
    total: int,
) -> None:
    """Keeps the workers busy and writes what they record; after Ctrl-C and errors what is complete is a dataset.

    Args:
        writer: Of a new dataset.
        workers: Each with an `EpisodeRecorder`.
        schedule: Which episodes to try.
        provenance: Where each episode came from; filled here.
        total: Episodes to keep, for the progress bar.
    """
    progress = CollectionProgress(writer.root, total)
    try:
        with progress, writer:
            for episode in _recorded(workers, schedule):
                _write(writer, episode)
                provenance.episodes.append(EpisodeOrigin.of(writer.num_episodes - 1, episode))
                progress.advance(episode, schedule.tallies)
    finally:  # after Ctrl-C and errors too: the writer has completed what could be completed
        if writer.root.exists() and provenance.episodes:
            write_provenance(writer.root, provenance, schedule.tallies, complete=schedule.finished)
            progress.summarize(schedule.tallies, complete=schedule.finished)


def _recorded(workers: list[WorkerProcess], schedule: SeedSchedule) -> Iterator[Episode]:
    """Keeps the workers busy and yields the episodes to keep, in order."""
    idle, busy = list(workers), dict[int, WorkerProcess]()
    while not schedule.finished:
        while idle and (attempt := schedule.next_attempt()):
            worker = idle.pop()
            worker.send("record", *attempt)
            busy[worker.fileno()] = worker
        ready = set(wait(list(busy)))
        for descriptor in [one for one in busy if one in ready]:
            worker = busy.pop(descriptor)
            schedule.finish(worker.receive())
            idle.append(worker)
        yield from schedule.ready()


def _write(writer: LeRobotDatasetWriter, episode: Episode) -> None:
    for i in range(episode.steps):
        writer.add_frame({**{key: values[i] for key, values in episode.frames.items()}, "task": episode.instruction})
    writer.save_episode()
