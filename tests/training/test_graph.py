"""Updates in graphs of the simulated accelerator: the bits of updates without, in one launch."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import accelerator
import pytest
import torch
from accelerator import COUNTS
from on_forked_workers import on_forked_workers
from test_accelerator import HALF, OVERFLOWS, Case, lars_outside, sgd, small, training
from torch import Tensor, nn

from largebatch.distributed.serial import Serial
from largebatch.errors import RecipeError
from largebatch.training.graph import UseGraph

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


def updates(case: Case, graph: UseGraph, network: nn.Module, **settings: Any) -> Found:  # noqa: ANN401 -- of train()
    """Train; all that was yielded is read at the end: a later replay changes nothing of it."""
    found = Found({}, [], [])
    settings |= {"graph": graph, "note": found.notes.append}
    with training(Serial(accelerator.simulate()), case, network, **settings) as (state, made):
        yielded = []
        for _ in range(case.steps):
            COUNTS.clear()
            update = next(made)
            found.launches.append(COUNTS.totals()["launches"])
            found.waits = COUNTS.totals()["syncs"]
            yielded += [update.loss, update.loss_scale, update.finite, update.skipped]
            yielded.append(update.gradient_norm)
        found.state = {name: it.cpu() for name, it in state.model.state_dict().items()}
        moments = state.updater.optimizer.state.values()
        found.momentum = [it.cpu() for each in moments for it in each.values()]
    found.yielded = [it if it is None else it.item() for it in yielded]
    return found


def both(
    case: Case, network: Callable[[], nn.Module], tables: bool, settings: dict[str, Any]
) -> tuple[Found, Found]:
    accelerator.simulate()
    if tables:
        accelerator.use_kernels(of_models=False)
    accelerator.use_graphs()
    found = []
    for use in (False, "auto"):
        random.seed(0)
        found.append(updates(case, use, network(), **settings))
    return found[0], found[1]


def compared(
    case: Case,
    network: Callable[[], nn.Module] = small,
    *,
    tables: bool = False,
    **settings: Any,  # noqa: ANN401 -- of train()
) -> Found:
    """Return what updates with a graph did, which have the bits of updates without one."""
    eager, found = on_forked_workers(both, case, network, tables, settings, workers=1)
    for name in ("state", "momentum", "yielded"):
        ours, theirs = getattr(found, name), getattr(eager, name)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert found.launches[1] == eager.launches[1]
    return found


def dropped() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.3), small(), nn.Dropout(0.3))


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
    ],
)
def test_an_optimizer_with_numbers_of_the_host_follows_the_graph(
    case: Case, settings: dict[str, Any]
) -> None:
    found = compared(case, **settings)
    assert len(found.notes) == 1
    assert "up to the optimizer" in found.notes[0]
    assert found.launches[-1] < found.launches[1]


class Reads(nn.Identity):
    """Reads a number of the device in every pass."""

    def forward(self, images: Tensor) -> Tensor:
        return images * float(images.max().item() > 0)


class Draws(nn.Identity):
    """Decides on the host, by a random number."""

    def forward(self, images: Tensor) -> Tensor:
        return images * (1.0 if random.random() < 0.5 else 2.0)


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
    accelerator.simulate()
    with pytest.raises(RecipeError, match="execution.graph"):
        updates(Case(), True, small())
    accelerator.use_graphs()
    with pytest.raises(RecipeError, match="execution.graph"):
        updates(Case(), True, hooked())


def test_a_graph_that_is_required_and_cannot_be_is_refused() -> None:
    on_forked_workers(required, workers=1)
