"""Updates in graphs of the simulated accelerator: the bits of updates without, in one launch."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import accelerator
import late_group
import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerator import COUNTS
from fake_horovod import FakeHorovod
from on_forked_workers import on_forked_workers
from test_accelerator import (
    DIGITS,
    HALF,
    OVERFLOWS,
    Case,
    lars,
    lars_outside,
    sgd,
    small,
    training,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch import load_recipe, run
from largebatch.accelerator import Graph, is_recording, passes, waits
from largebatch.data.types import Batch
from largebatch.distributed import torch_distributed
from largebatch.distributed.backend import Backend
from largebatch.distributed.horovod import Horovod
from largebatch.distributed.serial import Serial
from largebatch.distributed.torch_distributed import RunningTorch
from largebatch.errors import RecipeError
from largebatch.models import hidden_matrices, param_groups
from largebatch.models.batchnorm import with_span
from largebatch.optim import kernels as lars_kernels
from largebatch.optim.adamw import FusedAdamW, build_adamw
from largebatch.optim.lars import LARS
from largebatch.optim.muon import Muon
from largebatch.optional import require_torchvision
from largebatch.polish import polish
from largebatch.training.averages import EMA
from largebatch.training.evaluation import Metrics, evaluate
from largebatch.training.graph import UseGraph
from largebatch.training.state import TrainState

TABLED = Case(steps=5)
WHOLE = 0.3
"""Launches of an update that is replayed, as a fraction of those without a graph, at most."""
PART = 0.85
"""The same of an update whose optimizer is replayed, or only its passes."""


def keep(_: TrainState) -> None:
    """Change nothing."""


@dataclass
class Found:
    """The result of some updates."""

    state: dict[str, Tensor]
    momentum: list[Tensor]
    yielded: list[float | None]
    notes: list[str] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)
    waits: int = 0

    def replayed(self) -> str:
        """Return a letter for each update: w replayed as a whole, p in part, - not at all.

        Launches are compared with those of the second update, which has no graph: the first one
        also makes what later ones use again.
        """
        shares = [number / self.launches[1] for number in self.launches]
        return "".join("w" if it <= WHOLE else "p" if it <= PART else "-" for it in shares)


def updates(
    backend: Backend,
    case: Case,
    graph: UseGraph,
    network: nn.Module,
    **settings: Any,  # noqa: ANN401 -- of train()
) -> Found:
    """Train; all that was yielded is read at the end: a later replay changes nothing of it."""
    found = Found({}, [], [])
    change = settings.pop("change", keep)
    settings |= {"graph": graph, "note": found.notes.append}
    if "sizes" in settings:
        settings["batches"] = batches_of(settings.pop("sizes"), backend.device)
    with training(backend, case, network, **settings) as (state, made):
        yielded = []
        state.average = average = EMA(state.model, decay=0.5)
        for step in range(case.steps):
            if step == 4:
                change(state)
            COUNTS.clear()
            update = next(made)
            found.launches.append(COUNTS.totals()["launches"])
            found.waits = COUNTS.totals()["syncs"]
            yielded += [update.loss, update.loss_scale, update.finite, update.skipped]
            yielded.append(update.gradient_norm)
            state.count(update.step, images=1, seconds=0.0)
        found.state = {name: it.cpu() for name, it in state.model.state_dict().items()}
        moments = state.updater.optimizer.state.values()
        found.momentum = [it.cpu() for each in moments for it in each.values()]
        found.momentum += [it.cpu() for it in average.state_dict().values()]
    found.yielded = [it if it is None else it.item() for it in yielded]
    assert not accelerator.MODULE.pools, "a recording goes on"
    return found


def batches_of(sizes: Sequence[tuple[int, int]], device: torch.device) -> Iterator[Batch]:
    """Yield batches with these numbers of images of these sides in pixels, not dense in memory."""
    generator = torch.Generator().manual_seed(0)
    for number, side in sizes:
        images = torch.randn(number, 3, side, 2 * side, generator=generator)
        labels = torch.randint(10, (number,), generator=generator)
        yield Batch(images.to(device)[..., ::2], labels.to(device))


def both(
    case: Case, network: Callable[[], nn.Module], tables: bool, settings: dict[str, Any]
) -> tuple[Found, Found]:
    device = accelerator.simulate()
    if tables:
        accelerator.use_kernels(of_models=False)
    accelerator.use_graphs()
    backend = settings.pop("backend", Serial)
    return without_and_with(backend(device), case, network, **settings)


def without_and_with(
    backend: Backend,
    case: Case,
    network: Callable[[], nn.Module],
    **settings: Any,  # noqa: ANN401 -- of train()
) -> tuple[Found, Found]:
    found = []
    for use in (False, "auto"):
        random.seed(0)
        found.append(updates(backend, case, use, network(), **settings))
    return found[0], found[1]


def assert_same_bits(one: Found, other: Found) -> None:
    for name in ("state", "momentum", "yielded"):
        ours, theirs = getattr(one, name), getattr(other, name)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def compared(
    case: Case,
    network: Callable[[], nn.Module] = small,
    *,
    tables: bool = False,
    **settings: Any,  # noqa: ANN401 -- of train()
) -> Found:
    """Return what updates with a graph did, which have the bits of updates without one."""
    eager, found = on_forked_workers(both, case, network, tables, settings, workers=1)
    assert_same_bits(found, eager)
    assert found.launches[1] == eager.launches[1]
    return found


def dropped() -> nn.Module:
    require_torchvision()
    from timm.layers import DropPath

    return nn.Sequential(nn.Dropout(0.3), DropPath(0.3), small(), nn.Dropout(0.3))


def group_norms() -> nn.Module:
    """Return a network without BatchNorm."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(16, 10))


def frozen_first(network: nn.Module) -> Optimizer:
    """Return LARS that trains all but biases and norms from the fifth update on."""
    optimizer = lars(network)
    optimizer.param_groups[0]["after"] = 4
    return optimizer


def adamw(network: nn.Module) -> Optimizer:
    return build_adamw([{"params": list(network.parameters())}], lr=0.01)


SKIPPED = replace(HALF, init_scale=OVERFLOWS, steps=6, optimizer=adamw)


def plain_sgd(network: nn.Module) -> Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)


def muon(network: nn.Module, adam: bool = False) -> Optimizer:
    """Return Muon of the second convolution; the others have SGD, or AdamW without Triton."""
    matrices = hidden_matrices(network)
    taken = set(matrices)
    rest = nn.ParameterList(it for it in network.parameters() if it not in taken)
    others = adamw(rest) if adam or not lars_kernels.works(matrices[0].device) else sgd(rest)
    return Muon(matrices, others, lr=0.02, weight_decay=0.1, normalize_weights=True)


def horovod(device: torch.device) -> Backend:
    fake = FakeHorovod()
    fake.built_for_gpu = True
    return Horovod(fake, device)


def overflowing(network: nn.Module) -> Optimizer:
    """Return LARS; a gradient is infinite before its weight is trained, and after."""
    optimizer, numbers = lars(network), count()
    optimizer.param_groups[0]["after"] = 2
    weight = optimizer.param_groups[0]["params"][0]
    weight.register_hook(lambda grad: grad / (next(numbers) not in {1, 3}))
    return optimizer


def read_once_and_twice() -> list[Found]:
    device, case = accelerator.simulate(), Case(steps=5, optimizer=overflowing)
    accelerator.use_kernels(of_models=False)
    found = []
    for examine in (LARS.examine, lambda *_: None):
        with mock.patch.object(LARS, "examine", examine):
            found.append(updates(Serial(device), case, False, small(), skip_nonfinite=True))
    return found


def test_norms_tell_whether_all_gradients_are_finite() -> None:
    """From the second update on of the same weights, with the bits of updates that read twice."""
    once, twice = on_forked_workers(read_once_and_twice, workers=1)
    assert_same_bits(once, twice)
    assert once.yielded[3::5] == [0, 1, 0, 1, 0]  # skipped
    has_saved = [few < many for few, many in zip(once.launches, twice.launches, strict=True)]
    assert has_saved[1:] == [False, False, True, True]  # weights are trained from the third on


def norm() -> Tensor:
    """Stand in for a measurement of the caller, which a graph repeats."""
    return torch.ones((), device=accelerator.simulate()) * 2


@pytest.mark.parametrize(
    ("case", "network"),
    [
        pytest.param(TABLED, dropped, id="LARS, dropout"),
        pytest.param(
            replace(TABLED, span=4, accumulation=3, optimizer=sgd), small, id="SGD, accumulated"
        ),
        pytest.param(replace(SKIPPED, optimizer=lars), dropped, id="fp16, skipped"),
        pytest.param(replace(TABLED, accumulation=3, optimizer=muon), small, id="Muon"),
        pytest.param(SKIPPED, dropped, id="AdamW, skipped"),
    ],
)
def test_a_micro_batch_is_one_launch(case: Case, network: Callable[[], nn.Module]) -> None:
    """Besides the copies of its batch, and of the results that are yielded."""
    found = compared(case, network, tables=True)
    assert found.notes == ["an update is one CUDA graph"]
    copies_of_a_batch = len(Batch._fields)
    replay = 1
    yielded = len(found.yielded) // case.steps
    results = sum(number is not None for number in found.yielded[-yielded:])
    at_most = case.accumulation * (copies_of_a_batch + replay) + results
    assert max(found.launches[-2:]) <= at_most
    assert found.waits == 0


@pytest.mark.parametrize("backend", [Serial, horovod])
def test_clipping_waits_for_nothing_and_is_in_the_graph_where_the_sums_are(
    backend: Callable[[torch.device], Backend],
) -> None:
    """Also with a loss scale, an update that is skipped, and the norms of LARS after it.

    Beside sums that are not recorded, it is between the graphs of the passes and the optimizer.
    """
    case = replace(SKIPPED, optimizer=lars)
    found = compared(case, tables=True, clip_norm=0.01, backend=backend)
    assert ("sums of gradients" in found.notes[0]) == (backend is horovod)
    assert "-" not in found.replayed()[2:]
    assert found.waits == 0


def forget_gradients(state: TrainState) -> None:
    state.updater.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        pytest.param(
            Case(span=4, accumulation=2, optimizer=lars_outside, steps=4),
            {},
            id="LARS without tables",
        ),
        pytest.param(
            Case(steps=4), {"measure_norm": norm, "skip_nonfinite": True}, id="a measured norm"
        ),
        pytest.param(replace(SKIPPED, optimizer=muon), {}, id="Muon, skipped"),
        pytest.param(Case(steps=4), {"network": group_norms}, id="no BatchNorm"),
        pytest.param(
            Case(steps=6, optimizer=plain_sgd),
            {"change": forget_gradients},
            id="zero_grad between updates",
        ),
    ],
)
def test_an_optimizer_with_numbers_of_the_host_follows_the_graph(
    case: Case, settings: dict[str, Any]
) -> None:
    found = compared(case, **settings)
    assert len(found.notes) == 1
    assert "graph: optimizer (" in found.notes[0]
    assert found.launches[-1] < found.launches[1]


def clear_momentum(state: TrainState) -> None:
    saved = deepcopy(state.updater.optimizer.state_dict())
    for each in saved["state"].values():
        for moment in each.values():
            moment.zero_()
    state.updater.optimizer.load_state_dict(saved)


def move_weights(state: TrainState) -> None:
    for weight in state.model.parameters():
        weight.data = weight.data.clone()


def add_hook(state: TrainState) -> None:
    """Divide gradients by the number of the update, from this one on."""
    numbers = count(1)

    def divide(*_: object) -> None:
        torch._foreach_div_([it.grad for it in state.model.parameters()], next(numbers))  # type: ignore[misc]  # all have one

    state.updater.optimizer.register_step_pre_hook(divide)


def shorten_muon(state: TrainState) -> None:
    state.updater.optimizer.param_groups[0]["ns_steps"] = 2


def freeze(state: TrainState) -> None:
    next(state.model.parameters()).requires_grad_(False)


def raise_decay(state: TrainState) -> None:
    for group in state.updater.optimizer.param_groups:
        group["weight_decay"] += 0.1


def refused(case: Case, network: Callable[[], nn.Module], change: Callable[..., None]) -> str:
    """Return the error of updates in graphs."""
    device = accelerator.simulate()
    accelerator.use_kernels(of_models=False)
    accelerator.use_graphs()
    with pytest.raises(ValueError, match="graph") as error:
        updates(Serial(device), case, "auto", network(), change=change)
    return str(error.value)


@pytest.mark.parametrize(
    ("optimizer", "change", "name"),
    [
        pytest.param(adamw, raise_decay, "settings", id="another decay of AdamW"),
        pytest.param(partial(muon, adam=True), raise_decay, "settings", id="that beside Muon"),
        pytest.param(muon, shorten_muon, "settings", id="fewer steps of Muon"),
        pytest.param(adamw, add_hook, "settings", id="a hook of the optimizer"),
        pytest.param(lars, clear_momentum, "state", id="a loaded state"),
        pytest.param(adamw, clear_momentum, "state", id="a loaded state of AdamW"),
        pytest.param(muon, move_weights, "weights", id="other memory of weights"),
        pytest.param(plain_sgd, move_weights, "weights", id="the optimizer not in the graph"),
        pytest.param(lars, freeze, "requires_grad", id="a weight that is frozen"),
    ],
)
def test_what_a_graph_does_not_follow_is_refused(
    optimizer: Callable[[nn.Module], Optimizer], change: Callable[[TrainState], None], name: str
) -> None:
    case = Case(steps=8, optimizer=optimizer)
    assert name in on_forked_workers(refused, case, small, change, workers=1)


def test_weights_that_are_trained_later_get_a_graph_of_their_own() -> None:
    found = compared(Case(steps=8, optimizer=frozen_first), tables=True)
    assert found.replayed().replace("p", "w") == "--ww--ww"


@contextmanager
def late_workers(*, recorded: bool = True) -> Iterator[RunningTorch]:
    device = accelerator.simulate()
    accelerator.use_graphs()
    if not recorded:
        torch_distributed._IN_GRAPHS.clear()
    late_group.register()
    dist.init_process_group(late_group.BACKEND)
    try:
        yield RunningTorch(device)
    finally:
        dist.destroy_process_group()


def come_late(_: TrainState) -> None:
    """Begin the last update after the other worker."""
    time.sleep(0.1 * dist.get_rank())


def over_workers(case: Case, recorded: bool) -> tuple[Found, Found]:
    with late_workers(recorded=recorded) as backend:
        return without_and_with(backend, case, small, change=come_late)


OVER_WORKERS = Case(span=4, accumulation=2, steps=5)


@pytest.mark.parametrize(
    ("case", "recorded", "note"),
    [
        (OVER_WORKERS, True, "graph: optimizer ("),
        (OVER_WORKERS, False, "only NCCL's sums"),
        (replace(OVER_WORKERS, optimizer=muon), True, "an update is one CUDA graph"),
    ],
    ids=["sums in the graph", "sums after it", "Muon's sums too"],
)
def test_sums_over_workers_are_in_the_graph_or_follow_it(
    case: Case, recorded: bool, note: str
) -> None:
    eager, found = on_forked_workers(over_workers, case, recorded, workers=2)
    assert_same_bits(found, eager)
    assert len(found.notes) == 1
    assert note in found.notes[0]
    assert found.launches[-1] < found.launches[1]


def without_the_other(graph: UseGraph, late: bool) -> list[int]:
    """Lose the other worker, or wait for it in vain, after some updates; return their launches."""
    launches = []
    with (
        late_workers() as backend,
        training(backend, replace(OVER_WORKERS, optimizer=muon), graph=graph) as (_, made),
    ):
        for _ in range(4):
            COUNTS.clear()
            next(made)
            launches.append(COUNTS.totals()["launches"])
        world, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
        assert isinstance(world, late_group.LateGroup)
        world.inner._set_default_timeout(timedelta(seconds=0.5))
        if not late:
            world.lose()
        elif backend.rank == 1:
            store.wait(["timed out"])
        with pytest.raises(RuntimeError, match="imed out|clos" if late else "NCCL"):
            next(made).loss.item()
        store.set("timed out", "")
    return launches


@pytest.mark.parametrize("late", [False, True], ids=["lost", "late"])
def test_a_lost_or_late_worker_ends_a_replay_as_it_ends_an_update(*, late: bool) -> None:
    eager, found = (
        on_forked_workers(without_the_other, graph, late, workers=2) for graph in (False, "auto")
    )
    assert found[-1] < eager[-1] / 4


SIZES = [(8, 16)] * 3 + [(8, 12)] * 3 + [(8, 16)] + [(4, 16)] * 3 + [(8, 12)]


def test_every_shape_of_a_batch_has_its_own_graph() -> None:
    """Image sizes and batches change in the middle and come again."""
    found = compared(Case(span=4, steps=len(SIZES)), dropped, tables=True, sizes=SIZES)
    # Without a graph too, a batch of one span has fewer launches than the others, of two.
    whole = found.replayed().replace("p", "-")
    assert whole == "--w" + "--w" + "w" + "--w" + "w"


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (Case(steps=4, accumulation=2, optimizer=adamw), [(8, 16), (4, 16)] * 4),
        (Case(steps=5, accumulation=3, span=4), [(8, 16), (4, 16), (8, 16)] * 4 + [(8, 16)] * 3),
    ],
    ids=["last", "in the middle of all updates but one"],
)
def test_a_smaller_micro_batch_runs_without_the_graph_of_the_others(
    case: Case, sizes: list[tuple[int, int]]
) -> None:
    """The next replay changes no loss that was yielded."""
    found = compared(case, sizes=sizes)
    assert found.launches[-1] < found.launches[1]
    assert len(found.notes) == (case.optimizer is lars)


def crowded() -> nn.Module:
    """Return a network on a device of which graphs have taken half."""
    accelerator.MODULE.memory_reserved = lambda _=None: accelerator.MEMORY // 2  # type: ignore[method-assign]
    return small()


def test_graphs_that_leave_too_little_memory_are_dropped_for_another_shape() -> None:
    sizes = [(8, 16)] * 3 + [(8, 12), (8, 16)]
    found = compared(Case(steps=5), crowded, sizes=sizes)
    assert found.launches[2] < found.launches[1] == found.launches[4]


def test_memory_of_graphs_that_are_gone_is_not_used_again() -> None:
    """The only graphs are dropped, because five shapes are too many, before others are recorded."""
    sizes = [(8, 16)] * 3 + [(8, 12), (8, 14), (8, 18)] + [(8, 10)] * 3
    found = compared(Case(steps=len(sizes)), sizes=sizes)
    assert found.launches[-1] == found.launches[2]


def measured(device: torch.device, *, graph: bool) -> tuple[Metrics, dict[str, Tensor], list[int]]:
    """Evaluate and polish a model; return its metrics, its state, and the launches of both."""
    model = with_span(dropped(), 4).to(device)
    batches = list(batches_of([(8, 16)] * 6 + [(5, 16)], device))
    launches = []
    COUNTS.clear()
    metrics = evaluate(model, batches, Serial(device), graph=graph)
    launches.append(COUNTS.totals()["launches"])
    COUNTS.clear()
    polish(model, batches, Serial(device), graph=graph)
    launches.append(COUNTS.totals()["launches"])
    return metrics, {name: it.cpu() for name, it in model.state_dict().items()}, launches


def measured_twice() -> None:
    device = accelerator.simulate()
    accelerator.use_graphs()
    metrics, state, launches = measured(device, graph=True)
    expected, plain, more = measured(device, graph=False)
    assert metrics == expected
    torch.testing.assert_close(state, plain, rtol=0, atol=0)
    assert all(few < many for few, many in zip(launches, more, strict=True))


def test_evaluation_and_polishing_replay_full_batches() -> None:
    on_forked_workers(measured_twice, workers=1)


class Needy(nn.Identity):
    """Multiplies by a factor of PLANTED, which needs the host, and this layer to keep its state."""

    mean: Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.kept, self.generator = name, {"passes": [0]}, random.Random(1)
        self.is_small = False
        self.register_buffer("mean", torch.ones(1))

    def train(self, mode: bool = True) -> "Needy":
        self.kept["passes"] += [0] * (self.name == "train()")
        return super().train(mode)

    def forward(self, images: Tensor) -> Tensor:
        self.is_small = images.shape[-1] < 20
        return images * PLANTED[self.name](self)


def counted(layer: Needy) -> int:
    layer.kept["passes"].append(0)
    return len(layer.kept["passes"])


def rebound(layer: Needy) -> Tensor:
    layer.mean = 0.5 * layer.mean + 1
    return layer.mean


PLANTED: dict[str, Callable[[Needy], Tensor | float]] = {
    "a hook": lambda _: 1.0,
    "item": lambda layer: float(layer.mean.item() > 0),
    "item of small images": lambda layer: float(not layer.is_small or layer.mean.item() > 0),
    "random": lambda _: 1.0 if random.random() < 0.5 else 2.0,
    "a generator": lambda layer: layer.generator.random(),
    "a counter": counted,
    "train()": lambda layer: len(layer.kept["passes"]),
    "a new buffer": rebound,
    "a copy": lambda layer: torch.tensor([2.0], pin_memory=True).to(
        layer.mean.device, non_blocking=True
    ),
}


def planted(name: str) -> nn.Module:
    layer = Needy(name)
    if name == "a hook":
        layer.register_forward_hook(lambda *_: None)
    return nn.Sequential(layer, small())


def elsewhere(network: nn.Module) -> Optimizer:
    """Return AdamW of a network with a counter on the CPU."""
    network.register_buffer("spare", torch.zeros(1, dtype=torch.int64))
    return adamw(network)


def hooked_weight(network: nn.Module) -> Optimizer:
    """Return an optimizer; a hook divides the gradient of a weight by its number."""
    numbers = count(1)
    next(network.parameters()).register_hook(lambda grad: grad / next(numbers))
    return sgd(network)


@pytest.mark.parametrize(
    ("case", "network"),
    [
        *(pytest.param(SKIPPED, partial(planted, name), id=name) for name in PLANTED),
        pytest.param(Case(steps=4, optimizer=hooked_weight), small, id="a hook of a weight"),
        pytest.param(Case(steps=4, optimizer=elsewhere), small, id="several devices"),
    ],
)
def test_of_a_network_that_needs_the_host_a_graph_has_the_optimizer_at_most(
    case: Case, network: Callable[[], nn.Module]
) -> None:
    found = compared(case, network)
    assert (found.launches[-1] == found.launches[1]) == (case.optimizer is not adamw)
    assert len(found.notes) == 1
    assert ("optimizer (" in found.notes[0]) == (case.optimizer is not adamw)
    assert "recording failed" not in found.notes[0]


class Moving(nn.Sequential):
    """Moves its statistics to other memory in a pass, which needs the host."""

    def __init__(self) -> None:
        super().__init__(small())
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += 1
        if self.passes == 5:
            layer = self.get_submodule("0.0.1")
            layer.running_mean = layer.get_buffer("running_mean").clone()
        return super().forward(images)  # type: ignore[no-any-return, no-untyped-call]  # torch's stubs


TWO_SHAPES = [(8, 20)] * 4 + [(8, 16)] * 4 + [(8, 20)] * 2


@pytest.mark.parametrize(
    ("case", "settings", "replayed"),
    [
        pytest.param(
            replace(TABLED, steps=10, optimizer=muon),
            {"network": partial(planted, "item of small images"), "sizes": TWO_SHAPES},
            "--ww--pppp",
            id="Muon with SGD, where the second shape needs the host",
        ),
        pytest.param(
            replace(SKIPPED, span=4, accumulation=2),
            {"backend": horovod, "sizes": [(8, 16), (4, 16)] * 6},
            "--pppp",
            id="Horovod, skipped, a smaller last micro-batch",
        ),
        pytest.param(
            replace(TABLED, steps=8, optimizer=frozen_first),
            {"backend": horovod, "skip_nonfinite": True},
            "--ww--ww",
            id="Horovod, LARS, frozen",
        ),
    ],
)
def test_the_optimizer_has_its_own_graph_where_passes_or_sums_have_none(
    case: Case, settings: dict[str, Any], replayed: str
) -> None:
    found = compared(case, tables=True, **settings)
    assert len(found.notes) == len(set(found.notes))
    assert "optimizer" not in found.notes[-1]
    assert found.replayed() == replayed


def test_a_pass_may_not_move_what_the_optimizers_graph_writes_to() -> None:
    case = replace(TABLED, optimizer=adamw)
    assert "running statistics" in on_forked_workers(refused, case, Moving, keep, workers=1)


class Accompanied(nn.Identity):
    """Another thread draws random numbers during its passes, as a tracker's retries do."""

    def forward(self, images: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as other:
            for draw in (random.random, np.random.rand, partial(torch.rand, 1)):
                other.submit(draw).result()
        return images


def accompanied() -> nn.Module:
    return nn.Sequential(Accompanied(), small())


def test_random_numbers_of_other_threads_do_not_take_the_graph() -> None:
    found = compared(Case(steps=4, optimizer=adamw), accompanied)
    assert found.notes == ["an update is one CUDA graph"]


class WaitsAlone(FusedAdamW):
    """Waits for the device in a graph, which is an error there, on worker 1."""

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 -- as torch's
        found = super().step(closure)
        if is_recording() and dist.get_rank() == 1:
            self.param_groups[0]["params"][0].sum().item()
        return found


def waiting(network: nn.Module) -> Optimizer:
    return WaitsAlone([{"params": list(network.parameters())}], lr=0.01)


def with_one_that_refuses() -> list[tuple[str, Found, Found]]:
    """Train where worker 1 has a hook, waits for the device, or cannot record the optimizer."""

    def unlike(name: str) -> nn.Module:
        other = nn.Sequential(nn.Identity(), small())
        return planted(name) if dist.get_rank() == 1 else other

    results = []
    with late_workers() as backend:
        # The numbers are the same: factors of the planted layers are 1.
        for name in ("a hook", "item"):
            case = Case(steps=4, optimizer=adamw)
            results.append((name, *without_and_with(backend, case, partial(unlike, name))))
        case = Case(steps=6, optimizer=waiting)
        results.append(("recording failed", *without_and_with(backend, case, small)))
        # An evaluation whose recording fails on one worker drops the graphs of all.
        Graph.failures += dist.get_rank()
        before = Graph.failures
        evaluate(small().to(backend.device), batches_of([(8, 16)], backend.device), backend)
        assert Graph.failures == before + (dist.get_rank() == 0)
    return results


def test_all_workers_do_without_what_one_of_them_cannot_record() -> None:
    """NCCL waits for workers without a graph, or with another one, without end."""
    for name, eager, found in on_forked_workers(with_one_that_refuses, workers=2):
        assert_same_bits(found, eager)
        assert len(found.notes) == 1
        assert "(worker 1)" in found.notes[0], name
        part = "optimizer (" if name == "recording failed" else "forward and backward ("
        assert part in found.notes[0]


def watch_threads(device: torch.device | None = None) -> None:
    device = device or accelerator.simulate()
    weight = torch.ones(2, device=device, requires_grad=True)
    with waits(device) as found, ThreadPoolExecutor(1) as other:
        other.submit(weight.sum().item).result()
    assert found == []
    weight.register_hook(lambda grad: grad * grad.sum().item())
    with waits(device) as found:
        weight.sum().backward()
    assert len(found) == 1


def test_only_waits_of_this_thread_and_of_autograd_count() -> None:
    on_forked_workers(watch_threads, workers=1)


DRAWS: dict[str, Callable[[], object]] = {
    "random": random.random,
    "shuffle": lambda: random.shuffle([1, 2, 3]),
    "seed": lambda: random.seed(1),
    "NumPy": lambda: np.random.normal(size=2),
    "NumPy's seed": lambda: np.random.seed(1),
    "torch": lambda: torch.rand(2),
    "dropout": lambda: nn.functional.dropout(torch.ones(2)),
    "torch's seed": lambda: torch.manual_seed(1),
}


def watch_draws() -> None:
    device = accelerator.simulate()
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # NumPy's stubs
    for name, draw in DRAWS.items():
        with passes(device, lambda: None) as found, ThreadPoolExecutor(1) as other:
            other.submit(draw).result()
        assert found == [], name
        with passes(device, lambda: None) as found:
            draw()
        assert len(found) == 1, name
    with passes(device, lambda: None) as found:
        random.setstate(random.getstate())  # as torch's compiler does
    assert found == []
    np.random.seed(3)
    expected = np.random.rand(2)
    np.random.seed(3)
    with passes(device, lambda: None):
        first = np.random.rand()
    assert [first, np.random.rand()] == list(expected)
    assert np.random.get_bit_generator() is generator  # type: ignore[attr-defined]  # as above


def test_draws_of_this_thread_count_and_leave_the_generators_as_they_are() -> None:
    on_forked_workers(watch_draws, workers=1)


class Fails(LARS):
    """Raises an error in a graph, or waits for the device, which is an error there."""

    error: Exception | None = None

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 -- as torch's
        found = super().step(closure)
        if is_recording():
            if self.error is not None:
                raise self.error
            self.param_groups[0]["params"][0].sum().item()
        return found


def failing(network: nn.Module) -> Optimizer:
    optimizer = Fails(param_groups(network, weight_decay=1e-4), lr=0.1)
    optimizer.param_groups[0]["after"] = 9
    return optimizer


FAILS = replace(HALF, steps=6, accumulation=2, optimizer=failing)


def without_memory() -> None:
    """Raise that error, though the graph is invalid by it, with a state that can be saved."""
    device, error = accelerator.simulate(), RuntimeError("the graph is invalid")
    accelerator.use_kernels(of_models=False)
    accelerator.use_graphs()
    error.__context__ = torch.OutOfMemoryError()
    with training(Serial(device), Case(optimizer=failing), graph=True) as (state, made):
        assert next(made).step + next(made).step == 1
        state.updater.optimizer.error = error  # type: ignore[attr-defined]  # see Fails
        with pytest.raises(torch.OutOfMemoryError):
            next(made)
        assert state.updater.reducer.in_passes
        assert not Graph._invalid, "its memory is kept"


def test_without_memory_a_recording_leaves_no_trace() -> None:
    on_forked_workers(without_memory, workers=1)


@pytest.mark.parametrize("backend", [Serial, horovod])
def test_a_recording_that_fails_leaves_no_trace(backend: Callable[..., Backend]) -> None:
    """With a loss scale, weights that are trained later, and dropout; the rest is replayed."""
    found = compared(FAILS, dropped, tables=True, backend=backend)
    assert found.launches[4] == found.launches[1]
    assert found.launches[5] < found.launches[1] / 2
    assert len(found.notes) == 1
    assert "optimizer (recording failed" in found.notes[0]


def required() -> None:
    device = accelerator.simulate()
    with pytest.raises(RecipeError, match="execution.graph"):
        updates(Serial(device), Case(), True, small())
    accelerator.use_graphs()
    with pytest.raises(RecipeError, match="execution.graph"):
        updates(Serial(device), Case(), True, planted("a hook"))


def test_a_graph_that_is_required_and_cannot_be_is_refused(tmp_path: Path) -> None:
    on_forked_workers(required, workers=1)
    recipe = load_recipe(DIGITS, ["execution.graph=true"])
    with pytest.raises(RecipeError, match="execution.graph"):
        run(recipe, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(RecipeError, match="execution.graph: true .* protocol"):
        load_recipe(DIGITS, ["execution.graph=true", "protocol={kind: hardsync, learners: 2}"])


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_graph_cannot_be_both_named_and_forbidden(mode: str) -> None:
    assert load_recipe(DIGITS, [f"execution.compile={mode}"]).execution.graph == "auto"
    with pytest.raises(RecipeError, match="execution"):
        load_recipe(DIGITS, [f"execution.compile={mode}", "execution.graph=false"])
