"""Updates in graphs of the simulated accelerator: the bits of updates without, in one launch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import accelerator
import torch
from accelerator import COUNTS
from on_forked_workers import on_forked_workers
from test_accelerator import Case, small, training
from torch import Tensor, nn

from largebatch.distributed.serial import Serial
from largebatch.training.graph import UseGraph

TABLED = Case(kernels=True, steps=5)


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
    case: Case, network: Callable[[], nn.Module], settings: dict[str, Any]
) -> tuple[Found, Found]:
    accelerator.simulate()
    if case.kernels:
        accelerator.use_kernels()
    accelerator.use_graphs()
    pair = (updates(case, use, network(), **settings) for use in (False, "auto"))
    return next(pair), next(pair)


def compared(
    case: Case,
    network: Callable[[], nn.Module] = small,
    **settings: Any,  # noqa: ANN401 -- of train()
) -> Found:
    """Return what updates with a graph did, which have the bits of updates without one."""
    eager, found = on_forked_workers(both, case, network, settings, workers=1)
    for name in ("state", "momentum", "yielded"):
        ours, theirs = getattr(found, name), getattr(eager, name)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert found.launches[:2] == eager.launches[:2]
    return found
