"""fp16: the loss is scaled, and an overflow anywhere makes every worker skip the same step.

The scaler itself is PyTorch's. What is ours is where it stands: after the sum over the workers.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from on_forked_workers import on_forked_workers
from short_runs import HALF, plan_of_a_log
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD

from largebatch import load_recipe, run
from largebatch.data.types import Batch
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import connect
from largebatch.distributed.environment import BackendName
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.errors import DivergedError
from largebatch.models.batchnorm import Spans, with_span
from largebatch.models.of_recipe import build_model
from largebatch.runs.state import build_step_log
from largebatch.tracking.events import Note, StepEvent, System
from largebatch.training.checkpoint import load_checkpoint
from largebatch.training.loop import EagerStep, Stopwatch, Update, train
from largebatch.training.session import log_update
from largebatch.training.state import TrainState
from largebatch.training.step_log import StepLog

CPU = Serial(torch.device("cpu"))
DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
STEPS = 6
SCALE = 2.0**10
FIRST_SCALE = 2.0**17
Poison = Callable[[int, int], float | None]
"""(rank, step) -> what to put into a gradient, if anything."""


def net() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(
        nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)
    )
    return with_span(layers.double(), 4)


def state_of(model: nn.Module, optimizer: SGD) -> dict[str, Any]:
    momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
    tensors = {**model.state_dict(), **{f"momentum {n}": m for n, m in enumerate(momentum)}}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def solve(backend: Backend, poison: Poison, *, scaled: bool = True) -> list[dict[str, Any]]:
    """Train a small net; return after every step the whole state and what the update says."""
    generator = torch.Generator().manual_seed(backend.rank)
    model = net()
    optimizer = SGD(model.parameters(), momentum=0.9)
    step = 0

    def poisoned(gradient: Tensor) -> Tensor | None:
        value = poison(backend.rank, step)
        return None if value is None else torch.full_like(gradient, value)

    model.get_parameter("0.weight").register_hook(poisoned)

    def batches() -> Iterator[Batch]:
        for _ in range(STEPS):
            images = torch.randn(4, 5, dtype=torch.float64, generator=generator)
            yield Batch(images, torch.randint(3, (4,), generator=generator))

    seen = []
    with Reducer(model.named_parameters(), backend) as reducer:
        scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=3, enabled=scaled)
        update_step = EagerStep(
            model,
            optimizer,
            nn.CrossEntropyLoss(reduction="sum"),
            reducer,
            Spans(model, backend),
            scaler=scaler,
            global_batch=4 * backend.world_size,
        )
        for update in train(
            update_step,
            batches(),
            lambda step: 0.1 / (step + 1),
            steps=range(STEPS),
            accumulation=1,
            seed=lambda step: step,
        ):
            skipped = update.skipped is not None and bool(update.skipped)
            seen.append({"skipped": skipped, "scale": update.loss_scale.item(),
                         "loss": update.loss.item(), **state_of(model, optimizer)})  # fmt: skip
            step += 1
    return seen


def overflow_on_worker_1_at_step_2(rank: int, step: int) -> float | None:
    return float("inf") if (rank, step) == (1, 2) else None


def solve_on(backend_name: BackendName, folder: Path) -> None:
    backend = connect(backend_name)
    torch.save(solve(backend, overflow_on_worker_1_at_step_2), folder / f"{backend.rank}.pt")
    backend.close()


def test_an_overflow_on_one_worker_makes_all_skip_the_same_step(tmp_path: Path) -> None:
    on_forked_workers(solve_on, "torch", tmp_path, workers=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for seen in (one, two):
        assert [after["skipped"] for after in seen] == [False, False, True, False, False, False]
        assert [after["scale"] / SCALE for after in seen] == [1, 1, 0.5, 0.5, 0.5, 1]
    for ours, theirs in zip(one, two, strict=True):
        tensors = [{k: v for k, v in s.items() if k != "loss"} for s in (ours, theirs)]
        torch.testing.assert_close(*tensors, rtol=0, atol=0)


@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan")])
def test_a_skipped_step_changes_no_weight_momentum_or_statistic(poison: float) -> None:
    seen = solve(CPU, lambda _, step: poison if step == 2 else None)
    kept = [name for name in seen[0] if name not in {"skipped", "scale", "loss"}]
    assert [name for name in kept if not seen[2][name].equal(seen[1][name])] == []
    assert [name for name in kept if seen[3][name].equal(seen[2][name])] == []


def test_scaling_the_loss_changes_no_result() -> None:
    """A power of two is exact, so what was scaled and unscaled is the same number."""
    plain, scaled = solve(CPU, lambda *_: None, scaled=False), solve(CPU, lambda *_: None)
    for one, other in zip(plain, scaled, strict=True):
        assert one.pop("scale") == 1.0
        assert other.pop("scale") >= SCALE
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def fp16(*overrides: str) -> list[str]:
    short = ("duration.epochs=1", "schedule.warmup=null", "polish=null", "evaluation={}")
    return ["precision=fp16", *short, *overrides]


def test_fp16_computes_in_fp16_and_keeps_fp32_weights_gradients_and_statistics() -> None:
    model = build_model(load_recipe(DIGITS, fp16()), CPU.device)
    seen: list[torch.dtype] = []
    model.get_submodule("layer1").register_forward_hook(lambda *args: seen.append(args[2].dtype))
    model(torch.zeros(48, 3, 32, 32)).sum().backward()
    assert seen == [torch.float16]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    kinds = {tensor.dtype for tensor in tensors if tensor is not None}
    assert kinds == {torch.float32, torch.int64}


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with a loss scale at which the first updates overflow."""

    def overflow(device: str, **options: Any) -> GradScaler:  # noqa: ANN401 -- passed on
        return GradScaler(device, **{**options, "init_scale": FIRST_SCALE})

    monkeypatch.setattr("largebatch.runs.state.GradScaler", overflow)


@pytest.mark.usefixtures("overflowing")
def test_a_run_in_fp16_reports_the_updates_it_skipped_and_resumes_with_its_scale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(DIGITS, fp16(*HALF))
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    done = run(recipe, out=whole, max_steps=6)
    lines = map(json.loads, (whole / "log.jsonl").read_text().splitlines())
    steps = [record for record in lines if record["event"] == "step"]
    assert 0 < done.skipped_steps < 6
    assert done.skipped_steps == sum(step["skipped"] for step in steps)
    scales = [FIRST_SCALE, *(step["loss_scale"] for step in steps)]
    halved = [after == before / 2 for before, after in itertools.pairwise(scales)]
    assert halved == [step["skipped"] for step in steps]
    said = capsys.readouterr().out
    assert f"not finite: {done.skipped_steps}" in said
    assert "fp16 on a CPU" in said

    run(recipe, out=parted, max_steps=2)
    resumed = run(recipe, out=parted, max_steps=6, resume=True)
    assert resumed.skipped_steps == done.skipped_steps
    ours, other = (load_checkpoint(max((f / "checkpoints").iterdir())) for f in (parted, whole))
    torch.testing.assert_close(ours.state["model"], other.state["model"], rtol=0, atol=0)
    assert ours.state["scaler"] == other.state["scaler"]
    assert ours.state["scaler"]["scale"] == scales[-1]


def a_log(backend: Backend) -> tuple[StepLog, TrainState, list[StepEvent | System | Note]]:
    """Return a log, the state in which it counts, and where it puts its records."""
    events: list[StepEvent | System | Note] = []
    scaler, updater = GradScaler("cpu"), cast("Any", None)
    state = TrainState(model=nn.Linear(1, 1), updater=updater, scaler=scaler, average=None)
    recipe = load_recipe(DIGITS, ["precision=fp16"])
    log = build_step_log(recipe, plan_of_a_log(), backend, state, emit=events.append)
    return log, state, events


def skipped_update(step: int, *, loss_scale: float) -> Update:
    nan, finite, waited = torch.tensor(float("nan")), torch.tensor(False), Stopwatch(CPU.device)
    scale = torch.tensor(loss_scale)
    return Update(step, 0.1, nan, scale, ~finite, finite, waited, waited, 2 * scale)


def test_gradients_that_overflow_without_scaling_end_the_run() -> None:
    log, state, events = a_log(CPU)
    log_update("train", skipped_update(0, loss_scale=1.0), state, log)
    with pytest.raises(DivergedError, match="step 1 .*fp16"):
        log_update("train", skipped_update(1, loss_scale=0.5), state, log)
    assert (state.progress.skipped, len(events)) == (2, 2)
