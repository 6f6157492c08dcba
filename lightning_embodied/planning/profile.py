"""One training step on one rank of many, run abstractly: what memory it takes and what happens in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from lightning_embodied.errors import ConfigError
from lightning_embodied.planning.abstract import AbstractExecution, abstract_execution
from lightning_embodied.planning.events import Compute, Event
from lightning_embodied.planning.hardware import ACCELERATORS, Accelerator
from lightning_embodied.planning.recorder import StepRecorder
from lightning_embodied.planning.sharding import ReachedInto, Sharding
from lightning_embodied.planning.world import fake_world

Step = Callable[[nn.Module, AbstractExecution], Tensor]
"""Runs the forward pass of one micro-batch, which it makes with `AbstractExecution.empty`, and returns the loss."""
MakeOptimizer = Callable[[Sequence[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. The parts do not all peak at once, so `peak` is at most their sum.

    Attributes:
        parameters: This rank's share.
        gradients: This rank's share, in buckets or not.
        optimizer: This rank's share.
        buckets: DDP's buckets, where gradients do not live in them.
        activations: Most of everything else: activations, gathered parameters, temporaries, the batch.
        peak: Most at any time of a step.
    """

    parameters: int
    gradients: int
    optimizer: int
    buckets: int
    activations: int
    peak: int


@dataclass(frozen=True)
class StepProfile:
    """A step of one rank.

    Attributes:
        sharding: How it was sharded.
        memory: Its memory.
        events: What happens in the forward and backward pass, in the order the host issues it.
        optimizer_seconds: Time of the optimizer's kernels.
        flops: Of the forward and backward pass.
        saved: Bytes that the forward pass keeps for the backward pass, beside parameters.
        parameters: Numbers in the whole model.
        trainable: Those of them that train.
        state_bytes: Of all ranks' parameters and optimizer states together: what a checkpoint holds.
        reached_into: Classes of stacked blocks that cannot be units.
    """

    sharding: Sharding
    memory: Memory
    events: tuple[Event, ...]
    optimizer_seconds: float
    flops: int
    saved: int
    parameters: int
    trainable: int
    state_bytes: int
    reached_into: frozenset[str]


def default_optimizer(parameters: Sequence[nn.Parameter]) -> Optimizer:
    """AdamW as torch runs it on a GPU, all parameters at once."""
    return AdamW(parameters, foreach=True)


def profile_step(
    module: nn.Module,
    step: Step,
    sharding: Sharding,
    gpu: Accelerator,
    *,
    precision: str = "32-true",
    optimizer: MakeOptimizer = default_optimizer,
    accumulate: int = 1,
) -> StepProfile:
    """Shards a model and runs one step of it on rank 0 without allocating anything.

    Args:
        module: The model on the meta device; it is sharded in place and of no use afterwards.
        step: One micro-batch's forward pass.
        sharding: How.
        gpu: Whose kernel times are counted.
        precision: Lightning's name of it: `32-true`, `bf16-mixed`, `16-mixed`, `bf16-true`.
        optimizer: Makes the optimizer; is given this rank's parameters that train.
        accumulate: Micro-batches of an optimizer step.

    Raises:
        ConfigError: The precision is unknown, nothing trains, or a unit is reached into from outside.
    """
    whole = [(parameter.numel(), parameter.itemsize, parameter.requires_grad) for parameter in module.parameters()]
    if not any(trains for _, _, trains in whole):
        raise ConfigError("no parameter of the model trains", where=type(module).__name__)
    context = _precision(module, precision)
    with ExitStack() as stack:
        if sharding.strategy != "ddp":
            stack.enter_context(fake_world(sharding.ranks))
        sharding.apply(module)
        execution = stack.enter_context(abstract_execution())
        execution.materialize(module)
        recorder = stack.enter_context(StepRecorder(gpu).watching_storages())
        for tensor in (*module.parameters(), *module.buffers()):
            recorder.track(tensor)
        recorder.restart_peak()
        held, training = recorder.alive, [parameter for parameter in module.parameters() if parameter.requires_grad]
        saved, reached = _forward_backward(module, step, execution, context, recorder, watch=sharding.strategy == "ddp")
        events, flops = tuple(recorder.events), recorder.flops
        busy, quiet = recorder.peak, recorder.peak_without_gradients
        states, update_peak, update_seconds = _update(training, optimizer, recorder)
    gradients = sum(local(parameter).nbytes for parameter in training)
    bucketed = sharding.strategy == "ddp" and sharding.ranks > 1
    buckets = gradients if bucketed and not sharding.bucket_view else 0
    lasting = accumulate > 1 or (bucketed and sharding.bucket_view)  # gradients that exist when the step begins
    step_peak = quiet + gradients if lasting else busy
    trained = sum(numel * size for numel, size, trains in whole if trains)
    return StepProfile(
        sharding=sharding,
        memory=Memory(
            parameters=held,
            gradients=gradients,
            optimizer=states,
            buckets=buckets,
            activations=quiet - held,
            peak=max(step_peak + states, update_peak) + buckets,
        ),
        events=events,
        optimizer_seconds=update_seconds,
        flops=flops,
        saved=saved - held,
        parameters=sum(numel for numel, _, _ in whole),
        trainable=sum(numel for numel, _, trains in whole if trains),
        state_bytes=sum(numel * size for numel, size, _ in whole) + round(states / gradients * trained),
        reached_into=frozenset(reached),
    )


def forward_bytes(module: nn.Module, step: Step, precision: str = "32-true") -> int:
    """Bytes that one micro-batch's forward pass keeps for the backward pass, beside parameters and buffers.

    Two micro-batches tell how activations grow with it, for a third of the time of `profile_step`.

    Args:
        module: The model on the meta device; of no use afterwards.
        step: One micro-batch's forward pass.
        precision: As for `profile_step`.
    """
    context = _precision(module, precision)
    recorder = StepRecorder(next(iter(ACCELERATORS.values())))
    with abstract_execution() as execution, recorder.watching_storages():
        execution.materialize(module)
        for tensor in (*module.parameters(), *module.buffers()):
            recorder.track(tensor)
        held = recorder.alive
        with context():
            loss = step(module, execution)
        kept = recorder.alive - held
        del loss
    return kept


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _precision(module: nn.Module, precision: str) -> Callable[[], AbstractContextManager[object]]:
    """Converts the module if the precision says so, and returns the context of its forward pass."""
    mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    whole = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}
    if precision in mixed:
        return partial(torch.autocast, "cpu", dtype=mixed[precision])
    if precision not in whole:
        raise ConfigError(
            "no such precision can be planned", where="precision", found=precision, expected=", ".join([*mixed, *whole])
        )
    if whole[precision] != torch.float32:
        module.to(whole[precision])
    return nullcontext


def _forward_backward(
    module: nn.Module,
    step: Step,
    execution: AbstractExecution,
    context: Callable[[], AbstractContextManager[object]],
    recorder: StepRecorder,
    *,
    watch: bool,
) -> tuple[int, set[str]]:
    """Runs both passes; without sharding, notes when gradients are complete and which blocks cannot be units.

    Returns:
        Bytes alive after the forward pass, and the classes of those blocks.
    """
    hooks = []
    if watch:
        hooks = [
            parameter.register_post_accumulate_grad_hook(recorder.gradient_ready)  # type: ignore[no-untyped-call]
            for parameter in module.parameters()
            if parameter.requires_grad
        ]
    reached = ReachedInto(module) if watch else None
    try:
        with warnings.catch_warnings(), context():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nothing writes to it
            loss = step(module, execution)
        alive = recorder.alive
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise ConfigError(
            "a unit is reached into: a layer of it is called from elsewhere, where its parameters are sharded",
            where="units",
            found=str(error).partition("\n")[0],
            mend="leave its class out of `units`",
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
        if reached is not None:
            reached.remove()
    return alive, reached.names if reached is not None else set()


def _update(training: Sequence[nn.Parameter], make: MakeOptimizer, recorder: StepRecorder) -> tuple[int, int, float]:
    """Bytes of the optimizer's states, most bytes alive while it updates, and its kernels' seconds.

    It updates the local shards, which is what it does through DTensors, without their cost to this process.
    """
    leaves = []
    for parameter in training:
        leaf = nn.Parameter(local(parameter))
        gradient = parameter.grad
        leaf.grad = None if gradient is None else local(gradient)
        leaves.append(leaf)
    optimizer = make(leaves)
    before = recorder.alive
    optimizer.step()
    states = recorder.alive - before
    recorder.restart_peak()
    recorder.events.clear()
    optimizer.step()
    seconds = sum(event.seconds for event in recorder.events if isinstance(event, Compute))
    return states, recorder.peak, seconds
