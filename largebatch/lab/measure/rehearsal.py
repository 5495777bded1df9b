"""Rehearse one worker of a job on a machine without its GPUs.

The worker's objects are built as in a run, on fake tensors, which have shapes and no memory, and
the training loop makes one update. The backend represents all other workers and records the
messages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp import GradScaler
from torch.optim import SGD

from largebatch.data.order import samples_at
from largebatch.data.pipeline import divide_samples
from largebatch.data.types import Batch
from largebatch.distributed.backend import Work, own_part
from largebatch.distributed.serial import Done
from largebatch.errors import LargebatchError, PlanError
from largebatch.lab.measure.estimate import largest_side, random_batch, saved_bytes, state_bytes
from largebatch.lab.planner.cluster import Cluster, require_workers
from largebatch.lab.planner.prediction import FIXED_BYTES, require_cacheable
from largebatch.models.batchnorm import Spans
from largebatch.models.of_recipe import build_model, require_accepted, require_trainable
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.runs.optimizer_of_recipe import build_optimizer
from largebatch.runs.state import build_criterion, build_state, build_step_log, kept_exact
from largebatch.training.loop import step_seeds, train
from largebatch.training.state import TrainState

_CPU = torch.device("cpu")


class Message(NamedTuple):
    """One collective operation of this worker."""

    kind: str
    """Kind of operation: sum or gather."""

    workers: int
    num_bytes: int
    """Bytes that this worker contributes."""


class Rehearsed:
    """A Backend of one real worker that records its messages; the other workers are simulated."""

    name = "torch"
    device = _CPU

    def __init__(self, *, rank: int, workers: int, local_size: int = 1) -> None:
        self.rank, self.world_size = rank, workers
        self.local_rank, self.local_size = rank % local_size, local_size
        self.messages: list[Message] = []

    def all_reduce(self, tensor: Tensor) -> Work:
        """Record a message, and leave `tensor` unchanged."""
        self.messages.append(Message("sum", self.world_size, tensor.nbytes))
        return Done()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Record a message, and return a tensor of the shape of the result."""
        self.messages.append(Message("gather", self.world_size, tensor.nbytes))
        return tensor.expand(self.world_size, *tensor.shape).clone()

    def broadcast(self, tensor: Tensor) -> None:
        """Leave `tensor` unchanged."""

    def split(self, parts: Sequence[Sequence[int]]) -> "Rehearsed":
        """Return this worker's subgroup, which records its messages here."""
        own = own_part(parts, rank=self.rank, world_size=self.world_size)
        group = Rehearsed(rank=own.index(self.rank), workers=len(own))
        group.messages = self.messages
        return group

    def started(self) -> None:
        """Do nothing: nothing is waited for."""

    def barrier(self) -> None:
        """Return immediately."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Device memory of one worker during an update, in bytes."""

    parameters: int
    buffers: int
    gradients: int
    """Gradients, with the copies of a shorter type that are sent."""

    optimizer: int
    average: int
    activations: int
    """Activations of a device batch, with its images."""

    @property
    def total(self) -> int:
        """Sum of all, without temporary tensors of backward and without libraries."""
        kept = self.parameters + self.buffers + self.gradients
        return kept + self.optimizer + self.average + self.activations

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint."""
        return self.parameters + self.buffers + self.optimizer + self.average


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Result of a rehearsal of one worker."""

    plan: Plan
    rank: int
    node: int | None
    """Number of the worker's node; None without a cluster."""

    local_rank: int | None
    memory: Memory
    available: float | None
    """Memory of the GPU in bytes; None if unknown."""

    messages: tuple[Message, ...]
    """Messages of one update."""

    first_samples: tuple[int, ...]
    """Indices of the samples in the worker's first device batch."""

    @property
    def fits(self) -> bool:
        """True if the memory is enough or unknown."""
        return self.available is None or self.memory.total + FIXED_BYTES <= self.available


def rehearse(
    recipe: Recipe, *, workers: int, rank: int = 0, cluster: Cluster | None = None
) -> Rehearsal:
    """Make one update of a recipe as one of its workers, on fake tensors.

    Raises PlanError and RecipeError as every worker of the job would, and ClusterError if the
    cluster has too few workers.
    """
    if not 0 <= rank < workers:
        raise LargebatchError(f"--rank {rank}: workers are numbered 0 to {workers - 1:,}")
    if recipe.protocol is not None:
        raise PlanError(
            "protocol: only the synchronous core can be rehearsed; leave protocol out: --set "
            "protocol=null"
        )
    if cluster is not None:
        require_workers(cluster, workers)
    if recipe.execution.cache is not None:
        require_cacheable(recipe)
    plan = make_plan(recipe, workers=workers)
    each = None if cluster is None else min(cluster.gpus_per_node, workers)
    gpu = None if cluster is None else cluster.gpu
    backend = Rehearsed(rank=rank, workers=workers, local_size=each or 1)
    sizes = {piece.image_size for piece in plan.sizes}
    require_accepted(recipe.model, classes=recipe.data.classes, image_sizes=sizes)
    memory = _update(recipe, plan, backend)
    memory = replace(memory, optimizer=_optimizer_bytes(recipe, backend))
    trained, _, _ = divide_samples(recipe, recipe.data.train_samples, recipe.data.val_samples)
    positions = plan.positions(0, 0, rank)
    num_samples = recipe.data.train_samples
    samples = samples_at(positions, seed=recipe.seed, num_samples=num_samples, trained=trained)
    return Rehearsal(
        plan=plan,
        rank=rank,
        node=None if each is None else rank // each,
        local_rank=None if each is None else rank % each,
        memory=memory,
        available=None if gpu is None else gpu.memory_gigabytes * 1e9,
        messages=tuple(backend.messages),
        first_samples=tuple(samples.tolist()),
    )


def _update(recipe: Recipe, plan: Plan, backend: Rehearsed) -> Memory:
    """Make one update on fake tensors; return its memory without the optimizer's state."""
    with FakeTensorMode():
        model = build_model(recipe, _CPU)
        require_trainable(model, recipe.model.name)
        short = replace(plan, accumulation=min(plan.accumulation, 2), batch_changes=(), swa_steps=0)
        # An average of the weights would copy them, which fake tensors do not allow.
        state = build_state(recipe.model_copy(update={"polish": None}), short, model, backend)
        activations = activation_bytes(recipe, plan, model)
        backend.messages.clear()
        _make_update(recipe, short, state, backend, passes=plan.accumulation)
        weights = list(model.parameters())
        parameters = sum(weight.nbytes for weight in weights)
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        averages = recipe.polish is not None and (recipe.polish.ema or plan.swa_steps)
        exact = kept_exact(recipe.reduction.dtype, model)
        shorter = [weight for weight in weights if weight not in exact]
        sent = 0 if recipe.reduction.dtype == "fp32" else 2 * sum(w.numel() for w in shorter)
        return Memory(
            parameters=parameters,
            buffers=buffers,
            gradients=sum(weight.nbytes for weight in weights if weight.requires_grad) + sent,
            optimizer=0,
            average=parameters + buffers if averages else 0,
            activations=activations,
        )


def activation_bytes(recipe: Recipe, plan: Plan, model: nn.Module) -> int:
    """Return the bytes of activations for a device batch of the largest images."""
    images, labels = random_batch(recipe, plan.device_batch, largest_side(recipe, plan), _CPU)
    with saved_bytes(model) as kept:
        loss = build_criterion(recipe.loss)(model(images), labels)
        total = sum(kept.values())
    del loss  # it keeps the activations alive until here
    return total


def _make_update(
    recipe: Recipe, plan: Plan, state: TrainState, backend: Rehearsed, *, passes: int
) -> None:
    """Make an update of `passes` micro-batches and scale its messages to the plan's.

    Further micro-batches repeat the messages of the first, and further BatchNorm spans those of
    one. The step is plain SGD: LARS reads numbers on a CPU, and fake tensors have none.
    """
    monitor = tuple(name for name in recipe.monitor if name == "noise_scale")
    recipe = recipe.model_copy(update={"monitor": monitor})
    side, firsts = largest_side(recipe, plan), list[int]()
    samples = min(plan.device_batch, plan.bn_span or 1)

    def batches() -> Iterator[Batch]:
        while True:
            firsts.append(len(backend.messages))
            yield Batch(*random_batch(recipe, samples, side, _CPU))

    log = build_step_log(recipe, plan, backend, state, emit=lambda _: None)
    reducer = state.updater.reducer
    # On a CPU it reads numbers, which fake gradients do not have.
    reducer.finite = lambda: torch.ones((), dtype=torch.bool)  # type: ignore[method-assign]
    updates = train(
        state.model,
        SGD(state.model.parameters(), lr=0.0),
        batches(),
        lambda _: 0.0,
        build_criterion(recipe.loss),
        reducer,
        Spans(state.model, backend, sync_workers=plan.sync_workers),
        GradScaler(_CPU.type, enabled=False),
        steps=range(1),
        accumulation=plan.accumulation,
        global_batch=plan.global_batch,
        seed=step_seeds(recipe.seed, backend.rank),
    )
    backend.all_reduce(log.values_to_sum(next(updates)))
    of_first = backend.messages[: firsts[1]] if len(firsts) > 1 else []
    backend.messages += of_first * (passes - plan.accumulation)


def _optimizer_bytes(recipe: Recipe, backend: Rehearsed) -> int:
    """Return the bytes of the optimizer's state, after a step on zero gradients.

    Messages of the optimizer, which only Muon has, are recorded.
    """
    model = build_model(recipe, _CPU)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer = build_optimizer(recipe, model, backend)
    optimizer.step()
    return state_bytes(optimizer)
