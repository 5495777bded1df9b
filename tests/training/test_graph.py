"""Updates in graphs of the simulated accelerator: the bits of updates without, in one launch."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import accelerator
import late_group
import pytest
import torch
import torch.distributed as dist
from accelerator import COUNTS
from on_forked_workers import on_forked_workers
from test_accelerator import (
    CPU,
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
from largebatch.data.types import Batch
from largebatch.distributed import torch_distributed
from largebatch.distributed.backend import Backend
from largebatch.distributed.serial import Serial
from largebatch.distributed.torch_distributed import RunningTorch
from largebatch.errors import RecipeError
from largebatch.models import hidden_matrices
from largebatch.models.batchnorm import with_span
from largebatch.optim import kernels as lars_kernels
from largebatch.optim.adamw import build_adamw
from largebatch.optim.muon import Muon
from largebatch.polish import polish
from largebatch.training.averages import EMA
from largebatch.training.evaluation import Metrics, evaluate
from largebatch.training.graph import UseGraph, require_graphs

TABLED = Case(steps=5)


@dataclass
class Found:
    """The result of some updates."""

    state: dict[str, Tensor]
    momentum: list[Tensor]
    yielded: list[float | None]
    notes: list[str] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)
    waits: int = 0


def updates(
    backend: Backend,
    case: Case,
    graph: UseGraph,
    network: nn.Module,
    **settings: Any,  # noqa: ANN401 -- of train()
) -> Found:
    """Train; all that was yielded is read at the end: a later replay changes nothing of it."""
    found = Found({}, [], [])
    settings |= {"graph": graph, "note": found.notes.append}
    if "sizes" in settings:
        settings["batches"] = batches_of(settings.pop("sizes"), backend.device)
    with training(backend, case, network, **settings) as (state, made):
        yielded = []
        state.average = average = EMA(state.model, decay=0.5)
        for _ in range(case.steps):
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
    return found


def batches_of(sizes: Sequence[tuple[int, int]], device: torch.device) -> Iterator[Batch]:
    """Yield batches with these numbers of images of these sides in pixels."""
    generator = torch.Generator().manual_seed(0)
    for number, side in sizes:
        images = torch.randn(number, 3, side, side, generator=generator)
        labels = torch.randint(10, (number,), generator=generator)
        yield Batch(images.to(device), labels.to(device))


def both(
    case: Case, network: Callable[[], nn.Module], tables: bool, settings: dict[str, Any]
) -> tuple[Found, Found]:
    device = accelerator.simulate()
    if tables:
        accelerator.use_kernels(of_models=False)
    accelerator.use_graphs()
    found = []
    for use in (False, "auto"):
        random.seed(0)
        found.append(updates(Serial(device), case, use, network(), **settings))
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
    return nn.Sequential(nn.Dropout(0.3), small(), nn.Dropout(0.3))


def frozen_first(network: nn.Module) -> Optimizer:
    """Return LARS that trains all but biases and norms from the fifth update on."""
    optimizer = lars(network)
    optimizer.param_groups[0]["after"] = 4
    return optimizer


def adamw(network: nn.Module) -> Optimizer:
    return build_adamw([{"params": list(network.parameters())}], lr=0.01)


def muon(network: nn.Module) -> Optimizer:
    """Return Muon of the second convolution; the others have SGD, or AdamW without Triton."""
    matrices = hidden_matrices(network)
    taken = set(matrices)
    rest = nn.ParameterList(it for it in network.parameters() if it not in taken)
    others = sgd(rest) if lars_kernels.works(matrices[0].device) else adamw(rest)
    return Muon(matrices, others, lr=0.02, weight_decay=0.1, normalize_weights=True)


def norm() -> Tensor:
    """Stand in for a measurement of the caller, which a graph repeats."""
    return torch.ones((), device=accelerator.simulate()) * 2


@pytest.mark.parametrize(
    ("case", "network", "launches"),
    [
        pytest.param(TABLED, dropped, 5, id="LARS, dropout"),
        pytest.param(
            replace(TABLED, span=4, accumulation=3, optimizer=sgd), small, 11, id="SGD, accumulated"
        ),
        pytest.param(
            replace(HALF, init_scale=OVERFLOWS, steps=6),
            dropped,
            7,
            id="fp16, skipped",
        ),
        pytest.param(replace(TABLED, accumulation=3, optimizer=muon), small, 11, id="Muon"),
        pytest.param(
            replace(HALF, init_scale=OVERFLOWS, steps=6, optimizer=adamw),
            dropped,
            7,
            id="AdamW, skipped",
        ),
    ],
)
def test_an_update_is_one_launch(
    case: Case, network: Callable[[], nn.Module], launches: int
) -> None:
    """Besides the copies of the batch, and of what is yielded."""
    found = compared(case, network, tables=True)
    assert found.notes == ["an update is one CUDA graph"]
    assert found.launches[-2:] == [launches] * 2
    assert found.waits == 0


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
        pytest.param(
            replace(HALF, init_scale=OVERFLOWS, steps=6, optimizer=muon), {}, id="Muon, skipped"
        ),
    ],
)
def test_an_optimizer_with_numbers_of_the_host_follows_the_graph(
    case: Case, settings: dict[str, Any]
) -> None:
    found = compared(case, **settings)
    assert len(found.notes) == 1
    assert "up to the optimizer" in found.notes[0]
    assert found.launches[-1] < found.launches[1]


def test_weights_that_are_trained_later_get_a_graph_of_their_own() -> None:
    found = compared(Case(steps=8, optimizer=frozen_first), tables=True)
    is_replayed = [number < found.launches[1] / 4 for number in found.launches]
    assert is_replayed == [False, False, True, True] * 2


def over_workers(case: Case, recorded: bool) -> tuple[Found, Found]:
    device = accelerator.simulate()
    accelerator.use_graphs()
    if not recorded:
        torch_distributed._IN_GRAPHS.clear()
    late_group.register()
    dist.init_process_group(late_group.BACKEND)
    try:
        backend = RunningTorch(device)
        return updates(backend, case, False, small()), updates(backend, case, "auto", small())
    finally:
        dist.destroy_process_group()


OVER_WORKERS = Case(span=4, accumulation=2, steps=5)


@pytest.mark.parametrize(
    ("case", "recorded", "note"),
    [
        (OVER_WORKERS, True, "up to the optimizer"),
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


SIZES = [(8, 16)] * 4 + [(8, 12)] * 4 + [(8, 16)] * 2 + [(4, 16)] * 4 + [(8, 12)]


def test_every_shape_of_a_batch_has_its_own_graph() -> None:
    """Image sizes and batches change in the middle and come again."""
    found = compared(Case(span=4, steps=len(SIZES)), dropped, tables=True, sizes=SIZES)
    is_replayed = [number < found.launches[1] / 4 for number in found.launches]
    assert is_replayed == [False, False, True, True] * 2 + [True] * 2 + [
        *(False, False, True, True),
        True,
    ]


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


class Reads(nn.Identity):
    """Reads a number of the device in every pass."""

    def forward(self, images: Tensor) -> Tensor:
        return images * float(images.max().item() > 0)


class Draws(nn.Identity):
    """Decides on the host, by a random number."""

    def forward(self, images: Tensor) -> Tensor:
        return images * (1.0 if random.random() < 0.5 else 2.0)


class Counts(nn.Identity):
    """Multiplies by a number that it counts, or draws with a generator of its own."""

    def __init__(self, generator: random.Random | None) -> None:
        super().__init__()
        self.calls, self.generator = 0, generator

    def forward(self, images: Tensor) -> Tensor:
        if self.generator is not None:
            return images * self.generator.random()
        self.calls += 1
        return images * (1 + 0.1 * self.calls)


class Copies(nn.Identity):
    """Copies pinned memory of the host, which a replay would copy again."""

    def forward(self, images: Tensor) -> Tensor:
        factor = torch.tensor([2.0], pin_memory=True)
        return images * factor.to(images.device, non_blocking=True)


def hooked() -> nn.Module:
    network = small()
    next(network.children()).register_forward_hook(lambda *_: None)
    return network


PLANTED: dict[str, Callable[[], nn.Module]] = {
    "item": lambda: nn.Sequential(Reads(), small()),
    "random": lambda: nn.Sequential(Draws(), small()),
    "a counter": lambda: nn.Sequential(Counts(None), small()),
    "a generator": lambda: nn.Sequential(Counts(random.Random(1)), small()),
    "a copy": lambda: nn.Sequential(Copies(), small()),
    "a hook": hooked,
}


def planted(name: str) -> nn.Module:
    return PLANTED[name]()


@pytest.mark.parametrize("reason", PLANTED)
def test_a_network_that_needs_the_host_runs_without_a_graph(reason: str) -> None:
    found = compared(Case(steps=4), partial(planted, reason))
    assert found.launches[-1] == found.launches[1]
    assert len(found.notes) == 1


def required() -> None:
    device = accelerator.simulate()
    with pytest.raises(RecipeError, match="execution.graph"):
        updates(Serial(device), Case(), True, small())
    accelerator.use_graphs()
    with pytest.raises(RecipeError, match="execution.graph"):
        updates(Serial(device), Case(), True, hooked())


def test_a_graph_that_is_required_and_cannot_be_is_refused(tmp_path: Path) -> None:
    on_forked_workers(required, workers=1)
    recipe = load_recipe(DIGITS, ["execution.graph=true"])
    with pytest.raises(RecipeError, match="execution.graph"):
        run(recipe, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for device in (torch.device("cuda"), CPU):
        with pytest.raises(RecipeError, match="execution.graph"):
            require_graphs(True, device, protocol=True)
        require_graphs("auto", device, protocol=True)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_graph_cannot_be_both_named_and_forbidden(mode: str) -> None:
    assert load_recipe(DIGITS, [f"execution.compile={mode}"]).execution.graph == "auto"
    with pytest.raises(RecipeError, match="execution"):
        load_recipe(DIGITS, [f"execution.compile={mode}", "execution.graph=false"])
