"""Updates on a simulated accelerator: the numbers of the CPU, and what they ask of the device."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import accelerator
import late_group
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerator import COUNTS
from on_forked_workers import on_forked_workers
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from largebatch import load_recipe
from largebatch.data.types import Batch
from largebatch.distributed.backend import Backend
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.distributed.torch_distributed import RunningTorch
from largebatch.models import build, param_groups
from largebatch.models.batchnorm import Spans, with_span
from largebatch.models.fusion import pair
from largebatch.optim.lars import LARS
from largebatch.optim.sgd import build_sgd
from largebatch.optional import require_schedulefree
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.runs.state import build_step_log
from largebatch.tracking.events import StepEvent
from largebatch.training.averages import EMA, SWA
from largebatch.training.graph import step_for
from largebatch.training.loop import Update, cross_entropy, step_seeds, train
from largebatch.training.session import log_update
from largebatch.training.state import TrainState, Updater

CPU = torch.device("cpu")
DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
SAMPLES = 8


def small() -> nn.Module:
    """Return a network that is quick in fp16 on a CPU too."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(channels, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        for channels in (3, 4)
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2 * SAMPLES, 3, 16, 16, generator=generator)
    return images, torch.randint(10, (2 * SAMPLES,), generator=generator)


def lars(network: nn.Module) -> Optimizer:
    return LARS(param_groups(network, weight_decay=1e-4), lr=0.1)


def lars_outside(network: nn.Module) -> Optimizer:
    return LARS(param_groups(network, weight_decay=1e-4), lr=0.1, convention="outside")


def sgd(network: nn.Module) -> Optimizer:
    """Return the SGD of a run in fp16."""
    groups = [{"params": list(network.parameters()), "weight_decay": 1e-4}]
    return build_sgd(groups, lr=0.1, momentum=0.9, nesterov=True, scaled=True)


OVERFLOWS = 2.0**18
"""A loss scale of which half does not overflow, so that every other update is skipped."""


@dataclass(frozen=True)
class Case:
    """What an update is made with."""

    span: int = SAMPLES
    accumulation: int = 1
    precision: torch.dtype = torch.float32
    optimizer: Callable[[nn.Module], Optimizer] = lars
    init_scale: float = 2.0**10
    steps: int = 3
    kernels: bool = False
    """True to use Triton's kernels on the device, with pairs of layers."""


HALF = Case(precision=torch.float16)


@contextmanager
def training(
    backend: Backend,
    case: Case,
    network: nn.Module | None = None,
    **settings: Any,  # noqa: ANN401 -- of a step
) -> Iterator[tuple[TrainState, Iterator[Update]]]:
    """Provide a state, and the updates that change it."""
    network = with_span((network or small()).to(backend.device), case.span)
    if case.kernels:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs
        pair(network)
    if case.precision is not torch.float32:
        lower = torch.autocast(backend.device.type, case.precision)
        network.forward = lower(network.forward)
    parts = list(zip(*(part.to(backend.device).chunk(2) for part in data()), strict=True))
    own = [Batch(*part) for part in parts[backend.rank :: backend.world_size]]
    batches = settings.pop("batches", None) or itertools.cycle(own)
    scaler = GradScaler(
        backend.device.type,
        enabled=case.precision is torch.float16,
        init_scale=case.init_scale,
        growth_interval=1,
    )
    with Reducer(network.named_parameters(), backend) as reducer:
        updater = Updater(case.optimizer(network), lambda step: 0.1 * 0.8**step, reducer)
        state = TrainState(model=network, updater=updater, scaler=scaler, average=None)
        make_step = step_for(
            settings.pop("graph", False), backend.device, note=settings.pop("note", print)
        )
        step = make_step(
            network,
            updater.optimizer,
            cross_entropy(smoothing=0.0, off_target="all"),
            reducer,
            Spans(network, backend),
            scaler=scaler,
            global_batch=SAMPLES * case.accumulation * backend.world_size,
            follow=state.move_average,
            **settings,
        )
        made = train(
            step,
            batches,
            updater.schedule,
            steps=range(case.steps),
            accumulation=case.accumulation,
            seed=step_seeds(0, 0),
        )
        yield state, made


def updates(
    backend: Backend, case: Case, network: nn.Module | None = None
) -> tuple[nn.Module, list[float], dict[str, int]]:
    """Train; return the model, the losses, and what the last update asked of the device."""
    losses, skipped = [], []
    with training(backend, case, network) as (state, made):
        for _ in range(case.steps):
            COUNTS.clear()
            update = next(made)
            counts = COUNTS.totals()
            losses.append(update.loss)
            skipped.append(update.skipped)
    counts["skipped"] = sum(each is not None and bool(each) for each in skipped)
    return state.model, [loss.item() for loss in losses], counts


def plain_counts(device: torch.device) -> dict[str, int]:
    """Return what an update of a plain loop asks of the device."""
    network = build("resnet18", num_classes=10).to(device).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, foreach=True)
    images, labels = (part[:SAMPLES].to(device) for part in data())
    for _ in range(2):
        COUNTS.clear()
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
    return COUNTS.totals()


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Return the largest difference of any weight or buffer; NaN where one is not a number."""
    states = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return float(
        torch.stack([(a.cpu().double() - b.double()).abs().max() for a, b in states]).max()
    )


def on_both(case: Case) -> dict[str, float]:
    """Return how far apart the CPU and the device are, and the counts of an update."""
    device = accelerator.simulate()  # first, for autograd notes the devices in its first pass
    if case.kernels:
        accelerator.use_kernels()
    expected, losses, cpu = updates(Serial(CPU), case)
    network, ours, counts = updates(Serial(device), case)
    apart = float((torch.tensor(ours) - torch.tensor(losses)).abs().max())
    assert counts["skipped"] == cpu["skipped"]
    return {**counts, "weights": difference(network, expected), "losses": apart}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(), id="one span"),
        pytest.param(Case(span=4), id="two spans"),
        pytest.param(Case(span=4, accumulation=2), id="accumulated"),
        pytest.param(Case(precision=torch.bfloat16), id="bf16"),
        pytest.param(HALF, id="fp16"),
        pytest.param(replace(HALF, optimizer=sgd), id="fp16, SGD"),
        pytest.param(replace(HALF, init_scale=OVERFLOWS), id="skipped"),
        pytest.param(
            replace(HALF, init_scale=OVERFLOWS, optimizer=lars_outside), id="skipped, outside"
        ),
        pytest.param(replace(HALF, init_scale=OVERFLOWS, optimizer=sgd), id="skipped, SGD"),
        pytest.param(Case(span=4, kernels=True, steps=2), id="kernels"),
        pytest.param(replace(HALF, init_scale=OVERFLOWS, kernels=True), id="kernels, skipped"),
        pytest.param(
            replace(HALF, init_scale=OVERFLOWS, kernels=True, optimizer=sgd),
            id="kernels, skipped, SGD",
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_update_has_the_numbers_of_the_cpu(case: Case) -> None:
    """Skipped updates agree too: the first one, and one after the loss scale has grown."""
    if case.kernels:
        pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernels")
    found = on_forked_workers(on_both, case, workers=1)
    tolerance = 1e-3 if case.kernels and case.precision != torch.float32 else 1e-6
    assert found["losses"] < tolerance
    assert found["weights"] < tolerance
    assert found["skipped"] == (2 if case.init_scale == OVERFLOWS else 0)
    assert found["syncs"] == found["pageable"] == 0
    assert found["transfers"] == case.kernels  # rates, from pinned memory; addresses stay


def waiting_sgd(network: nn.Module) -> Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)


def schedule_free(network: nn.Module) -> Optimizer:
    optimizer: Optimizer = require_schedulefree().SGDScheduleFree(network.parameters(), lr=0.1)
    optimizer.train()  # type: ignore[attr-defined]  # schedulefree's have it
    return optimizer


def lamb(network: nn.Module) -> Optimizer:
    from timm.optim.lamb import Lamb

    optimizer: Optimizer = Lamb(network.parameters(), lr=0.1, max_grad_norm=None)
    return optimizer


@pytest.mark.parametrize("optimizer", [waiting_sgd, schedule_free, lamb])
def test_an_optimizer_that_cannot_skip_is_waited_for_once(
    optimizer: Callable[[nn.Module], Optimizer],
) -> None:
    case = replace(HALF, optimizer=optimizer, init_scale=OVERFLOWS, steps=4)
    found = on_forked_workers(on_both, case, workers=1)
    assert (found["syncs"], found["skipped"]) == (1, 2)
    assert found["weights"] < 1e-6


def logged(device: torch.device) -> tuple[list[StepEvent], TrainState]:
    """Log updates of which every other is skipped; return their records, and the state."""
    backend = Serial(device)
    recipe = load_recipe(DIGITS, ["precision=fp16", "monitor=[trust_ratios]"])
    events: list[Any] = []
    with training(backend, replace(HALF, init_scale=OVERFLOWS, steps=6)) as (state, made):
        state.average = EMA(state.model, decay=0.5)
        plan = make_plan(recipe, workers=1)
        log = build_step_log(recipe, plan, backend, state, emit=events.append)
        for update in made:
            log_update("train", update, state, log)
        assert (len(events), state.progress.skipped) == ((6, 3) if device == CPU else (5, 3))
        log.flush()
    return events, state


def late_records() -> None:
    device = accelerator.simulate()
    expected, whole = logged(CPU)
    found, state = logged(device)
    scales = [OVERFLOWS / 2, OVERFLOWS] * 3
    for records in (expected, found):
        assert [record.skipped for record in records] == [True, False] * 3
        assert [record.loss_scale for record in records] == scales
        assert [bool(record.trust_ratios) for record in records] == [False, True] * 3
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-6)
        assert one.trust_ratios == pytest.approx(other.trust_ratios, rel=1e-3)
    assert state.progress.skipped == whole.progress.skipped == 3
    assert state.average is not None
    assert whole.average is not None
    assert state.average.num_models == whole.average.num_models == 3
    state.average.store()
    whole.average.store()
    assert difference(state.model, whole.model) < 1e-6


def test_a_skipped_update_is_learned_one_update_late() -> None:
    """Records, counts and the average are those of a CPU, which learns it at once."""
    on_forked_workers(late_records, workers=1)


def log_counts(case: Case, average: str) -> dict[str, int]:
    """Return what it asks of the device to log an update that an average follows."""
    backend = Serial(accelerator.simulate())
    precision = "fp16" if case is HALF else "fp32"
    recipe = load_recipe(DIGITS, [f"precision={precision}", "monitor=[trust_ratios]"])
    plan = make_plan(recipe, workers=1)
    with training(backend, case) as (state, made):
        state.average = EMA(state.model, decay=0.5)
        if average == "SWA":
            state.average = SWA(state.model, after=range(9))
        log = build_step_log(recipe, plan, backend, state, emit=lambda _: None)
        for update in made:
            COUNTS.clear()
            log_update("train", update, state, log)
        assert state.average.num_models == case.steps
    return COUNTS.totals()


@pytest.mark.parametrize("average", ["EMA", "SWA"])
@pytest.mark.parametrize("case", [Case(), HALF], ids=["fp32", "fp16"])
def test_a_log_with_an_average_waits_for_its_two_reads_alone(case: Case, average: str) -> None:
    found = on_forked_workers(log_counts, case, average, workers=1)
    assert (found["syncs"], found["pageable"]) == (2, 0)
    assert found["transfers"] == 3  # these, and what is asked of all workers


def budgets(kernels: bool) -> dict[str, dict[str, int]]:
    device = accelerator.simulate()
    if kernels:
        accelerator.use_kernels(computes=False)
    networks = {span: build("resnet18", num_classes=10) for span in (8, 4)}
    ours = {
        str(span): updates(Serial(device), Case(span=span, kernels=kernels), network)[2]
        for span, network in networks.items()
    }
    return {"plain": plain_counts(device), **ours}


@pytest.mark.parametrize(
    ("kernels", "budget"),
    [
        (False, {"8": (1.25, 1.6), "4": (2.25, 3.0)}),
        (True, {"8": (1.05, 1.9), "4": (1.05, 1.9)}),
    ],
)
def test_an_update_launches_little_more_than_a_plain_loop(
    kernels: bool, budget: dict[str, tuple[float, float]]
) -> None:
    """LARS and spans of BatchNorm included; the plain loop has SGD and nn.BatchNorm2d."""
    if kernels:
        pytest.importorskip("triton", reason="Triton, whose kernels are counted")
    found = on_forked_workers(budgets, kernels, workers=1)
    plain = found["plain"]
    for span, (launches, operations) in budget.items():
        assert found[span]["launches"] <= launches * plain["launches"]
        assert found[span]["operations"] <= operations * plain["operations"]


def late(work: Callable[[RunningTorch, Case], dict[str, float]], case: Case) -> dict[str, float]:
    """Work on workers whose collectives complete late."""
    device = accelerator.simulate()
    late_group.register()
    dist.init_process_group(late_group.BACKEND)
    try:
        return work(RunningTorch(device), case)
    finally:
        dist.destroy_process_group()


def beside_one_process(backend: RunningTorch, case: Case) -> dict[str, float]:
    """Return how far apart two workers are from one process, and the counts of an update."""
    network, own, counts = updates(backend, case)
    losses = torch.tensor(own).to(backend.device)
    backend.all_reduce(losses).wait()
    expected, whole, _ = updates(Serial(CPU), replace(case, accumulation=2))
    apart = (losses.cpu() - torch.tensor(whole)).abs().max().item()
    return {**counts, "weights": difference(network, expected), "losses": apart}


@pytest.mark.parametrize(
    ("case", "skipped"),
    [
        pytest.param(Case(), 0, id="fp32"),
        pytest.param(replace(HALF, init_scale=2 * OVERFLOWS), 2, id="skipped"),
    ],
)
def test_two_workers_whose_sums_come_late_train_as_one_process(case: Case, skipped: int) -> None:
    """No buffer is touched while it is being summed, and the host waits for nothing."""
    found = on_forked_workers(late, beside_one_process, case, workers=2)
    assert found["skipped"] == skipped
    assert found["losses"] < 1e-6
    assert found["weights"] < 1e-6
    assert found["syncs"] == found["transfers"] == found["pageable"] == 0
