"""Data, networks, optimizers and steps of the small loops that an audit is tested on.

`apart` divides the features between workers (or micro-batches): gradients of a linear model are
then of equal length and orthogonal, so figures follow from Pythagoras.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from largebatch.audit.findings import Check
from largebatch.rules import Level

FEATURES, CLASSES = 8, 4

Arguments = dict[str, Any]
"""Arguments of `audit`."""

Loop = Callable[[], Arguments]
Step = Callable[[tuple[Tensor, Tensor]], None]


@dataclass(frozen=True)
class Expected:
    """The finding on a fault."""

    check: Check
    figure: float
    level: Level = "fault"
    also: tuple[Check, ...] = ()
    """Checks that must fail too, because the fault causes what they check."""

    tolerance: float = 0.05


FAULTS: dict[str, Expected] = {}


def planted(check: Check, figure: float, **words: Any) -> Callable[[Loop], Loop]:  # noqa: ANN401
    """Return a decorator that adds a loop to FAULTS."""

    def add(function: Loop) -> Loop:
        FAULTS[function.__name__] = Expected(check, figure, **words)
        return function

    return add


def random_data(num: int = 96, *, seed: int = 0) -> TensorDataset:
    """Return random samples with labels, the same on every worker."""
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(num, FEATURES, generator=draw)
    return TensorDataset(images, torch.randint(0, CLASSES, (num,), generator=draw))


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from a generator: `noise` returns a number for each feature."""

    def __init__(self, data: TensorDataset, noise: Callable[[], Tensor]) -> None:
        self.data = data
        self.noise = noise

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image, label = self.data[number]
        return image + self.noise(), label


class Divided(DataLoader[Any]):
    """A loader of this worker's share."""

    sampler: DistributedSampler[Any]


def divided(data: Dataset[Any], batch: int, *, shuffle: bool) -> Divided:
    """Return a loader of this worker's share; if it shuffles, set the epoch of its sampler."""
    return Divided(data, batch, sampler=DistributedSampler(data, shuffle=shuffle))


def shuffled(data: Dataset[Any] | None = None, batch: int = 8) -> Arguments:
    """Return a loader that shuffles, and the function that sets its epoch."""
    loader = divided(data or random_data(64, seed=1), batch, shuffle=True)
    return {"loader": loader, "set_epoch": loader.sampler.set_epoch}


def apart(place: int, batch: int = 8, *, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Return batches in which only half of the features, number `place`, are not zero."""
    draw = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        images = torch.zeros(batch, FEATURES)
        half = FEATURES // 2
        values = torch.randn(batch, half, generator=draw)
        images[:, place * half : (place + 1) * half] = values
        batches.append((images, torch.randint(0, CLASSES, (batch,), generator=draw)))
    return batches


def alternating() -> list[tuple[Tensor, Tensor]]:
    """Return batches of the halves of the features in turn, in another order on each worker.

    Gradients of two that follow each other are orthogonal, and the same on all workers.
    """
    halves = [batch for pair in zip(apart(0), apart(1), strict=True) for batch in pair]
    if dist.get_rank():  # the same sums, of other samples in each place
        halves = [(images.flip(0), labels.flip(0)) for images, labels in halves]
    return halves


def linear() -> nn.Linear:
    """Return a linear classifier of zeros."""
    model = nn.Linear(FEATURES, CLASSES, bias=False)
    nn.init.zeros_(model.weight)
    return model


def perceptron(*between: nn.Module) -> nn.Sequential:
    """Return two linear layers with these layers between them, by default a ReLU.

    Its weights are random: without DistributedDataParallel, seed torch equally on all workers.
    """
    between = between or (nn.ReLU(),)
    return nn.Sequential(nn.Linear(FEATURES, 16), *between, nn.Linear(16, CLASSES))


class Pair(nn.Module):
    """Two layers, whose sum is the result."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, images: Tensor) -> Tensor:
        total: Tensor = self.first(images) + self.second(images)
        return total


def constant_perceptron() -> nn.Sequential:
    """Return a perceptron whose highest score is always that of class 0."""
    model = perceptron()
    with torch.no_grad():
        model.get_parameter("2.bias")[0] = 10.0
    return model


def sgd(model: nn.Module, *, lr: float = 0.05, momentum: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def sum_gradients(parameters: Iterable[nn.Parameter], *, divisor: int = 1) -> None:
    """Replace gradients with their sum over workers, over a divisor."""
    for parameter in parameters:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= divisor


def parallel(*between: nn.Module, **words: Any) -> DistributedDataParallel:  # noqa: ANN401
    """Return a perceptron in DistributedDataParallel."""
    return DistributedDataParallel(perceptron(*between), **words)


def loop(model: nn.Module, **changes: Any) -> Arguments:  # noqa: ANN401
    """Return the arguments of a usual loop, with these changes."""
    if "loader" not in changes:
        changes["loader"] = divided(random_data(), 16, shuffle=False)
    if "optimizer" not in changes:
        changes["optimizer"] = sgd(model)
    return {"model": model, "loss_fn": cross_entropy, **changes}


def nothing() -> None:
    """Do nothing."""


def step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    micros: int = 1,
    weight: float | None = None,
    change: Callable[[], object] = nothing,
    after: Callable[[], object] = nothing,
) -> Step:
    """Return a step: a backward pass of the loss times `weight` (by default that of a mean over
    micro-batches), `change` of the gradients, an update in every `micros`-th call, and `after`.
    """
    calls = 0
    weight = 1 / micros if weight is None else weight

    def step(batch: tuple[Tensor, Tensor]) -> None:
        nonlocal calls
        calls += 1
        (weight * cross_entropy(model(batch[0]), batch[1])).backward()
        change()
        if calls % micros == 0:
            optimizer.step()
            optimizer.zero_grad()
        after()

    return step


def cleared(
    model: nn.Module,
    loss: Callable[[tuple[Tensor, Tensor]], Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    change: Callable[[], object] = nothing,
    **words: Any,  # noqa: ANN401 -- of `loop`
) -> Arguments:
    """Return the arguments of a loop whose step clears gradients first, then has those of a loss
    of the batch, which `change` may change, and updates.
    """
    optimizer = optimizer or sgd(model)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        loss(batch).backward()
        change()
        optimizer.step()

    return loop(model, optimizer=optimizer, step=step, **words)


def stepped(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **words: Any,  # noqa: ANN401 -- of `step_of` and of `loop`
) -> Arguments:
    """Return the arguments of a loop with a step of `step_of`."""
    optimizer = optimizer or sgd(model)
    names = ("micros", "weight", "change", "after")
    step = step_of(model, optimizer, **{it: words.pop(it) for it in names if it in words})
    return loop(model, optimizer=optimizer, step=step, **words)


def scaled(
    model: nn.Module,
    change: Callable[[torch.amp.GradScaler], object],
    *optimizers: torch.optim.Optimizer,
    scale: float = 1024,
) -> Step:
    """Return a step with a loss scale, and a change of the gradients before the update."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        model.zero_grad()
        loss: Tensor = scaler.scale(cross_entropy(model(batch[0]), batch[1]))
        loss.backward()
        change(scaler)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    return step


def in_place_of_parallel() -> tuple[nn.Sequential, torch.optim.SGD]:
    """Return a perceptron with the same weights on all workers, and its optimizer."""
    torch.manual_seed(0)
    model = perceptron()
    return model, sgd(model)
