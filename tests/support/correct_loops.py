"""Correct loops, in which an audit must find no fault and compare everything."""

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from faulty_loops import by_epoch, last_window
from planted_parts import (
    CLASSES,
    FEATURES,
    Arguments,
    Augmented,
    Pair,
    apart,
    cleared,
    divided,
    in_place_of_parallel,
    linear,
    loop,
    parallel,
    perceptron,
    random_data,
    scaled,
    sgd,
    shuffled,
    step_of,
    stepped,
    sum_gradients,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

from largebatch.models import param_groups


def rise(step: int) -> float:
    return min(1.0, (step + 1) / 100)


def top1(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """Return the part of the samples of all workers that is classified rightly."""
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, labels in loader:
            counts += torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(counts)
    model.train()
    return float(counts[0] / counts[1])


def plain_parallel() -> Arguments:
    """DistributedDataParallel and momentum SGD, with BatchNorm."""
    model = parallel(nn.BatchNorm1d(16), nn.ReLU())
    return loop(model, optimizer=sgd(model, momentum=0.9))


def everything_is_checked() -> Arguments:
    """Augmentation, dropout, warm-up, an average and an evaluation."""
    torch.manual_seed(dist.get_rank())
    words = shuffled(Augmented(random_data(63, seed=1), lambda: torch.randn(8)))
    data = random_data(31, seed=7)
    validation = DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False))
    model = parallel(nn.ReLU(), nn.Dropout(), nn.BatchNorm1d(16))
    optimizer = torch.optim.SGD(param_groups(model, weight_decay=1e-4), lr=0.01)
    scheduler = LambdaLR(optimizer, rise)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def after() -> None:
        scheduler.step()
        average.update_parameters(model.module)

    return loop(
        model,
        optimizer=optimizer,
        step=step_of(model, optimizer, after=after),
        base=(8, 0.005),
        rate=lambda update: 0.01 * rise(update),
        epochs=400,
        val_loader=validation,
        evaluate=lambda: top1(model.module, validation),
        averaged=average,
        **words,
    )


def validation_is_divided_by_subsets() -> Arguments:
    """Each worker holds its share of one permutation of a validation split, as a Subset."""
    draw = torch.Generator().manual_seed(0)
    train, held_out = random_split(random_data(105), [64, 41], draw)
    order = torch.randperm(41, generator=draw).tolist()
    validation = DataLoader(Subset(held_out, order[dist.get_rank() :: 2]), 8)
    model = parallel()
    evaluate = lambda: 100 - 100 * top1(model.module, validation)  # noqa: E731 -- errors in %
    return loop(model, evaluate=evaluate, val_loader=validation, **shuffled(train))


def average_and_frozen_layer() -> Arguments:
    """All workers freeze a BatchNorm layer in the step, and an average moves once an update."""
    frozen = nn.BatchNorm1d(16)
    model = parallel(frozen, nn.ReLU(), nn.BatchNorm1d(16))
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    if dist.get_rank() == 0:
        model.eval()  # after an evaluation; the step sets the mode
    optimizer = sgd(model)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        model.train()
        frozen.eval()
        optimizer.zero_grad()
        for images, labels in zip(*(it.split(8) for it in batch), strict=True):
            (cross_entropy(model(images), labels) / 2).backward()
        average.update_parameters(model.module)
        optimizer.step()

    return loop(model, optimizer=optimizer, step=step, averaged=average)


# Steps


def accumulation_and_clipping() -> Arguments:
    """Four micro-batches, gradients reduced after the last of them, clipping of the average."""
    model = parallel(nn.Dropout(0.5), nn.ReLU())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    number = 0

    def step(batch: list[Tensor]) -> None:
        nonlocal number
        number += 1
        model.require_backward_grad_sync = number % 4 == 0
        (cross_entropy(model(batch[0]), batch[1]) / 4).backward()
        if number % 4 == 0:
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    loader = divided(random_data(), 4, shuffle=False)
    return loop(model, optimizer=optimizer, step=step, loader=loader)


def clipping_by_other_names() -> Arguments:
    """Clipping by a partial of clip_grad_norm_, then by the parts of which it is made."""
    model = parallel()
    optimizer, clip = sgd(model), partial(clip_grad_norm_, max_norm=0.2)

    def change() -> None:
        clip(model.parameters())
        norm = nn.utils.get_total_norm(
            [it.grad for it in model.parameters() if it.grad is not None]
        )
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)

    return stepped(model, optimizer, change=change)


def sums_over_the_global_count() -> Arguments:
    """Unequal batches, summed, and divided by the samples of all workers."""
    model, optimizer = in_place_of_parallel()
    loss = lambda batch: cross_entropy(model(batch[0]), batch[1], reduction="sum")  # noqa: E731
    change = partial(sum_gradients, [*model.parameters()], divisor=16)
    batches = apart(dist.get_rank(), 12 if dist.get_rank() == 0 else 4)
    return cleared(model, loss, optimizer, change, loader=batches)


def images_are_prepared_in_the_step() -> Arguments:
    """The step makes vectors of the images, so the model does not take them as they are loaded."""
    images, labels = random_data().tensors
    data = TensorDataset(images.view(-1, 2, 2, 2).to(torch.float64), labels)
    model = parallel()
    optimizer = sgd(model)
    own = step_of(model, optimizer)

    def step(batch: list[Tensor]) -> None:
        own((batch[0].flatten(1).float(), batch[1]))

    return loop(model, optimizer=optimizer, step=step, loader=divided(data, 16, shuffle=False))


def hooks_average_gradients() -> Arguments:
    """Hooks of the parameters average gradients; zero_grad comes after the forward pass."""
    model, optimizer = in_place_of_parallel()

    def average(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    for parameter in model.parameters():
        parameter.register_hook(average)

    def step(batch: list[Tensor]) -> None:
        loss = cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()

    return loop(model, optimizer=optimizer, step=step)


# Precision


def bfloat16_autocast() -> Arguments:
    """Autocast to bfloat16, and dropout that differs by worker."""
    model = parallel(nn.Dropout(0.3), nn.ReLU())
    optimizer = sgd(model, lr=0.1, momentum=0.9)
    torch.manual_seed(dist.get_rank())

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()

    return loop(model, optimizer=optimizer, step=step)


def bfloat16_weights_and_a_part_without_optimizer() -> Arguments:
    """Weights in bfloat16; a layer that no optimizer has, and whose gradient is never cleared."""
    first, trained = nn.Linear(8, 8).to(torch.bfloat16), perceptron().to(torch.bfloat16)
    nn.init.eye_(first.weight)
    nn.init.zeros_(first.bias)
    model = DistributedDataParallel(nn.Sequential(first, trained))
    optimizer = sgd(trained)
    own = step_of(model, optimizer)
    step: Callable[[list[Tensor]], None] = lambda it: own((it[0].bfloat16(), it[1]))  # noqa: E731
    return loop(model, optimizer=optimizer, step=step)


def float16_is_sent() -> Arguments:
    """Gradients are sent in float16, which has enough bits for them."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = parallel(bucket_cap_mb=1)
    model.register_comm_hook(None, fp16_compress_hook)
    return loop(model, loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1))


def scaled_and_unscaled() -> Arguments:
    """A loss scale, removed before gradients are clipped."""
    model = parallel()
    optimizer = sgd(model)

    def change(scaler: torch.amp.GradScaler) -> None:
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.1)

    return loop(model, optimizer=optimizer, step=scaled(model, change, optimizer))


def scaler_skips_first_updates() -> Arguments:
    """A loss scale so large that a GradScaler skips updates first, with BatchNorm."""
    model = parallel(nn.BatchNorm1d(16), nn.ReLU())
    nn.init.constant_(model.module[1].weight, 40)
    optimizer = sgd(model)
    scheduler = LambdaLR(optimizer, rise)
    own = scaled(model, lambda _: None, optimizer, scale=2.0**127)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        own(batch)
        scheduler.step()

    rate: Callable[[int], float] = lambda update: 0.05 * rise(update)  # noqa: E731
    return loop(model, optimizer=optimizer, step=step, rate=rate)


def fused_optimizer_and_scaler() -> Arguments:
    """A fused optimizer unscales in its kernel; the step also logs accuracy, with gradients."""
    model = parallel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    own, hits = scaled(model, lambda _: None, optimizer), []

    def step(batch: tuple[Tensor, Tensor]) -> None:
        own(batch)
        hits.append(int((model(batch[0]).argmax(1) == batch[1]).sum()))

    return loop(model, optimizer=optimizer, step=step)


def two_optimizers() -> Arguments:
    """Two optimizers, one for each layer, that are unscaled and clipped in two ways."""
    model = parallel()
    first, last = sgd(model.module[0]), torch.optim.Adam(model.module[2].parameters(), lr=1e-3)

    def change(scaler: torch.amp.GradScaler) -> None:
        for optimizer in (first, last):
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))
        clip_grad_value_(model.parameters(), 0.005)

    return loop(model, optimizer=last, step=scaled(model, change, first, last))


# Models and losses


class Reversed(nn.Module):
    """A ReLU whose gradient has the other sign."""

    def forward(self, features: Tensor) -> Tensor:
        if features.requires_grad:
            features.register_hook(lambda gradient: -gradient)
        return features.relu()


def hooks_by_design() -> Arguments:
    """Hooks shrink the gradient of one layer, mask another, and reverse that of a feature."""
    model = parallel(Reversed())
    last = model.module[2].weight
    model.module[0].weight.register_hook(lambda gradient: gradient * 0.5)
    last.register_hook(lambda gradient: gradient * (last > 0))
    return loop(model)


class Partial(Pair):
    """Two linear layers of which the second is left out at random, and an unused one."""

    def __init__(self) -> None:
        super().__init__(linear(), linear())
        self.unused, self.second_head = nn.Linear(2, 2), nn.Linear(FEATURES, CLASSES)
        random.seed(dist.get_rank())

    def forward(self, images: Tensor) -> Tensor:
        self.second_head(images)
        both: Tensor = super().forward(images)
        return self.first(images) if random.random() < 0.5 else both


def layers_without_gradients() -> Arguments:
    """A layer is unused, one has no loss, and one is left out at random on each worker."""
    return loop(DistributedDataParallel(Partial(), find_unused_parameters=True))


class TwoHeads(nn.Module):
    """Logits in evaluation, and in training logits and those of a second head."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.second = perceptron(nn.BatchNorm1d(16), nn.ReLU()), perceptron()

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        images = images.sub_(0.5).div_(0.25)
        return (self.main(images), self.second(images)) if self.training else self.main(images)


def both(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return cross_entropy(outputs[0], labels) + 0.4 * cross_entropy(outputs[1], labels)


def other_outputs_in_training() -> Arguments:
    """A head is used in training only, images are normalised in place, samples are repeated."""
    data = Subset(random_data(), [*range(96), *[*range(32)] * 3])
    model = DistributedDataParallel(TwoHeads())
    loss = lambda batch: both(model(batch[0].clone()), batch[1])  # noqa: E731
    return cleared(model, loss, loss_fn=both, **shuffled(data, 16))


class Recomputed(nn.Module):
    """Layers whose results are not kept for the backward pass."""

    def __init__(self, layers: nn.Module, *, is_reentrant: bool) -> None:
        super().__init__()
        self.layers, self.is_reentrant = layers, is_reentrant

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.layers, images, use_reentrant=self.is_reentrant)
        return result


def recomputation() -> Arguments:
    """Layers with dropout are recomputed in both ways of torch.utils.checkpoint."""
    first = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.5))
    last = perceptron(nn.Dropout(0.5), nn.ReLU())
    early, late = Recomputed(first, is_reentrant=False), Recomputed(last, is_reentrant=True)
    return loop(DistributedDataParallel(nn.Sequential(early, late)))


# Data


def each_rank_has_its_own_files() -> Arguments:
    """Each worker reads a data set of its own, with sample numbers of its own."""
    images, labels = (part[dist.get_rank() :: 2] for part in random_data(64, seed=1).tensors)
    return loop(parallel(), loader=DataLoader(TensorDataset(images, labels), 8, shuffle=True))


class Draws:
    """Each worker takes its share of one draw with replacement."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 48

    def __iter__(self) -> Iterator[int]:
        draw = torch.Generator().manual_seed(self.epoch)
        numbers = torch.multinomial(torch.ones(96), 96, replacement=True, generator=draw)
        yield from numbers[dist.get_rank() :: dist.get_world_size()].tolist()


def weighted_draws() -> Arguments:
    """A weighted sampler of the script's own, and a loss with class weights."""
    sampler = Draws()
    loader = DataLoader(random_data(), 16, sampler=sampler)
    loss_fn = nn.CrossEntropyLoss(weight=torch.arange(1.0, 5.0))
    return loop(parallel(), loader=loader, loss_fn=loss_fn, set_epoch=sampler.set_epoch)


def shorter_last_window() -> Arguments:
    """The last update of an epoch has 2 of 4 micro-batches, and each is divided by 2."""
    return last_window(divides=True)


def class_weights_in_a_function() -> Arguments:
    """Class weights within a loss of the script; workers have equal labels in each batch."""
    images = random_data(64).tensors[0]
    loader = divided(TensorDataset(images, torch.arange(64) // 2 % 4), 16, shuffle=False)
    weights = torch.arange(1.0, 5.0)
    loss_fn = lambda scores, labels: cross_entropy(scores, labels, weight=weights)  # noqa: E731
    return loop(parallel(), loader=loader, loss_fn=loss_fn)


def validation_by_samplers_of_one_data_set() -> Arguments:
    """Two samplers divide one data set into training and validation samples."""
    sampler = Draws()
    validation = DataLoader(
        data := random_data(192), 8, sampler=SubsetRandomSampler(range(96, 192))
    )
    loader = DataLoader(data, 16, sampler=sampler)
    return loop(parallel(), loader=loader, set_epoch=sampler.set_epoch, val_loader=validation)


def epochs_of_the_data_set() -> Arguments:
    """Augmentation by the epoch of the data set, which the loop sets; workers do not persist."""
    return by_epoch(num_workers=1, multiprocessing_context="fork")


def one_cycle_over_micro_batches() -> Arguments:
    """OneCycleLR, stepped and counted in micro-batches, of which an update has two."""
    model = parallel()
    optimizer = sgd(model)
    scheduler = OneCycleLR(optimizer, 0.1, total_steps=8 * 10)
    step = step_of(model, optimizer, micros=2, after=scheduler.step)
    return loop(model, optimizer=optimizer, step=step, **shuffled(random_data(128)))


LOOPS = [
    shorter_last_window,
    class_weights_in_a_function,
    validation_by_samplers_of_one_data_set,
    epochs_of_the_data_set,
    one_cycle_over_micro_batches,
    plain_parallel,
    everything_is_checked,
    validation_is_divided_by_subsets,
    average_and_frozen_layer,
    accumulation_and_clipping,
    clipping_by_other_names,
    sums_over_the_global_count,
    images_are_prepared_in_the_step,
    hooks_average_gradients,
    bfloat16_autocast,
    bfloat16_weights_and_a_part_without_optimizer,
    float16_is_sent,
    scaled_and_unscaled,
    scaler_skips_first_updates,
    fused_optimizer_and_scaler,
    two_optimizers,
    hooks_by_design,
    layers_without_gradients,
    other_outputs_in_training,
    recomputation,
    each_rank_has_its_own_files,
    weighted_draws,
]
