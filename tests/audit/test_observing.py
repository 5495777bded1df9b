"""What a process records of its training, and that it trains as without the record."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from largebatch.audit.resume.batches import FROM_FORWARD
from largebatch.audit.resume.record import Update, read_update, write_line
from largebatch.audit.resume.traces import digest_of_tensor, trace_of
from largebatch.audit.resume.watching import Watch

SAMPLES = 24


class Training:
    """A plain loop, and what it knows of itself before each update."""

    def __init__(self, *, processes: int = 0, accumulate: int = 1) -> None:
        torch.manual_seed(3)
        inputs = torch.randn(SAMPLES, 3, 4, 4)
        self.data = TensorDataset(inputs, torch.arange(SAMPLES) % 4)
        self.model = nn.Sequential(
            nn.Flatten(), nn.Linear(48, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4)
        )
        self.average = AveragedModel(self.model, multi_avg_fn=_ema)
        self.shadow = {name: it.detach().clone() for name, it in self.model.named_parameters()}
        norms = [*self.model[2].parameters()]
        others = [*self.model[1].parameters(), *self.model[4].parameters()]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": norms, "weight_decay": 0.0}]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        self.sampler: DistributedSampler[Any] = DistributedSampler(self.data, 1, 0)
        self.loader = DataLoader(self.data, 4, sampler=self.sampler, num_workers=processes)
        self.accumulate = accumulate
        self.known: list[dict[str, Any]] = []
        self.random = torch.get_rng_state()

    def run(self, epochs: int = 2) -> None:
        batches: list[tuple[Tensor, Tensor]] = []
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for number, batch in enumerate(self.loader, 1):
                if not batches:
                    buffers = {n: digest_of_tensor(it) for n, it in self.model.named_buffers()}
                batches.append(batch)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = cross_entropy(self.model(batch[0]), batch[1])
                self.scaler.scale(loss).backward()
                if number % self.accumulate:
                    continue
                self.scaler.unscale_(self.optimizer)
                self.note(batches, epoch=epoch, loss=loss.item(), buffers=buffers)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                self.schedule.step()
                self.average.update_parameters(self.model)
                for name, weight in self.model.named_parameters():
                    self.shadow[name].lerp_(weight.detach(), 0.5)
                batches = []
            self.model.eval()
            with torch.no_grad():
                for images, _ in DataLoader(self.data, 12):
                    self.model(images)
        self.random = torch.get_rng_state()

    def note(self, batches: list[tuple[Tensor, Tensor]], **known: object) -> None:
        momenta = self.optimizer.state
        self.known.append(
            known
            | {
                "images": [digest_of_tensor(it) for images, _ in batches for it in images],
                "labels": [digest_of_tensor(it) for _, labels in batches for it in labels],
                "rates": tuple(group["lr"] for group in self.optimizer.param_groups),
                "scale": self.scaler.get_scale(),
                "weights": {n: trace_of(it) for n, it in self.model.named_parameters()},
                "gradients": {
                    n: trace_of(it.grad)
                    for n, it in self.model.named_parameters()
                    if it.grad is not None
                },
                "state": {
                    f"{name}:momentum_buffer": trace_of(momenta[it]["momentum_buffer"])
                    for name, it in self.model.named_parameters()
                    if it in momenta
                },
                "average": [trace_of(it) for it in self.average.parameters()],
                "shadow": [trace_of(it) for it in self.shadow.values()],
            }
        )


def _ema(averages: Sequence[Tensor], weights: Sequence[Tensor], _: object) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.lerp_(weight, 0.1)


def observed(train: Callable[[], object]) -> tuple[list[Update], Watch]:
    """Return the updates of a training, as they are read again, and what saw them."""
    lines: list[str] = []
    watch = Watch(lambda update: lines.append(write_line(update)))
    with watch.installed():
        train()
    return [read_update(line) for line in lines], watch


@pytest.fixture(scope="module")
def training() -> tuple[Training, list[Update]]:
    made: list[Training] = []

    def train() -> None:
        made.append(Training(accumulate=2))
        made[0].run()

    updates, _ = observed(train)
    return made[0], updates


Observed = tuple[Training, list[Update]]


def test_observed_training_is_the_same_bit_for_bit(training: Observed) -> None:
    plain = Training(accumulate=2)
    plain.run()
    assert plain.known == training[0].known
    assert plain.random.equal(training[0].random)


def test_an_update_has_what_the_loop_knows_before_it(training: Observed) -> None:
    loop, updates = training
    assert [it.number for it in updates] == list(range(6))
    for known, update in zip(loop.known, updates, strict=True):
        assert update.epoch == known["epoch"]
        assert update.loss == known["loss"]
        assert update.rates == known["rates"]
        assert update.scale == known["scale"]
        assert update.weights == known["weights"]
        assert update.gradients == known["gradients"]
        assert update.state == known["state"]
        assert {name: it.digest for name, it in update.buffers.items()} == known["buffers"]
        assert [it for batch in update.batches for it in batch.samples] == known["images"]
        assert [it for batch in update.batches for it in batch.labels] == known["labels"]
    assert [it.scale_growth for it in updates] == [0, 1, 2, 0, 1, 2]
    assert [it.schedules for it in updates] == [(number,) for number in range(6)]
    assert [it.schedule_moves for it in updates] == [0, 1, 1, 1, 1, 1]
    assert updates[0].sizes == (4, 2)
    assert [it["weight_decay"] for it in updates[0].settings] == [0.01, 0.0]


def test_batches_have_the_numbers_of_their_samples(training: Observed) -> None:
    loop, updates = training
    for epoch in range(2):
        loop.sampler.set_epoch(epoch)
        batches = [it for update in updates[3 * epoch :][:3] for it in update.batches]
        assert [number for it in batches for number in it.indices or ()] == list(loop.sampler)
        assert [(it.loader, it.epoch, it.position) for it in batches] == [
            (0, epoch, number) for number in range(6)
        ]


def test_both_averages_are_found(training: Observed) -> None:
    loop, updates = training
    for known, update in zip(loop.known, updates, strict=True):
        of_copy: dict[str, list[Any]] = {}
        for key, trace in update.averages.items():
            of_copy.setdefault(key.partition(":")[0], []).append(trace)
        assert [*of_copy.values()] == [known["average"], known["shadow"]]
    assert [it.averaged_updates for it in updates] == list(range(6))


def test_masks_and_generators_change_with_every_draw(training: Observed) -> None:
    updates = training[1]
    masks = [mask for update in updates for mask in update.masks]
    assert len(set(masks)) == len(masks) == 12  # two passes an update
    assert len({update.generators["torch"] for update in updates}) == 6
    assert "python" not in updates[0].generators  # the loop does not use it


def test_loader_processes_do_not_change_the_record(training: Observed) -> None:
    updates, watch = observed(lambda: Training(processes=2, accumulate=2).run(epochs=1))
    assert [it.batches for it in updates] == [it.batches for it in training[1][:3]]
    assert watch.batches.training is not None
    assert watch.batches.training.processes == 2


def test_a_sketch_estimates_the_distance_of_tensors() -> None:
    torch.manual_seed(0)
    ratios = []
    for _ in range(200):
        weights, change = torch.randn(2, 3000)
        near = weights + 0.01 * change
        true = float((near - weights).norm() / max(weights.norm(), near.norm()))
        ratios.append(trace_of(weights).distance(trace_of(near)) / true)
    assert 0.95 < float(np.mean(ratios)) < 1.02
    assert 0.12 < float(np.std(ratios)) < 0.24
    assert trace_of(weights).distance(trace_of(weights.clone())) == 0
    assert trace_of(weights).digest != trace_of(weights.double()).digest


# Loops of other forms. Each makes two updates of a small model.


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.Linear(5, 3))


def _data(size: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(size, 6, generator=generator), torch.arange(size) % 3)


def positions(updates: list[Update]) -> list[list[int]]:
    return [[it.position for it in update.batches] for update in updates]


def with_a_closure() -> None:
    model = _model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for images, labels in DataLoader(_data(), 6):

        def closure(images: Tensor = images, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            return loss

        optimizer.step(closure)


def with_skipped_batches() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (images, labels) in enumerate(DataLoader(_data(), 3)):
        if number >= 2:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()


def with_changed_inputs_and_a_look_ahead() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(DataLoader(_data(), 6))
    for images, labels in batches:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()


def with_a_compiled_model() -> None:
    model: Any = torch.compile(_model(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in DataLoader(_data(), 6):
        optimizer.zero_grad()
        cross_entropy(model(images * 2), labels).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("loop", "batches"),
    [
        pytest.param(with_a_closure, [[0], [1]], id="closure"),
        pytest.param(with_skipped_batches, [[2], [3]], id="skipped batches"),
        pytest.param(with_changed_inputs_and_a_look_ahead, [[0], [1]], id="read before"),
        pytest.param(with_a_compiled_model, [[0], [1]], id="compiled", marks=pytest.mark.long),
    ],
)
def test_other_loops_are_recorded(loop: Callable[[], None], batches: list[list[int]]) -> None:
    updates, _ = observed(loop)
    assert positions(updates) == batches
    first = _model().state_dict()
    assert {name: trace_of(it) for name, it in first.items()} == updates[0].weights
    assert set(updates[0].gradients) == set(first)
    assert all(update.masks for update in updates)


def test_two_optimizers_have_numbers_and_tensors_of_their_own() -> None:
    def train() -> None:
        nets = [_model(seed) for seed in range(2)]
        optimizers = [torch.optim.SGD(it.parameters(), lr=0.1) for it in nets]
        for images, _ in DataLoader(_data(), 6):
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                net(images).square().mean().backward()
                optimizer.step()

    updates, _ = observed(train)
    assert [it.optimizer for it in updates] == [0, 1, 0, 1]
    weights = [trace_of(_model(seed).get_parameter("0.weight")) for seed in range(2)]
    assert [it.weights["0.weight"] for it in updates[:2]] == weights
    assert positions(updates) == [[0], [], [1], []]


def test_a_subsets_samples_have_the_numbers_of_the_whole_set() -> None:
    def train() -> None:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for images, _ in DataLoader(Subset(_data(), [7, 3, 9, 1]), 2):
            model(images).sum().backward()
            optimizer.step()

    updates, _ = observed(train)
    assert [it.batches[0].indices for it in updates] == [(7, 3), (9, 1)]


def test_inputs_without_a_loader_are_batches_too() -> None:
    inputs = _data().tensors[0]

    def train() -> None:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for part in inputs.split(4):
            model(part).sum().backward()
            optimizer.step()

    updates, _ = observed(train)
    samples = [it for update in updates for batch in update.batches for it in batch.samples]
    assert samples == [digest_of_tensor(it) for it in inputs]
    assert updates[0].batches[0].loader == FROM_FORWARD


def test_files_and_keys_are_recorded(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.zeros(5, 6), "other": torch.zeros(1)}, tmp_path / "old.pth")

    def train() -> None:
        model = _model()
        model.load_state_dict(torch.load(tmp_path / "old.pth"), strict=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for images, _ in DataLoader(_data(), 6):
            model(images).sum().backward()
            optimizer.step()
            torch.save(model.state_dict(), tmp_path / "new.pth")
            # A thread may end before the next update or after it.
            aside = Thread(target=torch.save, args=(model.state_dict(), tmp_path / "aside.pth"))
            aside.start()
            aside.join()

    updates, watch = observed(train)
    summary = watch.summary(0, 1, with_end=True)
    assert summary["resumed_from"] == ("old.pth",)
    assert set(summary["missing_keys"]) == {"0.bias", "2.weight", "2.bias"}
    assert summary["unexpected_keys"] == ("other",)
    assert [update.saved for update in updates] == [(), ("new.pth",)]
    assert summary["end"]["saved"] == ("new.pth",)
    assert summary["saved_aside"] == ("aside.pth",)


def test_nothing_is_left_behind() -> None:
    before = [Tensor.backward, nn.Module.__call__, DataLoader.__iter__, torch.save, torch.compile]
    observed(with_skipped_batches)
    after = [Tensor.backward, nn.Module.__call__, DataLoader.__iter__, torch.save, torch.compile]
    assert after == before
