"""Rehearse one worker of a job on a machine without its GPUs.

The worker's objects are built as in a run, on fake tensors, which have shapes and no memory, and
the training loop makes one update. The backend represents all other workers and records the
messages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD

from largebatch.data.images import divide_samples
from largebatch.data.order import samples_at
from largebatch.data.types import Batch
from largebatch.distributed.backend import own_part
from largebatch.distributed.serial import Done, Serial
from largebatch.errors import LargebatchError
from largebatch.lab.planner.cluster import Cluster, require_workers
from largebatch.lab.planner.prediction import workload
from largebatch.models.batchnorm import Spans
from largebatch.models.of_recipe import build_model, require_accepted, require_trainable
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.recipe import Recipe
from largebatch.runs.optimizer_of_recipe import build_optimizer
from largebatch.runs.passes import Passes, largest_side, state_bytes
from largebatch.runs.state import build_state, build_step_log, kept_exact
from largebatch.training.loop import EagerStep, Update, step_seeds, train
from largebatch.training.state import TrainState

_CPU = torch.device("cpu")


class Message(NamedTuple):
    """One collective operation of this worker."""

    kind: str
    """Kind of operation: sum or gather."""

    workers: int
    num_bytes: int
    """Bytes that this worker contributes."""


class Rehearsed(Serial):
    """A Backend of one real worker that records its messages; the other workers are simulated."""

    name = "torch"

    def __init__(self, *, rank: int, workers: int, local_size: int = 1) -> None:
        super().__init__(_CPU)
        self.rank, self.world_size = rank, workers
        self.local_rank, self.local_size = rank % local_size, local_size
        self.messages: list[Message] = []

    def all_reduce(self, tensor: Tensor) -> Done:
        """Record a message, and leave `tensor` unchanged."""
        self.messages.append(Message("sum", self.world_size, tensor.nbytes))
        return Done()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Record a message, and return a tensor of the shape of the result."""
        self.messages.append(Message("gather", self.world_size, tensor.nbytes))
        return tensor.expand(self.world_size, *tensor.shape).clone()

    def split(self, parts: Sequence[Sequence[int]]) -> Self:
        """Return this worker's subgroup, which records its messages here."""
        ranks = own_part(parts, rank=self.rank, world_size=self.world_size)
        group = type(self)(rank=ranks.index(self.rank), workers=len(ranks))
        group.messages = self.messages
        return group


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Result of a rehearsal of one worker."""

    plan: Plan
    memory: dict[str, int]
    """Bytes of device memory during an update: `parameters`, `buffers`, `gradients` with the copies
    of a shorter type that are sent, `optimizer`, `average`, and `activations` of a device batch
    with its images."""

    available: float | None
    """Memory of the GPU in bytes; None if unknown."""

    messages: tuple[Message, ...]
    """Messages of one update."""

    first_samples: tuple[int, ...]
    """Indices of the samples in the worker's first device batch."""

    @property
    def total(self) -> int:
        """All of its memory, without temporary tensors of backward and without libraries."""
        return sum(self.memory.values())


def rehearse(
    recipe: Recipe, *, workers: int, rank: int = 0, cluster: Cluster | None = None
) -> Rehearsal:
    """Make one update of a recipe as one of its workers, on fake tensors.

    Raises PlanError and RecipeError as every worker of the job would, and ClusterError if the
    cluster has too few workers.
    """
    if not 0 <= rank < workers:
        raise LargebatchError(f"--rank {rank}: workers are numbered 0 to {workers - 1:,}")
    if cluster is not None:
        require_workers(cluster, workers)
    plan = workload(recipe, workers=workers).plan
    local_size = 1 if cluster is None else min(cluster.gpus_per_node, workers)
    backend = Rehearsed(rank=rank, workers=workers, local_size=local_size)
    sizes = {piece.image_size for piece in plan.sizes}
    require_accepted(recipe.model, classes=recipe.data.classes, image_sizes=sizes)
    side = largest_side(plan, usual=recipe.data.image_size)
    computed = min(plan.accumulation, 2)  # micro-batches that are computed, which are equal
    short = replace(plan, accumulation=computed, batch_changes=(), swa_steps=0)
    with FakeTensorMode():
        model = build_model(recipe, _CPU)
        require_trainable(model, recipe.model.name)
        # An average of the weights would copy them, which fake tensors do not allow.
        plain = recipe.model_copy(update={"polish": None})
        state = build_state(plain, short, model, backend)
        passes = Passes.of(recipe, model, _CPU, side=side)
        activations = passes.activation_bytes(plan.device_batch)
        # Of the monitors, only the noise scale sends more in an update.
        monitor = tuple(name for name in recipe.monitor if name == "noise_scale")
        of_log = recipe.model_copy(update={"monitor": monitor})
        log = build_step_log(of_log, short, backend, state, emit=lambda _: None)
        backend.messages.clear()
        # The messages of an update do not depend on its images: one span is enough, and faster.
        samples = min(plan.device_batch, plan.bn_span or 1)
        update, repeated = _make_update(short, state, backend, passes, samples=samples)
        backend.all_reduce(log.values_to_sum(update))
        backend.messages += repeated * (plan.accumulation - computed)
        weights = list(model.parameters())
        parameters = sum(weight.nbytes for weight in weights)
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        exact = kept_exact(recipe.reduction.dtype, model)
        shorter = sum(weight.numel() for weight in weights if weight not in exact)
        gradients = sum(weight.nbytes for weight in weights if weight.requires_grad)
    averages = recipe.polish is not None and (recipe.polish.ema or plan.swa_steps)
    trained, _, _ = divide_samples(recipe, recipe.data.train_samples, recipe.data.val_samples)
    first = samples_at(
        plan.positions(0, 0, rank),
        seed=recipe.seed,
        num_samples=recipe.data.train_samples,
        trained=trained,
        repeats=recipe.data.repeats,
        order=recipe.data.order,
    )
    # After a step on zero gradients; its messages, which only Muon has, are recorded. The tensors
    # are real, since LARS reads numbers.
    real = build_model(recipe, _CPU)
    for weight in real.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer = build_optimizer(recipe, real, backend)
    optimizer.step()
    gpu = None if cluster is None else cluster.gpu
    return Rehearsal(
        plan=plan,
        memory={
            "parameters": parameters,
            "buffers": buffers,
            "gradients": gradients + (0 if recipe.reduction.dtype == "fp32" else 2 * shorter),
            "optimizer": state_bytes(optimizer),
            "average": parameters + buffers if averages else 0,
            "activations": activations,
        },
        available=None if gpu is None else gpu.memory_gigabytes * 1e9,
        messages=tuple(backend.messages),
        first_samples=tuple(first.tolist()),
    )


def _make_update(
    plan: Plan,
    state: TrainState,
    backend: Rehearsed,
    passes: Passes,
    *,
    samples: int,
) -> tuple[Update, list[Message]]:
    """Make an update; return it with the messages of a micro-batch, which all others repeat.

    Further BatchNorm spans repeat the messages of one.
    The step is plain SGD: LARS reads numbers on a CPU, and fake tensors have none.
    """
    firsts = list[int]()

    def batches() -> Iterator[Batch]:
        while True:
            firsts.append(len(backend.messages))
            yield Batch(*passes.batch(samples))

    reducer = state.updater.reducer
    # On a CPU it reads numbers, which fake gradients do not have.
    reducer.finite = lambda *_, **__: torch.ones((), dtype=torch.bool)  # type: ignore[method-assign]
    step = EagerStep(
        state.model,
        SGD(state.model.parameters(), lr=0.0),
        passes.criterion,
        reducer,
        Spans(state.model, backend, sync_workers=plan.sync_workers),
        global_batch=plan.global_batch,
    )
    updates = train(
        step,
        batches(),
        lambda _: 0.0,
        steps=range(1),
        accumulation=plan.accumulation,
        seed=step_seeds(0, backend.rank),
    )
    update = next(updates)
    return update, backend.messages[: firsts[1]] if len(firsts) > 1 else []
