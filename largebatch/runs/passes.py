"""Passes of a recipe's model over random samples: how their time and memory are measured.

Whoever asks what an update costs measures it here: the device batch that fits, an estimate, a
calibration, a rehearsal. What they conclude from it is their own.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from largebatch import accelerator
from largebatch.models.wrappers import mode
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.recipe import Recipe
from largebatch.runs.state import criterion_of_trial
from largebatch.training.loop import Criterion

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """A model with its loss, and the shape of the random samples that it is measured on."""

    model: nn.Module
    criterion: Criterion
    device: torch.device
    side: int
    """Height and width of an image."""

    classes: int
    mixes: bool
    """True if labels are shares of the classes, as those of mixed images."""

    @classmethod
    def of(cls, recipe: Recipe, model: nn.Module, device: torch.device, *, side: int) -> "Passes":
        """Return the passes of a recipe's model over images of this size."""
        criterion = criterion_of_trial(recipe, device)
        return cls(
            model=model,
            criterion=criterion,
            device=device,
            side=side,
            classes=recipe.data.classes,
            mixes=recipe.data.mix is not None,
        )

    def batch(self, num: int) -> tuple[Tensor, Tensor]:
        """Return random samples and labels."""
        labels = random_labels(num, self.classes, self.device, mixes=self.mixes)
        return torch.randn(num, 3, self.side, self.side, device=self.device), labels

    def train(self, images: Tensor, labels: Tensor) -> None:
        """Add the gradient of these samples."""
        self.criterion(self.model(images), labels).backward()

    @torch.no_grad()
    def evaluate(self, images: Tensor) -> None:
        """Compute the outputs as an evaluation does."""
        with mode(self.model, training=False):
            self.model(images)

    def seconds(self, num: int) -> float:
        """Return the seconds of forward and backward, without those that draw the samples."""
        return seconds_of(partial(self.train, *self.batch(num)), self.device)

    def peak_bytes(self, num: int, *, evaluates: bool = False) -> int:
        """Return the peak of what forward and backward, or an evaluation, allocate, samples too.

        For accelerators only. Raises torch.OutOfMemoryError.
        """

        def work() -> None:
            images, labels = self.batch(num)
            if evaluates:
                self.evaluate(images)
            else:
                self.train(images, labels)

        # Samples are drawn inside: a run has them on the device while it computes, too.
        with accelerator.memory_errors():
            return accelerator.measure_peak(self.device, work)

    def activation_bytes(self, num: int) -> int:
        """Return the bytes that forward keeps for backward. Tensors may be fake."""
        images, labels = self.batch(num)
        with saved_bytes(self.model) as storages:
            # Bound to a name, because activations live as long as the loss.
            _loss = self.criterion(self.model(images), labels)
            return sum(storages.values())


def random_labels(num: int, classes: int, device: torch.device, *, mixes: bool) -> Tensor:
    """Return random class numbers, or shares of all classes in the form of mixed images' labels."""
    if mixes:
        return torch.rand(num, classes, device=device).softmax(dim=1)
    return torch.randint(classes, (num,), device=device)


def seconds_of(
    work: Callable[[], object],
    device: torch.device,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of some work until the device has done it."""
    start = clock()
    work()
    accelerator.synchronize(device)  # sync: this is a measurement
    return clock() - start


def median_seconds(
    works: Mapping[K, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[K, float]:
    """Return the median seconds of each work, measured round by round.

    So a slow phase of the machine affects all of them equally. One more round before does not
    count: it allocates, and chooses kernels.
    """
    seconds: dict[K, list[float]] = {key: [] for key in works}
    for _ in range(rounds + 1):
        for key, work in works.items():
            seconds[key].append(seconds_of(work, device, clock=clock))
    return {key: median(measured[1:]) for key, measured in seconds.items()}


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[dict[int, int]]:
    """Yield the bytes of activations that forward keeps for backward, each storage once."""
    # Views of one tensor share its storage, which is counted once; weights are there in any case.
    storages: dict[int, int] = {}
    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # fake tensors have one too, and no address
        if storage._cdata not in weights:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield storages


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the tensors in an optimizer's state."""
    leaves = tree_leaves(optimizer.state_dict()["state"])
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def whole_spans(num: int, span: int) -> int:
    """Return the samples of whole BatchNorm spans among `num`; all of them within one span."""
    return num if num < span else num - num % span


def largest_side(plan: Plan, *, usual: int) -> int:
    """Return the largest image size in training, where it is `usual` without a schedule."""
    sizes = [piece.image_size for piece in plan.sizes]
    if not sizes or plan.updates > plan.train_steps:
        sizes.append(usual)
    return max(sizes)
