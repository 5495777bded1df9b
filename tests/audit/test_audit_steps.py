"""Steps that are correct, or cannot be judged, in ways that people write them."""

import contextlib
import gc
import io
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_forked_workers import on_forked_workers
from planted_parts import linear, perceptron, random_data, sgd, step_of
from torch import Tensor, nn
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


def weights_are_averaged_after_every_update() -> Arguments:
    model = perceptron()
    optimizer = sgd(model)

    @torch.no_grad()
    def average() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter.div_(dist.get_world_size())

    return script(model, optimizer=optimizer, step=step_of(model, optimizer, after=average))


MAKES = [
    weights_are_averaged_after_every_update,
    statistic_that_is_broadcast,
    sampler_of_a_part,
    two_passes_over_each_sample,
]


@pytest.fixture(scope="module")
def results() -> dict[Callable[[], Arguments], Findings]:
    return dict(zip(MAKES, on_forked_workers(on_two, MAKES, workers=2), strict=True))


@pytest.mark.parametrize(
    ("make", "check", "level", "text"),
    [
        (weights_are_averaged_after_every_update, "gradient direction", "unknown", "averaged or"),
        (statistic_that_is_broadcast, "buffers", "note", "unequal on the workers"),
        (sampler_of_a_part, "samples", "note", "16 never read in an epoch"),
        (two_passes_over_each_sample, "gradient scale", "unknown", "each sample more than once"),
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
