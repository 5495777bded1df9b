"""After an audit nothing is left modified: a script goes on as it would have without it."""

import contextlib
import copy
import gc
import io
import random
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_forked_workers import on_forked_workers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from largebatch.audit import Findings, audit
from largebatch.audit.restoring import Snapshot, restored

T = TypeVar("T")


class Augmented(Dataset[tuple[Tensor, int]]):
    """Samples with noise from every generator that people use."""

    def __init__(self, rank: int) -> None:
        self.draw = np.random.default_rng(rank)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, item: int) -> tuple[Tensor, int]:
        noise = random.random() + np.random.random() + float(torch.rand(())) + self.draw.random()
        image = torch.sin(torch.arange(8.0) * item) + noise
        return image.repeat(4).view(2, 4, 4), item % 4


class Script:
    """A script with everything that an audit must restore."""

    def __init__(self, *, workers: int = 0, static_graph: bool = False) -> None:
        rank = dist.get_rank()
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(rank + 1)
        generator = torch.Generator().manual_seed(rank)
        self.sampler: DistributedSampler[Any] = DistributedSampler(Augmented(rank), seed=1)
        self.loader = DataLoader(
            Augmented(rank),
            8,
            sampler=self.sampler,
            generator=generator,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        inner = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 4)
        )
        self.model = DistributedDataParallel(inner, static_graph=static_graph)
        self.averaged = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = ExponentialLR(self.optimizer, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256, growth_interval=2)
        self.number = 0
        self.losses: list[float] = []
        self.order = torch.Generator().manual_seed(rank)
        self.val_loader = DataLoader(Augmented(rank), 8, shuffle=True, generator=self.order)
        self.evaluations: list[int] = []

    def step(self, batch: list[Tensor]) -> None:
        self.number += 1
        loss = cross_entropy(self.model(batch[0]), batch[1])
        scaled: Tensor = self.scaler.scale(loss / 2)
        scaled.backward()
        self.losses.append(float(loss))
        if self.number % 2 == 0:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.averaged.update_parameters(self.model.module)

    def train(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)
        for batch in self.loader:
            self.step(batch)

    def evaluate(self) -> float:
        self.evaluations.append(self.number)
        self.model.eval()
        with torch.no_grad():
            hits = [(self.model(x).argmax(1) == y).float().mean() for x, y in self.val_loader]
        self.model.train()
        return float(torch.stack(hits).mean())

    def audit(self) -> Findings:
        with contextlib.redirect_stdout(io.StringIO()):
            return audit(
                self.model,
                self.loader,
                cross_entropy,
                self.optimizer,
                self.step,
                set_epoch=self.sampler.set_epoch,
                averaged=self.averaged,
                val_loader=self.val_loader,
                evaluate=self.evaluate,
            )

    def state(self) -> list[Any]:
        tensors = [*self.model.state_dict().values(), *self.averaged.state_dict().values()]
        moments = [it for state in self.optimizer.state.values() for it in state.values()]
        return [
            *[it.tolist() for it in (*tensors, *moments)],
            [None if it.grad is None else it.grad.tolist() for it in self.model.parameters()],
            [module.training for module in self.model.modules()],
            [len(module._forward_hooks) for module in self.model.modules()],
            [len(module._forward_pre_hooks) for module in self.model.modules()],
            self.schedule.state_dict(),
            self.scaler.state_dict(),
            [{k: v for k, v in it.items() if k != "params"} for it in self.optimizer.param_groups],
            (self.number, self.sampler.epoch, self.losses),
            (self.evaluations, self.order.get_state().tolist()),
            (random.random(), float(np.random.random()), torch.rand(3).tolist()),
        ]


def in_group(function: Callable[..., T], *args: object) -> T:
    """Call a function in a process group, which its models must not outlive.

    A reducer that is freed after its group may wait for a thread of Gloo that waits for it.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        return function(*args)
    finally:
        gc.collect()
        dist.destroy_process_group()


def train_with_audits(workers: int, static_graph: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the state after training without and with an audit, and the faults."""
    words: Any = {"workers": workers, "static_graph": static_graph}
    plain = Script(**words)
    for epoch in range(2):
        plain.train(epoch)
    expected = plain.state()
    audited = Script(**words)
    faults = [it.check for it in audited.audit().faults]
    audited.train(0)
    faults += [it.check for it in audited.audit().faults]  # in the middle of a run
    audited.train(1)
    return expected, audited.state(), faults


@pytest.mark.parametrize("static_graph", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_script_goes_on_bit_for_bit_as_without_an_audit(*, static_graph: bool) -> None:
    expected, state, faults = on_forked_workers(
        in_group, train_with_audits, 0, static_graph, workers=2
    )
    for before, after in zip(expected, state, strict=True):
        assert before == after
    assert set(faults) <= {"evaluation mean"}  # each worker has its own


@pytest.mark.long
def test_loader_workers_go_on_as_without_an_audit() -> None:
    expected, state, _ = on_forked_workers(in_group, train_with_audits, 1, False, workers=2)
    assert expected == state


def fail_in_update() -> tuple[list[Any], list[Any], list[str]]:
    """Return states around an audit whose step raises in its second update."""
    script = Script()
    script.train(0)
    twin = copy.deepcopy(script.state())
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    own = script.step

    def step(batch: list[Tensor]) -> None:
        own(batch)
        script.number += 100
        if len(script.losses) % 4 == 3:
            raise RuntimeError("no such class")

    script.step = step  # type: ignore[method-assign]
    findings = script.audit()
    script.step = own  # type: ignore[method-assign]
    return twin[:-1], script.state()[:-1], [it.text for it in findings]


def test_a_step_that_raises_leaves_nothing_modified() -> None:
    before, after, texts = on_forked_workers(in_group, fail_in_update, workers=2)
    assert before == after
    assert sum("the step failed on worker 0 and 1 more" in text for text in texts) == 1
    assert any("RuntimeError: no such class" in text for text in texts)


class Counter:
    """An object that a step holds."""

    def __init__(self) -> None:
        self.number, self.seen = 0, [1, {"a": torch.ones(2)}]


TOTAL = 0


def test_what_a_step_holds_is_restored_in_place() -> None:
    counter, local, window = Counter(), 0, deque([0.5], maxlen=2)
    inside = counter.seen[1]
    assert isinstance(inside, dict)

    def step(_: object) -> None:
        global TOTAL
        nonlocal local
        local, TOTAL = local + 1, TOTAL + 1
        counter.number += 1
        counter.seen.append(2)
        window.append(0.25)
        inside["a"] += 1
        inside["b"] = 3

    with restored([], [], [step]):
        step(None)
        assert (local, TOTAL, counter.number) == (1, 1, 1)
    assert (local, TOTAL, counter.number, list(window)) == (0, 0, 0, [0.5])
    assert counter.seen[1] is inside
    assert inside.keys() == {"a"}
    assert inside["a"].tolist() == [1, 1]


class Counted:
    """A data set with a counter, a cache and a generator, of a class of its own."""

    def __init__(self) -> None:
        self.cache, self.number = [0], 0
        self.data = torch.zeros(3)
        self.draw = {"flip": random.Random(1)}

    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: int) -> Tensor:
        self.number += 1
        self.cache.append(item)
        return self.data + self.draw["flip"].random()


class Turning:
    """A sampler that is no `Sampler`, and counts its epochs."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(range(4))


def test_a_data_set_and_a_sampler_of_any_class_are_restored_without_a_copy_of_the_data() -> None:
    data, sampler = Counted(), Turning()
    loader: DataLoader[Tensor] = DataLoader(data, 2, sampler=sampler)  # type: ignore[arg-type]
    state = data.draw["flip"].getstate()
    with restored([], [loader], [lambda: data]):
        assert len(list(loader)) == 2
        data.data += 1  # not restored, because it is not copied
        assert (data.number, len(data.cache), sampler.epoch) == (4, 5, 1)
    assert (data.number, data.cache, sampler.epoch) == (0, [0], 0)
    assert data.draw["flip"].getstate() == state
    assert data.data.tolist() == [1, 1, 1]


def change_storage(tensor: Tensor) -> None:
    tensor.data = torch.zeros(3)


def change_values(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.fill_(torch.nan)


def change_gradient(tensor: Tensor) -> None:
    assert tensor.grad is not None
    tensor.grad.zero_()
    tensor.grad = None


@pytest.mark.parametrize("change", [change_storage, change_values, change_gradient])
def test_tensors_are_restored_with_their_storage_and_gradient(
    change: Callable[[Tensor], None],
) -> None:
    weight = nn.Parameter(torch.tensor([0.1, -0.0, torch.inf]))
    alias = weight.data
    weight.grad = gradient = torch.tensor([1.0, 2.0, 3.0])
    snapshot = Snapshot([[weight]])
    change(weight)
    snapshot.restore()
    assert (
        weight.view(torch.int32).tolist()
        == torch.tensor([0.1, -0.0, torch.inf]).view(torch.int32).tolist()
    )
    assert weight.data_ptr() == alias.data_ptr()
    assert weight.grad is gradient
    assert gradient.tolist() == [1, 2, 3]
