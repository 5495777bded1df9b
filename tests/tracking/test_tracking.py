import io
import json
import math
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from largebatch.errors import CheckpointError
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.runs.folder import check_folder
from largebatch.tracking.console import Console
from largebatch.tracking.events import (
    EVENTS,
    Decision,
    DriftEvent,
    EvaluationEvent,
    Event,
    Finish,
    LayerDrift,
    StageResult,
    Start,
    StepEvent,
    Summary,
)
from largebatch.tracking.log import JsonLines

PLAN = Plan(
    workers=2,
    global_batch=96,
    device_batch=48,
    accumulation=1,
    bn_span=48,
    train_samples=1437,
    val_samples=360,
    steps=2,
    warmup_steps=0,
    clean_steps=0,
    evaluate_after=(),
)
NOW = datetime(2026, 11, 22, 8, tzinfo=UTC)
START = Start(time=NOW, resume_step=0, recipe="digits-96", plan=PLAN)
CONFIG = {"name": "digits-96", "seed": 1}
STEPS = [
    StepEvent(
        stage="train",
        step=step,
        epoch=step / 15,
        loss=2.5 - step,
        lr=0.125,
        step_seconds=0.5,
        images_per_second=192.0,
        data_seconds=0.25,
        reduction_seconds=0.125,
    )
    for step in range(2)
]
EVALUATION = EvaluationEvent(
    stage="clean", step=2, epoch=0.13, top1=0.975, top5=1.0, loss=0.25, samples=360, seconds=0.1
)
DECISION = Decision(stage="clean", step=2, samples=1200, before=0.95, after=0.94, kept=False)
LAYER = LayerDrift(name="bn1", channels=4, mean_shift=0.5, log_variance_ratio=0.25)
DRIFT = DriftEvent(step=2, samples=9, layers=(LAYER,))
STAGE = StageResult(name="train", steps=2, seconds=1.0, top1=0.975, top5=1.0, loss=0.25)
SUMMARY = Summary(
    recipe="digits-96",
    commit=None,
    versions={},
    backend="torch",
    workers=2,
    global_batch=96,
    device_batch=48,
    accumulation=1,
    steps=2,
    skipped_steps=0,
    samples=192,
    seconds=1.25,
    images_per_second=192.0,
    peak_memory_bytes=1,
    top1=0.975,
    top5=1.0,
    loss=0.25,
    stages=(STAGE,),
    status="finished",
)
FINISH = Finish(time=NOW, summary=SUMMARY)


def read(path: Path) -> list[Event]:
    return [EVENTS.validate_json(line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("event", [START, *STEPS, EVALUATION, DECISION, DRIFT, FINISH])
def test_what_is_written_is_what_is_read(event: Event) -> None:
    assert EVENTS.validate_json(EVENTS.dump_json(event)) == event


def test_log_jsonl_holds_every_record_at_once_and_a_resumed_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    first = JsonLines(path, resume=False)
    first.record(START)
    first.record(STEPS[0])
    assert read(path) == [START, STEPS[0]]  # before the file is closed
    first.record(FINISH)
    first.close()
    with path.open("a") as file:
        file.write('{"event": "st')  # killed while writing
    second = JsonLines(path, resume=True)
    again = replace(START, resume_step=1)
    for event in (again, EVALUATION, FINISH):
        second.record(event)
    second.close()
    assert read(path) == [START, STEPS[0], FINISH, again, EVALUATION, FINISH]


def test_a_log_has_one_owner_which_may_be_killed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write = f"""
import sys, pathlib, datetime
from largebatch.tracking.events import Note
from largebatch.tracking.log import JsonLines
log = JsonLines(pathlib.Path({str(path)!r}), resume=False)
log.record(Note(stage="train", step=0, text="a"))
print("owned", flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", write], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "owned\n"
    for resume in (False, True):
        with pytest.raises(CheckpointError, match="is writing"):
            JsonLines(path, resume=resume)
        with pytest.raises(CheckpointError, match="is writing"):
            check_folder(path.parent, resume=resume)  # before what else the folder lacks or holds
    owner.kill()
    owner.communicate()
    with pytest.raises(CheckpointError, match="another run"):
        JsonLines(path, resume=False)
    JsonLines(path, resume=True).close()
    assert len(read(path)) == 1


def test_a_log_that_cannot_grow_is_a_readable_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    full = JsonLines(path, resume=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(CheckpointError, match="log.jsonl"):
            full.record(START)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    full.close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("size", [0, 65_536])
def test_only_the_unfinished_end_of_a_log_is_cut_off(size: int, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for whole in (b"", b'{"a": 1}\n' * 3):
        path.write_bytes(whole + b"x" * size)
        JsonLines(path, resume=True).close()
        assert path.read_bytes() == whole


def test_what_is_no_number_is_null_in_the_log_and_nan_when_it_is_read(tmp_path: Path) -> None:
    """Python reads NaN; other readers of JSON refuse the line."""
    path = tmp_path / "log.jsonl"
    tracker = JsonLines(path, resume=False)
    tracker.record(replace(STEPS[0], loss=math.inf))
    tracker.record(replace(DRIFT, layers=(replace(LAYER, mean_shift=math.nan),)))
    tracker.record(FINISH)
    tracker.close()

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    lines = path.read_text().splitlines()
    step, drift, _ = (json.loads(line, parse_constant=refuse) for line in lines)
    assert step["loss"] is None
    assert drift["layers"][0]["mean_shift"] is None
    first, second, _ = read(path)
    assert isinstance(first, StepEvent)
    assert math.isnan(first.loss)
    assert isinstance(second, DriftEvent)
    assert math.isnan(second.layers[0].mean_shift)


def lines_of(*events: Event) -> list[str]:
    """Return what a console without a terminal prints."""
    stream = io.StringIO()
    console = Console(stream)
    for event in events:
        console.record(event)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(("classes", "shown"), [(None, True), (6, True), (5, False)])
def test_an_evaluation_shows_no_top5_of_few_classes_and_few_digits_of_a_huge_loss(
    classes: int | None, shown: bool
) -> None:
    stream = io.StringIO()
    Console(stream, classes=classes).record(replace(EVALUATION, loss=70119382108.4444))
    assert stream.getvalue().endswith("val loss 7.012e+10\n")
    assert ("top-5" in stream.getvalue()) == shown


@pytest.mark.parametrize(
    ("seconds", "left"),
    [
        pytest.param([1.0, 1.0, 1.0], "0:01:37", id="steady"),
        pytest.param([1.0, 1.0, 31.0], "0:17:47", id="the mean, not the last"),
        pytest.param([math.nan], "unknown", id="not timed"),
    ],
)
def test_the_time_left_is_by_the_mean_of_the_last_updates(
    seconds: list[float], left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that waited for its checkpoint must not move it by its whole length."""
    monkeypatch.setattr("largebatch.tracking.console.LINE_SECONDS", 0.0)
    events = [replace(STEPS[0], step=step, step_seconds=each) for step, each in enumerate(seconds)]
    lines = lines_of(replace(START, plan=replace(PLAN, steps=100)), *events)
    assert left in lines[-1]


def test_training_is_one_bar_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("largebatch.tracking.console.BAR_SECONDS", 0.0)
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    events = [replace(STEPS[0], step=step) for step in range(4)]
    stream = io.StringIO()
    console = Console(stream)
    console.record(replace(START, plan=replace(PLAN, steps=4)))
    for event in events:
        console.record(event)
    console.record(EVALUATION)
    start, training, evaluation = stream.getvalue().removesuffix("\n").split("\n")
    assert "steps" in start
    assert [bar.count("█") for bar in training.split("\r")] == [0, 5, 10, 15, 20]
    assert "top-1" in evaluation


def test_a_run_continues_if_nothing_reads_its_output() -> None:
    """As after `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        console = Console(stream)
        console.record(START)
        console.record(STEPS[0])
