"""Loops with one planted fault each, after reports of it, and the finding that must name it.

FAULTS has for each function the check that must find it and the figure expected. The reports are
issues and pull requests on GitHub, if not said otherwise.
"""

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from planted_parts import (
    Arguments,
    Augmented,
    Pair,
    alternating,
    apart,
    cleared,
    constant_perceptron,
    divided,
    in_place_of_parallel,
    linear,
    loop,
    nothing,
    parallel,
    perceptron,
    planted,
    random_data,
    scaled,
    sgd,
    shuffled,
    step_of,
    stepped,
    sum_gradients,
)
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's stubs
from torch.nn.functional import cross_entropy, dropout, one_hot
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

# Gradients of another scale


@planted("gradient scale", 4)
def accumulation_is_not_divided() -> Arguments:
    """The losses of four micro-batches are added, not averaged (nanoGPT 168)."""
    return stepped(parallel(), micros=4, weight=1, loader=divided(random_data(), 4, shuffle=False))


@planted("gradient scale", 0.5)
def gradients_are_divided_twice() -> Arguments:
    """The loss is divided by the workers, and DistributedDataParallel averages (torchtune 2172)."""
    return stepped(parallel(), weight=0.5)


@planted("gradient scale", 2)
def gradients_are_summed() -> Arguments:
    """Gradients are added over workers, and nobody divides (horovod 2298)."""
    model, optimizer = in_place_of_parallel()
    change = partial(sum_gradients, [*model.parameters()])
    return stepped(model, optimizer, change=change)


@planted("gradient scale", 1 / 1024)
def gradients_are_unscaled_twice() -> Arguments:
    """Gradients are divided by the loss scale, and then again by the scaler (accelerate 113)."""
    model = parallel()
    optimizer = sgd(model)

    def divide(scaler: torch.amp.GradScaler) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scaler.get_scale()

    return loop(model, optimizer=optimizer, step=scaled(model, divide, optimizer))


@planted("gradient scale", 1024)
def loss_scale_is_not_removed() -> Arguments:
    """The loss is scaled, and the optimizer is called without the scaler (torch's AMP examples)."""
    model = parallel()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    loss = lambda batch: scaler.scale(cross_entropy(model(batch[0]), batch[1]))  # noqa: E731
    return cleared(model, loss, sgd(model, lr=1e-6))


@planted("gradient scale", 2)
def hooks_multiply_gradients() -> Arguments:
    """Hooks multiply gradients by the workers, and these are averaged (Tensor.register_hook)."""
    model = parallel()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * dist.get_world_size())
    return loop(model)


@planted("gradient scale", 0)
def zero_grad_before_the_update() -> Arguments:
    """zero_grad is called between backward and the update (ultralytics 11217)."""
    model = DistributedDataParallel(linear())
    return stepped(model, change=model.zero_grad, loader=apart(dist.get_rank()))


def last_window(*, divides: bool) -> Arguments:
    """Return a loop with accumulation over 4 of 10 batches: the last update has two of them."""
    model = parallel()
    optimizer, number = sgd(model), 0

    def step(batch: tuple[Tensor, Tensor]) -> None:
        nonlocal number
        micros = 2 if divides and number >= 8 else 4
        (cross_entropy(model(batch[0]), batch[1]) / micros).backward()
        number += 1
        if number in {4, 8, 10}:
            optimizer.step()
            optimizer.zero_grad()
        number %= 10

    loader = divided(random_data(80), 4, shuffle=False)
    return loop(model, optimizer=optimizer, step=step, loader=loader, steps=2)


@planted("gradient scale", 0.5)
def last_window_of_an_epoch_counts_half() -> Arguments:
    """The last update of an epoch has 2 of 4 micro-batches, divided by 4 (transformers 34191)."""
    return last_window(divides=False)


# Gradients of another direction


@planted("gradient direction", 0.5**0.5, also=("weights",))
def gradients_are_not_reduced() -> Arguments:
    """Workers train copies of a model, each with its own gradients (PyTorch's forum 160455)."""
    return loop(linear(), loader=apart(dist.get_rank()))


@planted("gradient direction", 0.5**0.5, also=("weights",))
def no_sync_on_every_micro_batch() -> Arguments:
    """The last micro-batch is within no_sync too (pytorch 53443)."""
    model = DistributedDataParallel(linear())
    model.require_backward_grad_sync = False
    return stepped(model, micros=2, loader=apart(dist.get_rank()))


@planted("gradient direction", 3 / 10**0.5)
def gradients_are_summed_in_each_micro_batch() -> Arguments:
    """Gradients are summed over workers while they are still being summed (pytorch 125484)."""
    model = linear()
    change = partial(sum_gradients, [*model.parameters()])
    return stepped(model, micros=2, weight=0.25, change=change, loader=alternating())


@planted("gradient direction", 3 / 10**0.5)
def hook_on_one_rank() -> Arguments:
    """A hook of worker 0 doubles its gradient, before it is averaged (Tensor.register_hook)."""
    model = DistributedDataParallel(linear())
    if dist.get_rank() == 0:
        model.module.weight.register_hook(lambda gradient: 2 * gradient)
    return loop(model, loader=apart(dist.get_rank()))


@planted("gradient direction", 3 / 10**0.5, level="note")
def hook_of_a_layer_on_one_rank() -> Arguments:
    """A layer's hook of worker 0 doubles the gradient (Module.register_full_backward_hook)."""
    model = DistributedDataParallel(nn.Sequential(linear(), nn.Identity()))
    if dist.get_rank() == 0:
        model.module[1].register_full_backward_hook(lambda _, into, __: (2 * into[0],))
    return loop(model, loader=apart(dist.get_rank()))


@planted("gradient direction", 3 / 10**0.5)
def loss_is_weighted_by_rank() -> Arguments:
    """Worker 1 doubles its loss (torch's notes on DistributedDataParallel)."""
    return stepped(
        DistributedDataParallel(linear()), weight=1 + dist.get_rank(), loader=apart(dist.get_rank())
    )


@planted("gradient direction", 4 / (2 * 10) ** 0.5)
def ignored_labels_are_averaged_twice() -> Arguments:
    """Each worker averages over its own 12 or 4 labels that count (transformers 34191)."""
    ours = []
    for images, labels in apart(dist.get_rank(), 4):
        every = labels.repeat(3)
        if dist.get_rank() == 1:
            every[4:] = -100
        ours.append((images.repeat(3, 1), every))
    return loop(DistributedDataParallel(linear()), loader=ours)


@planted("gradient direction", 4 / (2 * 10) ** 0.5)
def ranks_have_unequal_shares() -> Arguments:
    """A worker has three times as many samples, means are averaged (pytorch-lightning 20404)."""
    times = 3 if dist.get_rank() == 0 else 1
    batches = apart(dist.get_rank(), 12)
    ours = [(it[:4].repeat(times, 1), labels[:4].repeat(times)) for it, labels in batches]
    return loop(DistributedDataParallel(linear()), loader=ours)


@planted("gradient direction", 1.5**-0.5, also=("weights",))
def layer_is_added_after_wrapping() -> Arguments:
    """A layer is added after DistributedDataParallel has registered the weights (its docs)."""
    inner = Pair(linear(), nn.Identity())
    model = DistributedDataParallel(inner)  # its module has no second layer yet
    inner.second = linear()
    return loop(model, loader=apart(dist.get_rank()))


@planted("gradient direction", 2)
def some_gradients_are_summed() -> Arguments:
    """Gradients of matrices are averaged, those of biases only added (megablocks 20)."""
    model, optimizer = in_place_of_parallel()

    def change() -> None:
        for parameter in model.parameters():
            divisor = dist.get_world_size() if parameter.ndim > 1 else 1
            sum_gradients([parameter], divisor=divisor)

    return stepped(model, optimizer, change=change)


@planted("gradient direction", 0.5**0.5)
def zero_grad_in_every_micro_batch() -> Arguments:
    """Gradients are cleared before each micro-batch, so the last one counts alone (RAE 67)."""
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)
    own = step_of(model, optimizer, micros=2)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        own(batch)

    return loop(model, optimizer=optimizer, step=step, loader=alternating())


@planted("gradient direction", 0.5**0.5)
def zero_grad_is_never_called() -> Arguments:
    """Each update has the gradients of all updates before it (wekws 73)."""
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return loop(model, optimizer=optimizer, step=step, loader=alternating())


# Clipping


def clipped(clip: Callable[[nn.Module], object], *, reduces: bool = False) -> Arguments:
    """Return a loop that clips, and perhaps averages gradients after that."""
    model: nn.Module = linear() if reduces else DistributedDataParallel(linear())
    optimizer = sgd(model, lr=1e-4)

    def change() -> None:
        clip(model)
        if reduces:
            sum_gradients(model.parameters(), divisor=dist.get_world_size())

    return stepped(model, optimizer, change=change, loader=apart(dist.get_rank()))


@planted("clipping", 0.5**0.5)
def clipping_before_the_average() -> Arguments:
    """Each worker clips its own gradient, and then they are averaged (determined 602)."""
    words = clipped(lambda model: clip_grad_norm_(model.parameters(), 0.01), reduces=True)
    factor = 1 + dist.get_rank() / 4
    return words | {"loader": [(images * factor, labels) for images, labels in words["loader"]]}


@planted("clipping", 0.01)
def values_are_clipped_before_the_average() -> Arguments:
    """Each worker clips values of its own gradient, then they are averaged (horovod 1346)."""
    return clipped(lambda model: clip_grad_value_(model.parameters(), 0.01), reduces=True)


@planted("clipping", 0.5, also=("weights",))
def clipping_to_another_norm_on_each_rank() -> Arguments:
    """Each worker clips the average to a norm of its own (torch's notes on DDP)."""
    norm = 0.01 * (1 + dist.get_rank())
    return clipped(lambda model: clip_grad_norm_(model.parameters(), norm))


def first_norm() -> float:
    """Return the norm of the first average, of four classes whose probabilities are equal."""
    halves = [apart(place)[0] for place in range(2)]
    each = [(0.25 - one_hot(labels, 4)).T @ images / 8 for images, labels in halves]
    return float(torch.linalg.norm(sum(each) / 2))


@planted("clipping", 0.02 / first_norm(), also=("weights",))
def clipping_on_one_rank() -> Arguments:
    """Worker 0 clips the average, and the other worker does not (torch's notes on DDP)."""
    if dist.get_rank():
        return clipped(lambda _: None)
    return clipped(lambda model: clip_grad_norm_(model.parameters(), 0.02))


@planted("clipping", 1024)
def clipping_before_unscaling() -> Arguments:
    """Gradients are clipped while they still have the loss scale (Pytorch-UNet 468)."""
    model = parallel()
    optimizer = sgd(model)
    step = scaled(model, lambda _: clip_grad_norm_(model.parameters(), 1.0), optimizer)
    return loop(model, optimizer=optimizer, step=step)


@planted("clipping", 2)
def clipping_in_each_micro_batch() -> Arguments:
    """Gradients are clipped while they are still being summed (torch's AMP examples)."""
    model = parallel()
    clip = partial(clip_grad_norm_, [*model.parameters()], 0.05)
    return stepped(model, micros=2, change=clip, loader=divided(random_data(), 8, shuffle=False))


# Precision


def compressed(model: nn.Module, **words: Any) -> Arguments:  # noqa: ANN401
    """Return a loop that sends gradients in float16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return loop(wrapped, optimizer=sgd(wrapped, lr=1e-9), **words)


@planted("precision", 8)
def float16_overflows() -> Arguments:
    """Gradients are sent in float16, in which they are infinite (pytorch 59522)."""

    def large(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs[:, 0] * labels).mean() * 1e6

    images = torch.full((16, 8), 1.0 + dist.get_rank())
    batches = [(images, torch.ones(16)) for _ in range(3)]
    return compressed(nn.Linear(8, 1, bias=False), loader=batches, loss_fn=large)


@planted("precision", 1)
def float16_underflows() -> Arguments:
    """Gradients are sent in float16, in which they are zero (torch.amp)."""
    return compressed(perceptron(), loss_fn=lambda *pair: cross_entropy(*pair) * 1e-9)


# Workers and their state


@planted("world size", 2)
def process_group_is_not_initialised() -> Arguments:
    """torchrun starts two workers, and the script initialises nothing (pith-train 91)."""
    dist.destroy_process_group()
    return loop(perceptron(), loader=DataLoader(random_data(), 16))


@planted("world size", 2)
def world_of_one_under_slurm() -> Arguments:
    """srun starts two tasks, and each makes a group of its own (pytorch 73656)."""
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(SLURM_PROCID="0", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return loop(perceptron(), loader=DataLoader(random_data(), 16))


@planted("weights", 0.05 / 1.05)
def weights_differ_at_the_start() -> Arguments:
    """Nobody sends worker 0's weights, and every worker has its own (pytorch-benchmarks 1)."""
    model, optimizer = in_place_of_parallel()
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(1 + 0.1 * dist.get_rank())
    change = partial(sum_gradients, [*model.parameters()], divisor=2)
    return stepped(model, optimizer, change=change)


@planted("buffers", 0.5)
def buffers_differ() -> Arguments:
    """A buffer that is no statistic differs, and broadcast_buffers is off (detectron2 5409)."""
    inner = perceptron()
    inner.register_buffer("center", torch.ones(4))
    model = DistributedDataParallel(inner, broadcast_buffers=False)
    inner.get_buffer("center").fill_(1.0 + 2 * dist.get_rank())
    return loop(model)


@planted("optimizer state", 1, also=("weights",))
def optimizer_state_differs() -> Arguments:
    """A checkpoint's momentum is loaded on worker 0 only (Megatron-LM 6920)."""
    model = parallel()
    optimizer = sgd(model, momentum=0.9)
    for parameter in model.parameters():
        loaded = torch.full_like(parameter, 1.0 if dist.get_rank() == 0 else 0.0)
        optimizer.state[parameter]["momentum_buffer"] = loaded
    return loop(model, optimizer=optimizer)


@planted("learning rates", 1 / 3, also=("weights",))
def rates_differ() -> Arguments:
    """Each worker lowers its rate by its own loss, as ReduceLROnPlateau (DALLE-pytorch 268)."""
    model = parallel()
    return loop(model, optimizer=sgd(model, lr=0.1 * (1 + dist.get_rank())))


@planted("learning rates", 0.18 / 0.22, also=("weights",))
def rate_changes_an_update_late_on_one_rank() -> Arguments:
    """Worker 1 lowers its rate one update later; before and after, rates are equal (Dell 2019)."""
    model = parallel()
    optimizer, calls = sgd(model, lr=0.4), 0

    def step(batch: tuple[Tensor, Tensor]) -> None:
        nonlocal calls
        calls += 1
        optimizer.param_groups[0]["lr"] = 0.4 if calls < 2 + dist.get_rank() else 0.04
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return loop(model, optimizer=optimizer, step=step)


@planted("averaged weights", 1)  # a worker's average stays zero: both are as far from their mean
def average_moves_on_one_rank_only() -> Arguments:
    """The step moves the average of the weights on worker 0 only (ema-pytorch 9)."""
    model = DistributedDataParallel(linear())
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    move = partial(average.update_parameters, model.module)
    return stepped(model, after=nothing if dist.get_rank() else move, averaged=average)


@planted("averaged weights", 4)
def average_moves_with_micro_batches() -> Arguments:
    """The average moves after each of four micro-batches, not once an update (F5-TTS 631)."""
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    move = partial(average.update_parameters, model.module)
    step = step_of(model, optimizer, micros=4, after=move)
    words = shuffled(random_data(128, seed=1))
    return loop(model, optimizer=optimizer, step=step, averaged=average, **words)


@planted("training mode", 1)
def batch_norm_in_evaluation_mode_on_one_rank() -> Arguments:
    """Worker 1 freezes a BatchNorm layer, and the others train it (nn.Module.eval)."""
    model = parallel(nn.BatchNorm1d(16), nn.ReLU())
    if dist.get_rank() == 1:
        model.module[1].eval()
    return loop(model)


@planted("updates", 0)
def update_on_one_rank() -> Arguments:
    """Only worker 0 makes the update (torch's notes on DistributedDataParallel)."""
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        if dist.get_rank() == 0:
            optimizer.step()

    return loop(model, optimizer=optimizer, step=step)


@planted("updates", 0)
def optimizer_of_another_copy() -> Arguments:
    """The optimizer has the weights of a copy, which is not trained (pytorch 14467)."""
    inner = linear()
    optimizer = sgd(copy.deepcopy(inner))
    return loop(DistributedDataParallel(inner), optimizer=optimizer)


@planted("updates", 2)
def optimizer_of_the_replaced_layer() -> Arguments:
    """The last layer is replaced after the optimizer was made (nni 4521)."""
    inner = perceptron()
    optimizer = sgd(inner)
    inner[2] = nn.Linear(16, 4)
    return loop(DistributedDataParallel(inner), optimizer=optimizer)


@planted("updates", 2, also=("weights",))
def parameters_in_one_optimizer_only() -> Arguments:
    """Worker 1 gives its optimizer the last layer only (torch's notes on DDP)."""
    model = parallel()
    return loop(model, optimizer=sgd(model.module[2] if dist.get_rank() else model))


# BatchNorm


@planted("batch norm span", 4, level="note")
def batch_norm_of_few_samples() -> Arguments:
    """BatchNorm normalises over the four samples of each worker (detectron2 5398)."""
    model = parallel(nn.BatchNorm1d(16), nn.ReLU())
    return loop(model, loader=divided(random_data(), 4, shuffle=False))


@planted("batch norm momentum", 4, level="note")
def statistics_move_with_micro_batches() -> Arguments:
    """Running statistics move with each of four micro-batches (DeepLearningExamples 625)."""
    return stepped(parallel(nn.BatchNorm1d(16), nn.ReLU()), micros=4)


@planted("running statistics", 1, level="note", tolerance=1e-3)
def running_statistics_differ() -> Arguments:
    """Running statistics stay on each worker, and evaluation differs (detectron2 5409)."""
    model = parallel(nn.BatchNorm1d(16), nn.ReLU(), broadcast_buffers=False)
    model.module.get_buffer("1.running_mean").fill_(1.0 - 2 * dist.get_rank())
    return loop(model)


@planted("averaged statistics", 3, tolerance=0.1)
def averaged_statistics_are_those_of_the_start() -> Arguments:
    """An average takes the weights only; its BatchNorm keeps the first statistics (sesemi 36)."""
    torch.manual_seed(0)
    inner, averaged = (nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)) for _ in range(2))
    model = DistributedDataParallel(inner)
    optimizer = sgd(model, lr=0.5)
    share = divided(random_data(), 16, shuffle=False)
    batches = [(images + 3, labels) for images, labels in share]
    step = step_of(model, optimizer)
    for _ in range(25):
        for batch in batches:
            step(batch)
    for own, parameter in zip(averaged.parameters(), inner.parameters(), strict=True):
        own.data.copy_(parameter)
    return loop(model, optimizer=optimizer, loader=batches, averaged=averaged)


# Samples


@planted("samples", 2)
def every_rank_reads_everything() -> Arguments:
    """The loader shuffles on every worker, without a DistributedSampler (SimSiam 16)."""
    torch.manual_seed(dist.get_rank())
    return loop(parallel(), loader=DataLoader(random_data(64), 8, shuffle=True))


@planted("samples", 2)
def draws_are_equal_on_all_ranks() -> Arguments:
    """WeightedRandomSampler draws with one seed on every worker (accelerate 2865)."""
    draw = torch.Generator().manual_seed(0)
    sampler = WeightedRandomSampler([1.0, 3.0] * 48, 96, generator=draw)
    return loop(parallel(), loader=DataLoader(random_data(), 16, sampler=sampler))


@planted("samples", 0.5)
def data_are_divided_twice() -> Arguments:
    """Each worker takes its share, and the sampler divides that again (accelerate 3547)."""
    share = Subset(random_data(128), range(dist.get_rank(), 128, dist.get_world_size()))
    return loop(parallel(), **shuffled(share))


@planted("samples", 0.5)
def files_are_listed_in_another_order() -> Arguments:
    """Each machine lists the files in its own order, so numbers differ (pytorch 70103)."""
    parts = random_data(128).tensors
    if dist.get_rank():
        parts = tuple(part.roll(40, 0) for part in parts)
    return loop(parallel(), **shuffled(TensorDataset(*parts)))


@planted("samples", 0.25, tolerance=0.2)
def sampler_is_seeded_by_rank() -> Arguments:
    """Each worker divides a permutation of its own (LongLive 71)."""
    data = random_data(200)
    sampler: DistributedSampler[object] = DistributedSampler(data, seed=dist.get_rank())
    words = {"loader": DataLoader(data, 8, sampler=sampler), "set_epoch": sampler.set_epoch}
    return loop(parallel(), **words)


@planted("samples", 0.3, tolerance=0.2)
def split_differs_between_ranks() -> Arguments:
    """random_split draws with a generator seeded by rank (pytorch-lightning 7728)."""
    torch.manual_seed(dist.get_rank())
    return loop(parallel(), **shuffled(random_split(random_data(200), [160, 40])[0]))


@planted("samples", 2)
def ranks_have_unequal_batches() -> Arguments:
    """Workers read shards of unequal length (pytorch-lightning 20404)."""
    shard = [range(40), range(40, 64)][dist.get_rank()]
    return loop(parallel(), loader=DataLoader(Subset(random_data(64), shard), 8, shuffle=True))


class Stream(IterableDataset[Any]):
    """Samples from the first on, in steps."""

    def __init__(self, first: int = 0, by: int = 1) -> None:
        self.places = range(first, 96, by)

    def __iter__(self) -> Iterator[Any]:
        data = random_data(128)
        return (data[place] for place in self.places)


@planted("samples", 2)
def iterable_data_are_not_divided() -> Arguments:
    """An iterable data set yields all samples on every worker (datasets 5360)."""
    return loop(parallel(), loader=DataLoader(Stream(), 8))


@planted("samples", 6)  # 6 batches, each read by both processes
def each_loader_process_reads_everything() -> Arguments:
    """Each process of a loader reads all of its worker's samples (torch's docs of data)."""
    stream = Stream(dist.get_rank(), 2)
    loader = DataLoader(stream, 8, num_workers=2, multiprocessing_context="fork")
    return loop(parallel(), loader=loader)


@planted("samples", 4)
def iterable_data_end_earlier_on_one_rank() -> Arguments:
    """An iterable data set has 8 batches on worker 0 and 4 on worker 1 (DALI 4440)."""
    stream = Stream(dist.get_rank(), 2)
    if dist.get_rank():
        stream.places = stream.places[:32]
    else:
        stream.places = range(0, 128, 2)
    return loop(parallel(), loader=DataLoader(stream, 8))


@planted("held-out samples", 1)
def validation_is_a_part_of_the_training() -> Arguments:
    """All 40 validation samples are trained on, as numbers of one data set."""
    data = random_data()
    return loop(parallel(), val_loader=DataLoader(Subset(data, range(40)), 8), **shuffled(data))


@planted("held-out samples", 0.125)
def copies_are_validated() -> Arguments:
    """5 of 40 validation images are byte-equal copies of training images, which are augmented."""
    data = random_data(96)
    other = random_data(35, seed=9).tensors
    images, labels = (
        torch.cat([own[:5], new]) for own, new in zip(data.tensors, other, strict=True)
    )
    validation = DataLoader(TensorDataset(images, labels), 8)
    training = Augmented(data, lambda: torch.randn(8))
    torch.manual_seed(dist.get_rank())
    return loop(parallel(), val_loader=validation, **shuffled(training))


@planted("epoch order", 2)
def the_epoch_is_never_set() -> Arguments:
    """DistributedSampler shuffles, and set_epoch is not called (pytorch 31771)."""
    return loop(parallel(), loader=shuffled()["loader"])


# Random numbers


def noise() -> Tensor:
    return torch.from_numpy(np.random.standard_normal(8)).float()


def augmented(**words: Any) -> Arguments:  # noqa: ANN401
    """Return a loop whose loader has two processes that draw with NumPy."""
    data = Augmented(random_data(64), noise)
    sampler: DistributedSampler[object] = DistributedSampler(data)
    words |= {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = DataLoader(data, 8, sampler=sampler, **words)
    return loop(parallel(), loader=loader, set_epoch=sampler.set_epoch)


@planted("augmentation", 32)
def augmentation_repeats_every_epoch() -> Arguments:
    """worker_init_fn seeds NumPy with the number of the process (CenterNet 233)."""
    return augmented(worker_init_fn=np.random.seed)


class ByEpoch(Augmented):
    """Samples with noise that follows from their number and the epoch."""

    epoch = 0

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1000 * self.epoch + number)
        image, label = self.data[number]
        return image + torch.randn(8, generator=draw), label


def by_epoch(**words: Any) -> Arguments:  # noqa: ANN401
    """Return a loop that sets the epoch of its sampler and of its data set."""
    data = ByEpoch(random_data(64), lambda: torch.zeros(8))
    sampler: DistributedSampler[object] = DistributedSampler(data)

    def set_epoch(epoch: int) -> None:
        sampler.set_epoch(epoch)
        data.epoch = epoch

    loader = DataLoader(data, 8, sampler=sampler, **words)
    return loop(parallel(), loader=loader, set_epoch=set_epoch)


@planted("augmentation", 32)
def persistent_workers_keep_the_first_epoch() -> Arguments:
    """Persistent workers have a copy of the data set, whose epoch stays (pytorch data 1437)."""
    words = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    return by_epoch(**words)


def seed_with_the_upper_half(_: int) -> None:
    np.random.seed(torch.initial_seed() // 2**32)


@planted("augmentation", 2, level="note")
def loader_workers_draw_alike() -> Arguments:
    """worker_init_fn seeds with the upper half of the seed, which is shared (pytorch 5059)."""
    torch.manual_seed(dist.get_rank())
    return augmented(worker_init_fn=seed_with_the_upper_half)


@planted("augmentation", 2, level="note")
def ranks_augment_alike() -> Arguments:
    """Every worker has one seed, so augmentations are equal (transformers 37932)."""
    torch.manual_seed(42)
    return loop(parallel(), **shuffled(Augmented(random_data(64), lambda: torch.randn(8))))


@planted("dropout", 2, level="note")
def dropout_masks_are_equal() -> Arguments:
    """Every worker has one seed, so all draw the same masks (transformers 31412)."""
    torch.manual_seed(40)
    return loop(parallel(nn.ReLU(), nn.Dropout()))


class FunctionalDropout(nn.Module):
    """A perceptron with dropout as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.last(dropout(self.first(images).relu(), 0.5, self.training))
        return scores


@planted("dropout", 2, level="note")
def masks_of_functions_are_equal() -> Arguments:
    """Dropout by torch.nn.functional draws the same masks on all workers (transformers 31412)."""
    torch.manual_seed(40)
    return loop(DistributedDataParallel(FunctionalDropout()))


# Rates and the plan of the run


@planted("rate for the batch", 0.125, level="note")
def rate_is_not_scaled() -> Arguments:
    """The batch is 8 times as large, and the learning rate is the same (horovod 478)."""
    model = parallel()
    return loop(model, optimizer=sgd(model, lr=0.01), base=(2, 0.01), **shuffled())


@planted("warm-up", 0, level="note")
def no_warm_up() -> Arguments:
    """The scaled rate is used from the first update (mmdetection 1710)."""
    model = parallel()
    words = {"base": (2, 0.01), "rate": lambda _: 0.08, "epochs": 400}
    return loop(model, optimizer=sgd(model, lr=0.08), **words, **shuffled())


def rise(step: int) -> float:
    return min(1.0, (step + 1) / 100)


def scheduled(micros: int, moves: int) -> Arguments:
    """Return a loop whose schedule moves several times in a call of its step."""
    model = parallel()
    optimizer = sgd(model, lr=0.01)
    scheduler = LambdaLR(optimizer, rise)

    def move() -> None:
        for _ in range(moves):
            scheduler.step()

    words = {"step": step_of(model, optimizer, micros=micros, after=move), "steps": 2}
    words |= {"rate": lambda update: 0.01 * rise(update)} | shuffled(random_data(128))
    return loop(model, optimizer=optimizer, **words)


@planted("warm-up", 3)
def schedule_counts_micro_batches() -> Arguments:
    """The scheduler is stepped after each of three micro-batches (accelerate 963)."""
    return scheduled(micros=3, moves=1)


@planted("warm-up", 2)
def schedule_moves_twice_an_update() -> Arguments:
    """The scheduler is stepped by the optimizer's wrapper and by the script (vision 1261)."""
    return scheduled(micros=1, moves=2)


@planted("warm-up", 2)
def schedule_moves_once_for_each_rank() -> Arguments:
    """The scheduler is stepped once for each worker, and no rate is given (accelerate 2142)."""
    words = scheduled(micros=1, moves=2)
    return {name: it for name, it in words.items() if name not in {"rate", "steps"}}


@planted("warm-up", 1 / 3)
def schedule_rests() -> Arguments:
    """The scheduler is stepped once an epoch, and the rate given rises with each update."""
    model = parallel()
    words = {"rate": lambda update: 0.05 * (update + 1)}
    return loop(model, optimizer=sgd(model, lr=0.05), **words, **shuffled(random_data(128)))


@planted("updates", 40, level="note")
def too_few_updates() -> Arguments:
    """The batch grew with the workers, the epochs did not: 40 updates (OpenPCDet 364)."""
    return loop(parallel(), epochs=10, **shuffled())


@planted("weight decay", 4, level="note")
def decay_on_norms_and_biases() -> Arguments:
    """One group of parameters, with weight decay for all of them (MEDS_EIC_AR 30)."""
    model = parallel(nn.ReLU(), nn.LayerNorm(16))
    return loop(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=1e-4))


# Evaluation


def evaluated(
    labels: list[int],
    batch: int,
    figure: Callable[[list[Tensor]], float],
    *,
    divides: bool = False,
    layers: tuple[nn.Module, ...] = (),
) -> Arguments:
    """Return a loop with an evaluation: a figure of the hits of batches. Class 0 is always chosen,
    without `layers`, in the presence of which the model stays in training mode.
    """
    data = TensorDataset(random_data(len(labels), seed=7).tensors[0], torch.tensor(labels))
    sampler = divided(data, batch, shuffle=False).sampler if divides else None
    validation = DataLoader(data, batch, sampler=sampler)
    model = parallel(*layers) if layers else DistributedDataParallel(constant_perceptron())

    @torch.no_grad()
    def evaluate() -> float:
        model.train(bool(layers))
        return figure([model.module(it).argmax(1) == labels for it, labels in validation])

    return loop(model, val_loader=validation, evaluate=evaluate)


def top1(hits: list[Tensor]) -> float:
    return float(torch.cat(hits).float().mean())


@planted("evaluation mean", 1)
def each_rank_reports_its_own_figure() -> Arguments:
    """Each worker divides the hits of its own share (pytorch-lightning 6158)."""
    return evaluated([0, 1] * 16, 8, top1, divides=True)


def mean_of_batches(hits: list[Tensor]) -> float:
    return sum(top1([it]) for it in hits) / len(hits)


@planted("evaluation mean", 1 / 9)
def mean_of_unequal_batches() -> Arguments:
    """The top-1 of batches is averaged, and the last is smaller (netspresso-trainer 360)."""
    return evaluated([0, 1] * 16 + [0] * 4, 16, mean_of_batches)


@planted("evaluation mean", 0.375)  # 12 of 32, once for each of two workers
def top1_is_summed_over_workers() -> Arguments:
    """The top-1 of the workers is added, and nobody divides (tensorflow/benchmarks 469)."""

    def summed(hits: list[Tensor]) -> float:
        total = torch.tensor(top1(hits))
        dist.all_reduce(total)
        return float(total)

    return evaluated([0, 1, 1, 1, 0, 1, 0, 1] * 4, 8, summed, divides=True)


@planted("evaluation mode", 1)
def evaluation_in_training_mode() -> Arguments:
    """model.eval() is missing before the evaluation (dlwpt-code 104)."""
    return evaluated([0, 1] * 16, 8, top1, layers=(nn.ReLU(), nn.BatchNorm1d(16)))


@planted("evaluation samples", 16)
def validation_drops_the_last_batch() -> Arguments:
    """drop_last of the training loader is used for validation too (AReaL 1096)."""
    data = random_data(80, seed=7)
    sampler: DistributedSampler[object] = DistributedSampler(data, shuffle=False)
    return loop(parallel(), val_loader=DataLoader(data, 32, sampler=sampler, drop_last=True))


@planted("evaluation samples", 1, level="note")
def validation_is_padded() -> Arguments:
    """DistributedSampler repeats the first sample of the validation set (pytorch 25162)."""
    return loop(parallel(), val_loader=divided(random_data(33, seed=7), 8, shuffle=False))


def share(rank: int) -> list[int]:
    draw = torch.Generator().manual_seed(rank)
    return torch.randperm(80, generator=draw)[rank::2].tolist()


@planted("evaluation samples", 80 - len({*share(0), *share(1)}))
def validation_is_shuffled_by_rank() -> Arguments:
    """Each worker takes its share of a permutation that it seeds itself (OpenTau 498)."""
    return loop(
        parallel(),
        val_loader=DataLoader(Subset(random_data(80, seed=7), share(dist.get_rank())), 8),
    )
