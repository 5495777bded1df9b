"""Steps that are correct, or cannot be judged, in ways that people write them."""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planted_audit import findings_of
from planted_parts import (
    Arguments,
    Loop,
    cleared,
    linear,
    loop,
    parallel,
    perceptron,
    random_data,
    sgd,
    shuffled,
    stepped,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

from largebatch.audit import Findings, audit
from largebatch.audit.findings import Check
from largebatch.rules import Level


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
    return loop(DistributedDataParallel(Running()), **shuffled(random_data(), 16))


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
    return loop(parallel(), loader=loader, set_epoch=sampler.set_epoch)


def two_passes_over_each_sample() -> Arguments:
    model = parallel()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        passes = (cross_entropy(model(images), batch[1]) for images in (batch[0], -batch[0]))
        return torch.stack(list(passes)).sum()

    return cleared(model, loss, **shuffled(random_data(), 16))


def weights_are_averaged_after_every_update() -> Arguments:
    model = perceptron()

    @torch.no_grad()
    def average() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter.div_(dist.get_world_size())

    return stepped(model, after=average, **shuffled(random_data(), 16))


JUDGED: dict[Loop, tuple[Check, Level, str]] = {
    weights_are_averaged_after_every_update: ("gradient direction", "unknown", "averaged or"),
    statistic_that_is_broadcast: ("buffers", "note", "unequal on the workers"),
    sampler_of_a_part: ("samples", "note", "16 never read in an epoch"),
    two_passes_over_each_sample: ("gradient scale", "unknown", "each sample more than once"),
}


@pytest.fixture(scope="module")
def results() -> dict[str, Findings | str]:
    return findings_of(list(JUDGED))


@pytest.mark.parametrize("make", JUDGED)
def test_a_step_is_judged_with_its_reason(make: Loop, results: dict[str, Findings | str]) -> None:
    findings, (check, level, text) = results[make.__name__], JUDGED[make]
    assert isinstance(findings, Findings), findings
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
