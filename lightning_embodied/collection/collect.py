"""Scripted experts demonstrate, worker processes record, one writer writes.

The result depends on the options alone, not on the number of workers: seeds decide the episodes, and they are written
in order of task and seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning_embodied.collection.provenance import Provenance
from lightning_embodied.collection.recorder import EnvironmentDescription, EpisodeRecorder
from lightning_embodied.collection.replacing import replacing
from lightning_embodied.collection.schedule import SeedSchedule, TaskTally
from lightning_embodied.envs import WorkerProcess, default_workers
from lightning_embodied.errors import ConfigError


@dataclass(frozen=True)
class CollectionResult:
    """What was recorded.

    Attributes:
        root: Directory of the dataset.
        episodes: Episodes written.
        frames: Frames written.
        tallies: Per task, how many episodes were kept and which seeds failed.
    """

    root: Path
    episodes: int
    frames: int
    tallies: dict[str, TaskTally]


def collect(
    root: str | Path,
    env_id: str = "lightning_embodied/MetaWorld-v0",
    tasks: Sequence[str] | None = None,
    *,
    episodes_per_task: int = 40,
    first_seed: int = 0,
    image_size: int = 64,
    cameras: Sequence[str] | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    action_noise: float = 0.0,
    noise_steps: int = 5,
    steps_after_success: int = 0,
    vcodec: Literal["h264", "hevc", "libsvtav1"] = "h264",
    crf: int = 12,
    num_workers: int | None = None,
    if_exists: Literal["error", "overwrite"] = "error",
) -> CollectionResult:
    """Records demonstrations of an environment's scripted expert as a LeRobot v3.0 dataset.

    Failed attempts are not kept; they are counted, and the next seed is tried instead. Where each episode came from is
    in `meta/collection.json`. The dataset's frames per second are the environment's.

    Args:
        root: Directory of the dataset to write.
        env_id: Gymnasium id of the environment: `lightning_embodied/MetaWorld-v0` or `lightning_embodied/Tabletop-v0`.
        tasks: Names of the tasks to demonstrate; None for all the environment has.
        episodes_per_task: Successful episodes of each task.
        first_seed: First seed of the initial states; evaluate on other seeds.
        image_size: Width and height of the pictures in pixels.
        cameras: Views to record; None for the environment's own choice.
        env_kwargs: Further options of the environment.
        action_noise: Standard deviation of the noise on executed actions, in units of the action (Meta-World: 1 is one
            centimetre a step). The recorded action stays the expert's. 0.3 widens the states that are visited.
        noise_steps: Steps for which one draw of the noise is held.
        steps_after_success: Steps recorded after the first successful one.
        vcodec: Video codec: `h264`, `hevc` or `libsvtav1` (smallest, slowest to decode).
        crf: Constant rate factor of the video; lower is better and larger. LeRobot's 30 blurs away gripper and markers
            at 64 px; 12 differs by 3 of 255 levels in the mean, at 0.9 kB a picture.
        num_workers: Worker processes; None for one a usable core. The result does not depend on it.
        if_exists: Whether an existing dataset at `root` is an `error`, or is replaced (`overwrite`) once the new one
            is complete.

    Returns:
        Counts; the dataset is at `root`.

    Raises:
        ConfigError: An unknown environment, task or camera, or a number that cannot work.
        DatasetError: The directory is in use, or the disk is full (nothing is left then).
        MissingExtraError: The simulator is not installed, or there is no OpenGL to render with.
        EmbodiedError: The expert fails too often, or a worker process died; complete episodes are kept.
        KeyboardInterrupt: Ctrl-C; complete episodes are kept.
    """
    _check(tasks, episodes_per_task=episodes_per_task, noise_steps=noise_steps, action_noise=action_noise)
    root, options = Path(root), {"image_size": image_size, **(env_kwargs or {})}
    if cameras is not None:
        options["cameras"] = tuple(cameras)
    make_recorder = partial(
        EpisodeRecorder,
        env_id,
        options,
        action_noise=action_noise,
        noise_steps=noise_steps,
        steps_after_success=steps_after_success,
    )
    provenance = Provenance(env_id, options, action_noise, noise_steps, steps_after_success)
    with ExitStack() as stack, replacing(root, if_exists):
        workers = [WorkerProcess(make_recorder) for _ in range(num_workers or default_workers(episodes_per_task))]
        for worker in workers:
            stack.callback(worker.close)
        # workers import this module too, and write nothing
        from lightning_embodied.collection.writing import write_episodes
        from lightning_embodied.data import LeRobotDatasetWriter

        found: EnvironmentDescription = workers[0].call("describe", tasks)
        schedule = SeedSchedule(found.task_names, episodes_per_task, first_seed)
        writer = LeRobotDatasetWriter(
            root, fps=found.fps, features=found.features, robot_type=found.robot_type, vcodec=vcodec, crf=crf
        )
        write_episodes(writer, workers, schedule, provenance, len(found.task_names) * episodes_per_task)
    frames = sum(origin.steps for origin in provenance.episodes)
    return CollectionResult(root, len(provenance.episodes), frames, schedule.tallies)


def _check(tasks: Sequence[str] | None, *, episodes_per_task: int, noise_steps: int, action_noise: float) -> None:
    if tasks is not None and (not tasks or len(set(tasks)) < len(tasks)):
        raise ConfigError("tasks must be named once each", where="tasks", found=list(tasks))
    for where, value in (("episodes_per_task", episodes_per_task), ("noise_steps", noise_steps)):
        if value < 1:
            raise ConfigError("must be at least 1", where=where, found=value)
    if action_noise < 0:
        raise ConfigError("a standard deviation is not negative", where="action_noise", found=action_noise)
