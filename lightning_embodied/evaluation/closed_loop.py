"""Closed-loop evaluation: can this policy do the job, from starts it has not seen, and how sure is that?

The checkpoint's policy, the scripted expert, an untrained twin and the same policy told another goal all run from the
same initial states. Stopping early keeps what is finished, in a results file that says it is incomplete.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch

from lightning_embodied.errors import CheckpointError, ConfigError, import_extra
from lightning_embodied.evaluation.actors import ChunkPolicy, untrained_twin
from lightning_embodied.evaluation.console import progress_bar
from lightning_embodied.evaluation.plan import EpisodePlan
from lightning_embodied.evaluation.result import EpisodeResult, EvaluationResult, sort_episodes
from lightning_embodied.evaluation.rollout import Inference, Rollouts, run_episodes, survey_starts
from lightning_embodied.evaluation.slots import VectorSlots
from lightning_embodied.evaluation.starts import Start, check_unseen
from lightning_embodied.evaluation.video import write_video
from lightning_embodied.features import Feature

if TYPE_CHECKING:
    from lightning_embodied.models import PolicySpec

PolicyName = Literal["checkpoint", "expert", "untrained", "swapped"]
"""Who may be compared."""


@dataclass(frozen=True)
class EvaluationConfig:
    """What to evaluate on.

    Args:
        env_id: Gymnasium id of the environment.
        tasks: Task names of the environment.
        episodes_per_task: Episodes, each from its own initial state.
        first_seed: Seed of each task's first episode; the next ones follow it. Choose seeds no demonstration used.
        policies: Who runs: `checkpoint`, the scripted `expert`, an `untrained` policy of the same class, and `swapped`,
            the checkpoint told another goal than the scene's (environments with goals only). All start from the same
            initial states.
        dataset: The dataset the checkpoint was trained on; starts are checked to be unseen in it.
        allow_seen_starts: Report starts that were seen in training instead of refusing them.
        image_size: Height and width of camera pictures; default: those the checkpoint was trained with.
        cameras: Camera names; default: those the checkpoint was trained with.
        env_kwargs: Further options of the environment.
        horizon: Steps after which an episode has failed; default: the environment's.
        execute_steps: Steps executed of each action chunk before the policy looks again; default: half a chunk.
        slots: Episodes that run side by side.
        asynchronous: Run each slot in a process of its own.
        batched: Let the slots' observations share a forward pass. Rounding, about 1e-7 of an action, then depends on
            the number of slots; without it results are the same with any number.
        seed: Seed of the policy's sampling noise and of the untrained policy's weights.
        device: Device for inference; `auto` takes a CUDA device if there is one.
        videos: Record the first episode of each task as a video.
    """

    env_id: str = "lightning_embodied/MetaWorld-v0"
    tasks: Sequence[str] = ()
    episodes_per_task: int = 20
    first_seed: int = 100_000
    policies: Sequence[PolicyName] = ("checkpoint", "expert", "untrained")
    dataset: str | None = None
    allow_seen_starts: bool = False
    image_size: int | None = None
    cameras: Sequence[str] | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    horizon: int | None = None
    execute_steps: int | None = None
    slots: int = 4
    asynchronous: bool = True
    batched: bool = True
    seed: int = 0
    device: str = "auto"
    videos: bool = True

    def __post_init__(self) -> None:
        for name in ("episodes_per_task", "slots", "horizon", "execute_steps", "image_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError("this number must be positive", where=name, found=value, expected=">= 1")
        for name in ("tasks", "policies"):
            values = list(getattr(self, name))
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name} must name at least one, each once", where=name, found=values)


@runtime_checkable
class _ChecksEnvironment(Protocol):
    def check_environment(self, features: Mapping[str, Feature]) -> None: ...


class EvaluationInterrupted(KeyboardInterrupt):
    """Ctrl-C during an evaluation; what was finished is in `result` and in the results file.

    Args:
        result: The incomplete result.
    """

    def __init__(self, result: EvaluationResult) -> None:
        super().__init__(f"stopped after {len(result.episodes)} of {result.planned_episodes} episodes")
        self.result = result


def evaluate(
    policy: str | Path | ChunkPolicy,
    config: EvaluationConfig,
    *,
    output_dir: str | Path | None = None,
    progress: bool = False,
) -> EvaluationResult:
    """Evaluates a policy in closed loop.

    Args:
        policy: A checkpoint file, a run directory (its newest checkpoint), a quantised policy's directory, or a policy
            object.
        config: What to evaluate on.
        output_dir: Where `results.json` and `videos/` go; default: `evaluation` in the checkpoint's run directory, and
            nowhere for a policy object.
        progress: Draw a progress bar.

    Returns:
        The result, already written to the output directory.

    Raises:
        CheckpointError: The checkpoint cannot be read, or was trained on other features than the environment has.
        ConfigError: An unknown environment, task or camera, or an environment that does not repeat its starts.
        DatasetError: A start was seen in training.
        EvaluationInterrupted: Ctrl-C; finished episodes are kept.
    """
    acting, checkpoint = _load(policy, config)
    if checkpoint is not None and output_dir is None:
        output_dir = run_directory_of(Path(checkpoint["path"])) / "evaluation"
    slots, rollouts, interrupted = _open_slots(config, acting), Rollouts(), False
    try:
        features, fps = slots.describe()
        if isinstance(acting, _ChecksEnvironment):
            acting.check_environment(features)
        _roll_out(acting, slots, rollouts, config, progress=progress)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        slots.close()
    result = EvaluationResult(
        episodes=sort_episodes(rollouts.episodes, list(config.policies), list(config.tasks)),
        settings=_plain({**asdict(config), "execute_steps": slots.execute_steps}),
        planned_episodes=len(config.policies) * len(config.tasks) * config.episodes_per_task,
        complete=not interrupted,
        effort=rollouts.effort,
        checkpoint=checkpoint,
        training_data=rollouts.training_data,
        versions=versions(),
    )
    if output_dir is not None and result.episodes:
        result = _write(result, rollouts, Path(output_dir), fps / slots.execute_steps)
    if interrupted:
        raise EvaluationInterrupted(result)
    return result


def run_directory_of(checkpoint: Path) -> Path:
    """The run directory a checkpoint lies in: above a folder `checkpoints`, else its own folder."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" else folder


def versions() -> dict[str, str]:
    """Versions of what success rates depend on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("lightning-embodied", "torch", "lightning", "gymnasium", "metaworld", "mujoco", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _load(policy: str | Path | ChunkPolicy, config: EvaluationConfig) -> tuple[ChunkPolicy, dict[str, str] | None]:
    if not isinstance(policy, str | Path):
        return policy, None
    from lightning_embodied.models import find_checkpoint, load_policy
    from lightning_embodied.quantization import MANIFEST
    from lightning_embodied.quantization import load_policy as load_quantized

    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    if (Path(policy) / MANIFEST).is_file():
        path = Path(policy) / MANIFEST  # it holds the hashes of the other files
        loaded = load_quantized(policy, device=device)
    else:
        path = find_checkpoint(policy)
        loaded = load_policy(path, map_location=device).to(device)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return loaded, {"path": str(path), "sha256": digest}


def _open_slots(config: EvaluationConfig, acting: ChunkPolicy) -> VectorSlots:
    spec = getattr(acting, "spec", None)
    given = _picture_options(config, spec)
    horizon = None if spec is None else int(spec.action_horizon)
    execute_steps = config.execute_steps or (1 if horizon is None else max(1, horizon // 2))
    if horizon is not None and execute_steps > horizon:
        raise ConfigError(
            "more steps are to be executed than the policy predicts",
            where="execute_steps",
            found=execute_steps,
            expected=f"at most {horizon}",
        )
    try:
        return VectorSlots(
            config.env_id,
            config.tasks,
            {**given, **config.env_kwargs},
            num_slots=min(config.slots, len(config.tasks) * config.episodes_per_task),
            asynchronous=config.asynchronous,
            execute_steps=execute_steps,
            horizon=config.horizon,
        )
    except ConfigError as error:
        if error.where != "cameras" or config.cameras is not None:
            raise
        raise CheckpointError(
            "the policy was trained on another feature set: the environment lacks one of its cameras",
            where=config.env_id,
            found=error.found,
            expected=error.expected,
            mend="use the environment (and its cameras) that the demonstrations were collected in",
        ) from error


def _picture_options(config: EvaluationConfig, spec: PolicySpec | None) -> dict[str, Any]:
    """Picture size and cameras: as asked for, or else as trained, where the environment lets one choose."""
    import_extra("gymnasium", "sim")
    from lightning_embodied.evaluation.worker import takes_option

    options: dict[str, Any] = {}
    if spec is not None:
        pictures = {key.removeprefix("observation.images."): spec.features[key] for key in spec.cameras}
        trained = {"cameras": sorted(pictures), "image_size": next((f.shape[0] for f in pictures.values()), None)}
        options = {name: value for name, value in trained.items() if value and takes_option(config.env_id, name)}
    asked = {"cameras": config.cameras, "image_size": config.image_size}
    return {**options, **{name: value for name, value in asked.items() if value is not None}}


def _plans(config: EvaluationConfig) -> list[EpisodePlan]:
    # Task by task, because a worker that changes the task loads another simulation.
    return [
        EpisodePlan(task, config.first_seed + i, record=config.videos and i == 0)
        for task in config.tasks
        for i in range(config.episodes_per_task)
    ]


def _roll_out(
    acting: ChunkPolicy, slots: VectorSlots, into: Rollouts, config: EvaluationConfig, *, progress: bool
) -> None:
    plans = _plans(config)
    actors = {name: _actor(name, acting, config) for name in config.policies}
    starts = survey_starts(plans, slots)
    if "swapped" in actors:
        survey_starts([replace(plans[0], swapped=True)], slots)  # fails now if the environment has no other goal
    into.training_data = _check_starts(starts, config)
    subject = "checkpoint" if "checkpoint" in config.policies else config.policies[0]
    inference = Inference(slots.execute_steps, config.seed, config.batched)
    with progress_bar(len(plans) * len(actors), show=progress) as on_episode:
        for name, actor in actors.items():
            swapped, record = name == "swapped", name == subject
            own = [replace(p, expert=actor is None, swapped=swapped, record=p.record and record) for p in plans]
            run_episodes(name, actor, own, slots, into, inference=inference, on_episode=on_episode)
    _check_repeatable(into.episodes, starts)


def _actor(name: PolicyName, acting: ChunkPolicy, config: EvaluationConfig) -> ChunkPolicy | None:
    if name == "expert":
        return None
    if name != "untrained":
        return acting
    from lightning_embodied.models import PolicyModule

    if not isinstance(acting, PolicyModule):
        raise ConfigError("only a PolicyModule has an untrained twin", where="policies", found=type(acting).__name__)
    twin: ChunkPolicy = untrained_twin(acting, config.seed)
    return twin


def _check_starts(starts: Sequence[Start], config: EvaluationConfig) -> dict[str, Any] | None:
    distinct = len({(start.task, start.digest) for start in starts})
    if distinct < len(starts):
        warnings.warn(f"only {distinct} of {len(starts)} initial states are distinct", stacklevel=3)
    if config.dataset is None:
        return None
    return check_unseen(config.dataset, starts, allow_seen=config.allow_seen_starts)


def _check_repeatable(episodes: Sequence[EpisodeResult], starts: Sequence[Start]) -> None:
    surveyed = {(start.task, start.seed): start.digest for start in starts}
    for episode in episodes:
        if surveyed[episode.task, episode.seed] != episode.initial_state:
            raise ConfigError(
                "the environment does not repeat its initial state for a seed, so policies cannot be compared",
                where=f"{episode.task}, seed {episode.seed}, {episode.policy}",
                mend="make reset(seed=n) a pure function of the task and n",
            )


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}


def _write(result: EvaluationResult, rollouts: Rollouts, folder: Path, fps: float) -> EvaluationResult:
    videos = {}
    for task, frames in rollouts.frames.items():
        name = f"videos/{task.replace('/', '_').replace(' ', '_')}.mp4"
        write_video(folder / name, frames, fps)
        videos[task] = name
    result = replace(result, videos=videos)
    result.save(folder / "results.json")
    return result
