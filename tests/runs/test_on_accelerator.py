"""Whole recipes on a simulated accelerator, whose collectives are late: the numbers of the CPU.

Updates are replayed from graphs: Muon's whole, others up to the optimizer (no tables of LARS here).
"""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import accelerator
import late_group
import pytest
import torch
import torch.distributed as dist
from on_forked_workers import on_forked_workers
from short_runs import (
    AFFINE,
    BEFORE,
    CLEAN,
    EMA,
    HALF,
    STATISTICS,
    SWA,
    WHOLE,
    a_recipe,
    apart,
    content,
    distance,
    log,
    with_and_without_graphs,
)
from torch import nn

from largebatch import run
from largebatch.accelerator import CPU
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import running_backend
from largebatch.distributed.serial import Serial
from largebatch.errors import DeviceMemoryError, SmallerBatchError
from largebatch.polish import polish
from largebatch.recipe.recipe import Recipe
from largebatch.runs import fitting
from largebatch.runs.checkpoints import evaluate_checkpoint
from largebatch.runs.interrupts import StopRequests
from largebatch.runs.options import Options
from largebatch.tracking.events import StageName
from largebatch.training import session
from largebatch.training.evaluation import Metrics, evaluate
from largebatch.training.loop import EagerStep, Update

JUDGED = "keep: better, held_out: 200"
FEW = ("duration={steps: 6}", "schedule.warmup={steps: 1}")
CHANNELS_LAST = "execution.memory_format=channels_last"
"""The accelerator's default, of which the kernels of a CPU add in another order."""

SAME = 1e-5
"""Tolerance relative to the largest number in a tensor: roundings of float32 after some updates, in
small variances and in deviations of confidences; a tenth of it for a loss."""

ROUNDED = {"ghost spans and measurements": 1e-3, "fp16": 1e-6}
"""Where a difference of nearly equal numbers is measured; and in 16 bits, where a different
rounding would be 1e-3, but a processor may add a bias's gradient in float32 in another order."""

REPEATED = {"SWA, outside", "statistics, scaled-momentum, decoding", "LAMB, mixed images", "fp16"}
"""Other averages, conventions, types and caches than the other cases have: long tests."""

EXACT = {"bf16, accumulated"}
"""Recipes whose kernels are all the same. Without dropout, for which accelerators have a kernel of
their own."""


def an_optimizer(words: str) -> tuple[str, ...]:
    return (*FEW, f"optimizer={{{words}}}", "schedule.peak_lr=0.01")


SGD = an_optimizer("kind: sgd, momentum: 0.9, nesterov: true")
MICRO = ("execution.device_batch=48",)


def lars(convention: str) -> tuple[str, ...]:
    return (*FEW, f"optimizer.convention={convention}")


CASES = {
    "every stage but averages": ((CLEAN, AFFINE, STATISTICS, JUDGED), ()),
    "the average of an EMA, fujitsu, a cache on the device": (
        (EMA, STATISTICS),
        (*lars("fujitsu"), "execution.cache=device"),
    ),
    "SWA, outside": ((SWA, STATISTICS), ("optimizer.convention=outside",)),
    "statistics, scaled-momentum, decoding": (
        (STATISTICS,),
        (*lars("scaled-momentum"), "execution.cache=none"),
    ),
    "bf16, accumulated": (
        (CLEAN,),
        (*SGD, "precision=bf16", *MICRO, "data.image_size=32", "model.arguments.drop_rate=0"),
    ),
    "fp16": ((CLEAN,), (*SGD, *HALF, "model.arguments.drop_rate=0")),
    "ghost spans and measurements": (
        (STATISTICS,),
        (
            *FEW,
            "batch.bn_span=24",
            *MICRO,
            "monitor=[noise_scale, gradient_norm, trust_ratios, generalization_gap, system]",
        ),
    ),
    "LAMB, mixed images": (
        (STATISTICS,),
        (*an_optimizer("kind: lamb"), "data.mix={mixup: 0.4, cutmix: 1, until: {steps: 3}}"),
    ),
    "Muon": ((STATISTICS,), an_optimizer("kind: muon")),
    "Schedule-Free": (
        (STATISTICS,),
        (
            *an_optimizer("kind: schedule-free, statistics_samples: 96"),
            "schedule.decay={kind: constant}",
        ),
    ),
}


def on_cpu(recipe: Recipe, folder: Path) -> None:
    """Train on the CPU of a worker, which the accelerator of another test does not reach."""
    run(recipe, out=folder)


def on_accelerator(recipe: Recipe, folder: Path) -> dict[str, dict[str, int]]:
    """Train there; return the lines at which the host waited."""
    accelerator.simulate()
    accelerator.use_graphs()
    late_group.register()
    run(recipe, out=folder)
    waits = accelerator.COUNTS.syncs, accelerator.COUNTS.pageable
    return {
        name: {line: number for line, number in counter.items() if number}
        for name, counter in zip(("syncs", "pageable"), waits, strict=True)
    }


@pytest.mark.parametrize(
    "case", [pytest.param(it, marks=[pytest.mark.long] * (it in REPEATED)) for it in CASES]
)
def test_a_recipe_has_the_numbers_of_the_cpu(case: str, tmp_path: Path) -> None:
    stages, changes = CASES[case]
    recipe = a_recipe(*stages, changes=(CHANNELS_LAST, *changes))
    on_forked_workers(on_cpu, recipe, tmp_path / "cpu", workers=1)
    on_forked_workers(on_accelerator, recipe, tmp_path / "device", workers=1)
    most = 0.0 if case in EXACT else ROUNDED.get(case, SAME)
    assert apart(tmp_path / "cpu", tmp_path / "device", most) == {}


def in_little_memory(recipe: Recipe, folder: Path, stop: int | None) -> int:
    """Train until a stop, and go on with more memory; return how often memory was measured."""
    accelerator.simulate()
    accelerator.use_graphs()
    accelerator.ALLOCATED.limit = 8_000_000
    with mock.patch.object(fitting, "measure", wraps=fitting.measure) as measured:
        run(recipe, out=folder, max_steps=stop)
        if stop is not None:
            accelerator.ALLOCATED.limit = accelerator.MEMORY
            run(recipe, out=folder, resume=True)
    return measured.call_count


@pytest.mark.long
def test_a_resumed_run_keeps_its_device_batch_and_ends_with_identical_bits(tmp_path: Path) -> None:
    """Stopped in the middle of the affine stage."""
    recipe = a_recipe(CLEAN, AFFINE, STATISTICS, EMA, changes=("execution.cache=none",))
    for name, stop in (("whole", None), ("parts", BEFORE + 2)):
        found = on_forked_workers(in_little_memory, recipe, tmp_path / name, stop, workers=1)
        assert found == 1
    assert apart(tmp_path / "whole", tmp_path / "parts", 0.0) == {}
    plans = [start["plan"] for start in log(tmp_path / "parts", "start")]
    assert [plan["device_batch"] for plan in plans] == [48, 48]


def on_simulated(case: str, folder: Path) -> None:
    accelerator.simulate()
    accelerator.use_graphs()
    with_and_without_graphs(case, folder)


@pytest.mark.long
@pytest.mark.parametrize("case", WHOLE)
def test_a_resumed_run_in_graphs_ends_with_the_bits_of_one_without(
    case: str, tmp_path: Path
) -> None:
    on_forked_workers(on_simulated, case, tmp_path, workers=1)
    assert apart(tmp_path / "eager", tmp_path / "parts", 0.0) == {}
    texts = [note["text"] for note in log(tmp_path / "parts", "note")]
    replayed = [text for text in texts if "graph" in text]
    assert len(replayed) == len(set(replayed)) > 0


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            ("batch.bn_span=24", "monitor=[noise_scale]"),
            id="spans of their own",
            marks=pytest.mark.long,
        ),
        pytest.param(("batch.bn_span=96",), id="spans shared by two"),
    ],
)
def test_two_workers_have_the_numbers_of_two_on_cpus(
    changes: tuple[str, ...], tmp_path: Path
) -> None:
    """A collective's result that was read too early would not be among them."""
    recipe = a_recipe(CLEAN, AFFINE, STATISTICS, changes=(*FEW, CHANNELS_LAST, *changes))
    on_forked_workers(on_cpu, recipe, tmp_path / "cpu", workers=2)
    waits = on_forked_workers(on_accelerator, recipe, tmp_path / "device", workers=2)
    assert apart(tmp_path / "cpu", tmp_path / "device", 1e-3) == {}
    assert not any(line.startswith("models/batchnorm_functional") for line in waits["pageable"])


def test_the_host_waits_for_reports_alone(tmp_path: Path) -> None:
    """The host reads an update for its record while the next one runs; else only where it saves."""
    changes = (
        *("execution.compare_every=null", "execution.cache=device"),
        "data.mix={mixup: 0.4, cutmix: 1}",
    )
    recipe = a_recipe(CLEAN, changes=changes)
    waits = on_forked_workers(on_accelerator, recipe, tmp_path / "run", workers=1)
    by_file: Counter[str] = Counter()
    for line, number in waits["syncs"].items():
        by_file[line.partition(":")[0]] += number
    assert by_file["training/step_log.py"] == 2 * BEFORE
    assert by_file["training/evaluation.py"] == 2 * 3  # two evaluations
    assert set(by_file) == {
        "training/step_log.py",
        "training/evaluation.py",
        "training/checkpoint.py",
        "distributed/connection.py",  # before the first update, as the next three
        "data/decoders/pixel_cache.py",
        "data/decoding.py",
        "runs/fitting.py",
    }
    often = {line: number for line, number in waits["pageable"].items() if number >= BEFORE}
    assert list(often) == [next(iter(often))]
    assert next(iter(often)).startswith("models/of_recipe.py")  # the model, once


def until_memory_shrinks(recipe: Recipe, folder: Path) -> str | None:
    """Train on a device that has room for half of a global batch from the fourth update on.

    Return the error that ends the run, if one does.
    """
    accelerator.simulate()
    accelerator.ALLOCATED.limit = accelerator.MEMORY
    real = session.log_update

    def log_update(stage: StageName, update: Update, *parts: Any) -> None:  # noqa: ANN401 -- of any kind
        real(stage, update, *parts)
        if update.step == 3:
            accelerator.ALLOCATED.limit = 6_000_000

    with mock.patch.object(session, "log_update", log_update):
        try:
            run(recipe, out=folder)
        except DeviceMemoryError as error:
            return str(error)
    return None


def test_after_memory_ran_out_a_run_goes_on_with_half_of_its_device_batch(tmp_path: Path) -> None:
    recipe = a_recipe(CLEAN, STATISTICS, EMA, changes=(CHANNELS_LAST, "data.mix={mixup: 0.4}"))
    on_forked_workers(on_cpu, recipe, tmp_path / "cpu", workers=1)
    found = on_forked_workers(until_memory_shrinks, recipe, tmp_path / "device", workers=1)
    assert found is None
    assert apart(tmp_path / "cpu", tmp_path / "device", SAME) == {}
    assert [step["step"] for step in log(tmp_path / "device", "step")] == list(range(BEFORE))
    plans = [start["plan"] for start in log(tmp_path / "device", "start")]
    assert [plan["device_batch"] for plan in plans] == [96, 48]
    ends = [finish["summary"]["status"] for finish in log(tmp_path / "device", "finish")]
    assert ends == ["paused", "finished"]


def test_after_memory_ran_out_in_an_evaluation_a_run_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = a_recipe(CLEAN)
    run(recipe, out=tmp_path / "whole")
    fails = iter([False, True])

    def evaluated(*args: Any, **settings: Any) -> Metrics:  # noqa: ANN401 -- of evaluate()
        if next(fails, False):
            raise torch.OutOfMemoryError
        return evaluate(*args, **settings)

    monkeypatch.setattr("largebatch.training.judging.evaluate", evaluated)
    run(recipe, out=tmp_path / "run")
    starts = log(tmp_path / "run", "start")
    assert [it["resume_step"] for it in starts] == [0, 6]
    assert [it["plan"]["device_batch"] for it in starts] == [96, 48]
    found, whole = (content(tmp_path / name)["model"] for name in ("run", "whole"))
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)
    fails = iter([True])
    with pytest.raises(DeviceMemoryError, match="--device-batch"):
        evaluate_checkpoint(tmp_path / "run", Options())


def test_after_memory_ran_out_in_the_first_update_a_run_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, fails = EagerStep.update_weights, iter([True])

    def update_weights(step: EagerStep) -> None:
        real(step)
        if next(fails, False):
            raise torch.OutOfMemoryError

    monkeypatch.setattr(EagerStep, "update_weights", update_weights)
    run(a_recipe(CLEAN), out=tmp_path / "run")
    assert [step["step"] for step in log(tmp_path / "run", "step")] == list(range(BEFORE))
    (note, *_) = (it["text"] for it in log(tmp_path / "run", "note") if "memory" in it["text"])
    assert "newest checkpoint" not in note


def test_a_run_that_is_asked_to_stop_does_not_start_again_when_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_and_fail(_: EagerStep) -> None:
        StopRequests().add()  # Ctrl-C, in the update that fails
        raise torch.OutOfMemoryError

    monkeypatch.setattr(EagerStep, "update_weights", stop_and_fail)
    with pytest.raises(SmallerBatchError):
        run(a_recipe(CLEAN), out=tmp_path / "run")
    assert len(log(tmp_path / "run", "start")) == 1


def test_a_given_device_batch_that_does_not_fit_is_refused_with_one_that_does(
    tmp_path: Path,
) -> None:
    recipe = a_recipe(CLEAN, changes=("execution.device_batch=96",))
    found = on_forked_workers(until_memory_shrinks, recipe, tmp_path / "run", workers=1)
    assert found is not None
    assert "--device-batch 48" in found


def polished(device: torch.device, backend: Backend | None) -> tuple[nn.Module, float, int]:
    """Polish and evaluate a model in a loop that is not ours; return it, its loss and samples."""
    torch.manual_seed(1)
    features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    model.to(device)
    images = torch.rand(4, 6, 3, 8, 8, generator=torch.Generator().manual_seed(2)) + 2
    labels = torch.arange(24).view(4, 6) % 10
    workers = backend or running_backend(device)
    batches = [
        (x.to(device), y.to(device))
        for x, y in list(zip(images, labels, strict=True))[workers.rank :: workers.world_size]
    ]
    polish(model, batches, backend)
    found = evaluate(model, batches, workers)
    return model, found.loss, found.samples


def in_a_loop_of_theirs() -> tuple[float, float, int]:
    device = accelerator.simulate()
    late_group.register()
    expected, loss, _ = polished(CPU, Serial(CPU))
    dist.init_process_group(late_group.BACKEND)
    try:
        model, own, samples = polished(device, None)
    finally:
        dist.destroy_process_group()
    pairs = zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
    return max(distance(ours.cpu(), theirs) for ours, theirs in pairs), own - loss, samples


def test_a_model_of_another_loop_is_polished_and_evaluated_there() -> None:
    """Two workers with half of the images each have the statistics of one."""
    apart, loss, samples = on_forked_workers(in_a_loop_of_theirs, workers=2)
    assert apart < 1e-6
    assert abs(loss) < 1e-6
    assert samples == 24
