"""Steps that are correct, or cannot be judged, in ways that people write them."""

import contextlib
import gc
import io
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_forked_workers import on_forked_workers
from planted_parts import linear, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from largebatch.audit import audit
from largebatch.audit.findings import Check, Findings, Level

Arguments = dict[str, Any]


def on_two(makes: list[Callable[[], Arguments]]) -> list[Findings]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with contextlib.redirect_stdout(io.StringIO()):
        found = [audited(make) for make in makes]
    gc.collect()  # models must not outlive their process group
    dist.destroy_process_group()
    return found


def audited(make: Callable[[], Arguments]) -> Findings:
    torch.manual_seed(0)
    return audit(**make())


def script(model: nn.Module, **changes: Any) -> Arguments:  # noqa: ANN401 -- arguments of `audit`
    data = random_data()
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    words = {"model": model, "loader": DataLoader(data, 16, sampler=sampler)}
    words |= {"loss_fn": cross_entropy, "optimizer": sgd(model), "set_epoch": sampler.set_epoch}
    return words | changes


class Running(nn.Module):
    """A layer with a statistic of its own, which each worker measures over its own samples."""

    length: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("length", torch.ones(()))
        self.layers = perceptron()

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.length.lerp_(images.detach().norm(dim=1).mean(), 0.1)
        logits: Tensor = self.layers(images)
        return logits


def statistic_that_is_broadcast() -> Arguments:
    return script(DistributedDataParallel(Running()))


class Part(Sampler[int]):
    """This worker's share of the first 80 samples."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(80, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[dist.get_rank() :: dist.get_world_size()])

    def __len__(self) -> int:
        return 80 // dist.get_world_size()


def sampler_of_a_part() -> Arguments:
    sampler = Part()
    loader = DataLoader(random_data(), 8, sampler=sampler)
    model = DistributedDataParallel(perceptron())
    return script(model, loader=loader, set_epoch=sampler.set_epoch)


def two_passes_over_each_sample() -> Arguments:
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        passes = (cross_entropy(model(images), batch[1]) for images in (batch[0], -batch[0]))
        torch.stack(list(passes)).sum().backward()
        optimizer.step()

    return script(model, optimizer=optimizer, step=step)


def iterator_in_the_step() -> Arguments:
    model = DistributedDataParallel(perceptron())
    optimizer, others = sgd(model), iter(DataLoader(random_data(), 4))

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        images = torch.cat([batch[0], next(others)[0]])[: len(batch[0])]
        cross_entropy(model(images), batch[1]).backward()
        optimizer.step()

    return script(model, optimizer=optimizer, step=step)


def loss_that_fails_late_on_worker_1() -> Arguments:
    """Return a step that accumulates over four batches, the last of which has a bad label."""
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model)
    first = 8 * dist.get_rank()
    batches = [(torch.ones(4, 8) * (first + place), torch.arange(4)) for place in range(8)]
    if dist.get_rank() == 1:
        batches[6] = (batches[6][0], torch.full((4,), 9))

    def step(batch: tuple[Tensor, Tensor]) -> None:
        (cross_entropy(model(batch[0]), batch[1]) / 4).backward()
        if int(batch[0][0, 0]) % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()

    return script(model, optimizer=optimizer, step=step, loader=batches)


def local(
    *,
    period: int = 1,
    late: bool = False,
    rate: Callable[[int], float] = lambda _: 0.1,
    averager: PeriodicModelAverager | None = None,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **words: float,
) -> Arguments:
    """Return a script that averages weights after updates of its own, or before the next."""
    model, calls = perceptron(), 0
    optimizer = make(model.parameters(), lr=0.1, **words)

    @torch.no_grad()
    def average() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter.div_(dist.get_world_size())

    def step(batch: list[Tensor]) -> None:
        nonlocal calls
        optimizer.param_groups[0]["lr"] = rate(calls)
        if late and not averager:
            average()
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        calls += 1
        if averager:
            averager.average_parameters(model.parameters())
        elif calls % period == 0 and not late:
            average()

    return script(model, optimizer=optimizer, step=step)


def weights_averaged_with_a_momentum_of_each_worker() -> Arguments:
    return local(momentum=0.9, weight_decay=0.01, nesterov=True)


def weights_averaged_in_a_warm_up_from_0() -> Arguments:
    return local(rate=lambda call: 0.1 * call)


def weights_averaged_after_updates_of_adam() -> Arguments:
    return local(make=torch.optim.Adam)


def weights_averaged_after_every_second_update() -> Arguments:
    return local(period=2)


def weights_averaged_before_the_next_update() -> Arguments:
    return local(late=True)


def weights_averaged_less_often_than_the_audit_sees() -> Arguments:
    return local(averager=PeriodicModelAverager(period=8))


MAKES = [
    weights_averaged_with_a_momentum_of_each_worker,
    weights_averaged_in_a_warm_up_from_0,
    weights_averaged_after_updates_of_adam,
    weights_averaged_after_every_second_update,
    weights_averaged_before_the_next_update,
    weights_averaged_less_often_than_the_audit_sees,
    statistic_that_is_broadcast,
    sampler_of_a_part,
    two_passes_over_each_sample,
    iterator_in_the_step,
    loss_that_fails_late_on_worker_1,
]


@pytest.fixture(scope="module")
def results() -> dict[Callable[[], Arguments], Findings]:
    return dict(zip(MAKES, on_forked_workers(on_two, MAKES, workers=2), strict=True))


@pytest.mark.parametrize(
    ("make", "check", "level", "text"),
    [
        (weights_averaged_with_a_momentum_of_each_worker, "gradient scale", "fine", "1.0000 times"),
        (weights_averaged_with_a_momentum_of_each_worker, "optimizer state", "note", "unequal"),
        (weights_averaged_in_a_warm_up_from_0, "gradient direction", "fine", "cosine 1.0"),
        (weights_averaged_after_updates_of_adam, "gradient direction", "unknown", "local SGD"),
        (weights_averaged_after_every_second_update, "gradient direction", "unknown", "local SGD"),
        (weights_averaged_before_the_next_update, "gradient direction", "unknown", "local SGD"),
        (
            weights_averaged_less_often_than_the_audit_sees,
            "gradient direction",
            "unknown",
            "local SGD",
        ),
        (statistic_that_is_broadcast, "buffers", "note", "unequal on the workers"),
        (sampler_of_a_part, "samples", "note", "16 never read in an epoch"),
        (two_passes_over_each_sample, "gradient scale", "unknown", "each sample more than once"),
        (iterator_in_the_step, "gradient scale", "unknown", "step takes from an iterator (_Single"),
        (
            loss_that_fails_late_on_worker_1,
            "gradient scale",
            "unknown",
            "worker 1: ValueError: 4 of 4",
        ),
    ],
)
def test_a_step_is_judged_with_its_reason(
    make: Callable[[], Arguments],
    check: Check,
    level: Level,
    text: str,
    results: dict[Callable[[], Arguments], Findings],
) -> None:
    findings = results[make]
    assert not findings.faults, findings.table()
    hits = [it for it in findings.named(check) if it.level == level and text in it.text]
    assert len(hits) == 1, findings.table()
    assert hits[0].remedy or level == "fine"


class Two:
    """A model of which each layer has an optimizer, trained with a loss scale of 64."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.scaler = perceptron(), torch.amp.GradScaler("cpu", init_scale=64)
        self.optimizers = [sgd(self.model.get_submodule(name)) for name in ("0", "2")]

    def backward(self, batch: list[Tensor]) -> None:
        loss: Tensor = self.scaler.scale(cross_entropy(self.model(batch[0]), batch[1]))
        loss.backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def clip_values_with_scale(self, batch: list[Tensor]) -> None:
        self.model.zero_grad()
        self.backward(batch)
        self.scaler.unscale_(self.optimizers[0])
        for layer in (self.model[0], self.model[2]):
            nn.utils.clip_grad_value_(layer.parameters(), 0.01)
        self.update()

    def unscale_twice(self, batch: list[Tensor]) -> None:
        self.model.zero_grad()
        self.backward(batch)
        for parameter in self.model[2].parameters():
            assert parameter.grad is not None
            parameter.grad /= 64
        self.update()

    def clear_one(self, batch: list[Tensor]) -> None:
        self.optimizers[0].zero_grad()
        cross_entropy(self.model(batch[0]), batch[1]).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def forget_backward(self, batch: list[Tensor]) -> None:
        assert cross_entropy(self.model(batch[0]), batch[1]) > 0
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    ("step", "check", "text", "figure"),
    [
        (Two.clip_values_with_scale, "clipping", "2 of 2 gradients (2.weight, 2.bias) are", 64),
        (Two.unscale_twice, "gradient direction", "2 of 4 gradients are 0.0156 times", 1 / 64),
        (Two.clear_one, "gradient direction", "2 of 4 gradients (2.weight, 2.bias) still", None),
        (Two.forget_backward, "gradient scale", "no backward pass", 0),
    ],
)
def test_what_is_wrong_with_one_of_two_optimizers_is_named(
    step: Callable[[Two, list[Tensor]], None], check: Check, text: str, figure: float | None
) -> None:
    two, loader = Two(), DataLoader(random_data(), 16)
    with contextlib.redirect_stdout(io.StringIO()):
        findings = audit(two.model, loader, cross_entropy, two.optimizers[0], partial(step, two))
    (fault,) = findings.faults
    assert fault.check == check
    assert text in fault.text
    assert figure is None or fault.figure == pytest.approx(figure, rel=0.01)


def test_gradients_are_compared_behind_the_optimizers_own_hooks() -> None:
    model = linear()
    optimizer = sgd(model)
    weight: Any = model.weight
    optimizer.register_step_pre_hook(lambda *_: setattr(weight, "grad", 3 * weight.grad))
    with contextlib.redirect_stdout(io.StringIO()):
        findings = audit(model, DataLoader(random_data(), 16), cross_entropy, optimizer)
    (fault,) = findings.faults
    assert fault.check == "gradient scale"
    assert fault.figure == pytest.approx(3)
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_a_shorter_last_batch_is_not_taken_for_the_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    loader = DataLoader(random_data(69), 32, shuffle=True)  # batches of 32, 32 and 5
    with contextlib.redirect_stdout(io.StringIO()):
        findings = audit(model, loader, cross_entropy, sgd(model), base=(32, 0.05), epochs=30)
    (span,), (rate,) = findings.named("batch norm span"), findings.named("rate for the batch")
    assert "over 32 samples" in span.text
    assert " at a batch of 32, " in rate.text
