"""TensorBoard, MLflow and W&B, each the real library without a network, read back by its own."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from on_forked_workers import SERVER
from short_runs import DIGITS, SMALL, weights
from test_tracking import (
    CONFIG,
    DECISION,
    DRIFT,
    EVALUATION,
    FINISH,
    START,
    STEPS,
    SUMMARY,
)
from wandb_server import Server, serving

from largebatch import load_recipe, run
from largebatch.errors import MissingPackageError
from largebatch.recipe.keys import Tracking
from largebatch.tracking.events import SYSTEM, Event, System
from largebatch.tracking.log import JsonLines, record
from largebatch.tracking.mlflow import MLflow
from largebatch.tracking.scalars import Scalars, read_id
from largebatch.tracking.tensorboard import TensorBoard
from largebatch.tracking.wandb import Wandb

LAYERS = ("layer1.0.conv1.weight", "fc.weight")
BEGUN = replace(START, layers=LAYERS)
MONITORED = [
    replace(step, gradient_norm=3.0 + step.step, trust_ratios=(0.5, 0.25), noise_scale=math.nan)
    for step in STEPS
]
COLUMNS: dict[str, Any] = dict.fromkeys(SYSTEM, (1.0, math.nan))
USED = System(stage="train", step=1, **COLUMNS)
EVENTS_OF_A_RUN: list[Event] = [*MONITORED, USED, EVALUATION, DECISION, DRIFT]
LAST = replace(MONITORED[1], step=2)
PAUSED = replace(SUMMARY, status="paused")


@pytest.fixture(name="uri")
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set up MLflow with its store of plain files, which needs no database."""
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny")
    uri = f"file://{tmp_path}/mlruns"
    for name, value in {
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    }.items():
        monkeypatch.setenv(name, value)
    return uri


@pytest.fixture(name="folder")
def with_results(tmp_path: Path) -> Path:
    """A run folder with a report and checkpoints."""
    folder = tmp_path / "digits-1"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "report.html").write_text("<p>98 %</p>")
    for step in (1, 2):
        (folder / f"checkpoints/step-{step:08}.safetensors").write_bytes(b"w" * step)
    return folder


def follow(
    folder: Path,
    parts: list[list[Event]],
    tracker: Any,  # noqa: ANN401 -- makes any tracker
    *,
    resume: bool = False,
) -> None:
    """Record an interrupted run with a new tracker for each part."""
    for place, events in enumerate(parts):
        new = tracker()
        log = JsonLines(folder / "log.jsonl", resume=resume or place > 0)
        for event in events:
            record([log, new], event)
        log.close()


def in_two_parts() -> list[list[Event]]:
    """Return a part killed after its second update, and one that resumes after the first."""
    first, second = MONITORED
    between = replace(EVALUATION, stage="train", step=1)
    return [
        [BEGUN, first, between, second],
        [replace(BEGUN, resume_step=1), replace(second, lr=9.0), LAST, EVALUATION, FINISH],
    ]


def follow_until_killed(
    folder: Path,
    events: list[Event],
    tracker: Any,  # noqa: ANN401 -- makes any tracker
    *,
    lost: int,
) -> None:
    """Record a part that ends without a finish, whose tracker has not got the last events."""
    new = tracker()
    log = JsonLines(folder / "log.jsonl", resume=(folder / "log.jsonl").exists())
    for event in events[: len(events) - lost]:
        record([log, new], event)
    for event in events[len(events) - lost :]:
        record([log], event)
    log.close()


SIX = [replace(MONITORED[0], step=step, loss=10.0 + step) for step in range(6)]
EVALUATED = [replace(EVALUATION, stage="train", step=step, top1=step / 10) for step in (2, 4, 6)]
KILLED: list[Event] = [BEGUN, *SIX[:2], EVALUATED[0], *SIX[2:4], EVALUATED[1], *SIX[4:]]
"""Six updates with evaluations after the second and the fourth."""


def after_kill(resume_step: int) -> list[Event]:
    """Return the part that resumes after this number of updates, and ends well."""
    made = [event for event in KILLED[1:] if event.step >= resume_step]  # type: ignore[union-attr]
    again = [event for event in made if not (event == EVALUATED[0] and resume_step == 2)]
    last = replace(EVALUATION, stage="ema", step=6)  # in the row of the one after training
    return [replace(BEGUN, resume_step=resume_step), *again, EVALUATED[2], last, FINISH]


@pytest.mark.parametrize(("lost", "resume_step"), [(1, 6), (4, 5), (6, 2), (3, 0)])
def test_after_a_kill_tensorboard_and_mlflow_have_every_number_once(
    lost: int, resume_step: int, folder: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the log has and they lack is written, unless the next part makes it again."""
    from mlflow import MlflowClient

    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("largebatch.tracking.mlflow.FLUSH_SECONDS", -1.0)
    boards, flows = folder / "boards", folder / "flows"
    for place, tracker in (
        (boards, lambda: TensorBoard(boards, CONFIG)),
        (flows, lambda: MLflow(flows, CONFIG, Tracking())),
    ):
        place.mkdir()
        follow_until_killed(place, KILLED, tracker, lost=lost)
        if place == boards:  # killed within an event: one number of it is written
            event = KILLED[len(KILLED) - lost]
            writer = TensorBoard(boards, CONFIG)
            writer._open(BEGUN)
            (name, value), *_ = Scalars().take(event).items()
            writer._write({name: value}, event)  # type: ignore[arg-type]
        follow(place, [after_kill(resume_step)], tracker, resume=True)
    read = EventAccumulator(str(boards / "tensorboard"))
    read.Reload()
    client, identity = MlflowClient(uri), (flows / "mlflow-id").read_text()
    expected = {
        "train/loss": [(event.step, event.loss) for event in SIX],
        "train/lr": [(event.step, event.lr) for event in SIX],
        "val/top1": [(2, 0.2), (4, 0.4), (6, 0.6), (6, EVALUATION.top1)],
    }
    for name, values in expected.items():
        found = sorted((it.step, it.value) for it in read.Scalars(name))
        assert found == [(step, pytest.approx(value)) for step, value in sorted(values)], name
        history = client.get_metric_history(identity, name)
        assert sorted((it.step, it.value) for it in history) == sorted(values), name


def test_the_names_and_numbers_that_all_trackers_get() -> None:
    scalars = Scalars()
    found: dict[str, float] = {}
    for event in (BEGUN, *EVENTS_OF_A_RUN):
        found |= scalars.take(event)
    assert found["train/loss"] == 1.5
    assert (found["train/gradient_norm"], found["val/top1"]) == (4.0, 0.975)
    assert found["trust_ratio/layer1.0.conv1"] == 0.5
    assert found["trust_ratio/fc"] == 0.25
    assert found["system/cpu_percent/worker0"] == 1.0
    assert "system/cpu_percent/worker1" not in found  # not measured
    assert "train/noise_scale" not in found
    assert found["drift/bn1/mean_shift"] == 0.5
    assert (found["held_out/top1"], found["held_out/kept"]) == (0.94, 0.0)
    overflowed = scalars.take(replace(LAST, loss=math.inf))
    assert overflowed["train/loss"] == math.inf


def test_tensorboard_has_every_step_of_a_resumed_run_once(folder: Path) -> None:
    pytest.importorskip(
        "tensorboard", reason="tensorboard is not installed: pip install tensorboard"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

    config = {**CONFIG, "optimizer": {"eta": 0.001}, "polish": None, "sizes": [1, 2]}
    follow(folder, in_two_parts(), lambda: TensorBoard(folder, config))
    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("train/loss")] == [
        (0, 2.5), (1, 1.5), (2, 1.5),
    ]  # fmt: skip
    assert [each.value for each in read.Scalars("trust_ratio/fc")] == [0.25] * 3
    assert [each.step for each in read.Scalars("val/top1")] == [1, 2]
    assert read.Scalars("val/top1")[0].value == pytest.approx(0.975)
    assert [each.value for each in read.Scalars("train/lr")] == [0.125] * 3
    recipe = read.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0]
    assert b'"seed": 1' in recipe
    assert [path.name for path in folder.rglob("tensorboard/*") if path.is_dir()] == []
    content = read.PluginTagToContent("hparams")
    begin = parse_session_start_info_plugin_data(content["_hparams_/session_start_info"])
    assert begin.hparams["optimizer.eta"].number_value == 0.001
    assert set(content) == {"_hparams_/session_start_info", "_hparams_/session_end_info"}


def test_mlflow_has_every_step_of_a_resumed_run_once(
    folder: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setattr("largebatch.tracking.mlflow.FLUSH_SECONDS", -1.0)
    config = {
        **CONFIG,
        "optimizer": {"eta": 0.001, "kind": "lars"},
        "long": "x" * 9000,
        "commit": "f00d+",
    }
    given = Tracking(group="seeds", tags=("z",), notes="of a run")
    follow(folder, in_two_parts(), lambda: MLflow(folder, config, given))
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("largebatch")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    identity = found.info.run_id
    assert (folder / "mlflow-id").read_text() == identity
    assert (found.info.run_name, found.info.status) == ("digits-1", "FINISHED")
    tags = found.data.tags
    assert (tags["group"], tags["z"], tags["mlflow.note.content"]) == ("seeds", "true", "of a run")
    assert (tags["mlflow.source.git.commit"], "mlflow.user" in tags) == ("f00d", True)
    assert found.data.params["optimizer.eta"] == "0.001"
    assert found.data.params["long"].endswith("(9,000 characters)")
    history = client.get_metric_history(identity, "train/loss")
    assert [(each.step, each.value) for each in history] == [(0, 2.5), (1, 1.5), (2, 1.5)]
    rates = client.get_metric_history(identity, "train/lr")
    assert [(each.step, each.value) for each in rates] == [(0, 0.125), (1, 0.125), (2, 0.125)]
    assert [each.step for each in client.get_metric_history(identity, "val/top1")] == [1, 2]
    assert found.data.metrics["val/top1"] == 0.975
    assert found.data.metrics["trust_ratio/layer1.0.conv1"] == 0.5
    artifacts = {each.path: each.file_size for each in client.list_artifacts(identity)}
    assert artifacts == {"report.html": 11}


def sent(note: str) -> Server:
    """Run the command of a note; return what W&B's own upload sent."""
    with serving() as server:
        environment = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": 40 * "a"}
        command = f"{sys.executable} -m {note.partition('send it: ')[2]}"
        subprocess.run(command, shell=True, check=True, env=os.environ | environment)
    return server


@pytest.mark.long
def test_one_printed_command_sends_a_run_that_was_resumed_twice_offline(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real library and its own upload, to a server: each update is one row, sent once."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    monkeypatch.setenv("HOME", str(folder.parent))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_NAME", "mine")
    monkeypatch.setenv("WANDB_TAGS", "x,y")
    wandb.teardown()  # it reads the environment once in a process
    given = Tracking(group="seeds", tags=("z",), notes="of three parts", job_type="train")
    first, second = MONITORED
    best = replace(EVALUATION, stage="train", step=1, top1=0.99)
    diverged = replace(SUMMARY, status="failed", diverged="loss nan")
    parts: list[list[Event]] = [
        [BEGUN, first, replace(USED, step=0), best, second, replace(FINISH, summary=PAUSED)],
        [replace(BEGUN, resume_step=1), replace(second, lr=9.0), LAST,
         replace(FINISH, summary=PAUSED)],
        [replace(BEGUN, resume_step=3), replace(LAST, step=3), replace(EVALUATION, step=4),
         replace(EVALUATION, stage="ema", step=4), replace(DECISION, step=4),
         replace(DRIFT, step=4), replace(FINISH, summary=diverged)],
    ]  # fmt: skip
    config, notes = {**CONFIG, "commit": "f00d+"}, list[str]()
    follow(folder, parts, lambda: Wandb(folder, config, given, note=notes.append))
    (note,) = set(notes)
    server = sent(note)
    rows = [server.rows[line] for line in sorted(server.rows)]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 4]
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row.get("train/loss") for row in rows] == [2.5, 1.5, 1.5, 1.5, None, None]
    assert [row.get("val/top1") for row in rows] == [None, 0.99, None, None, 0.975, 0.975]
    assert [row.get("train/lr") for row in rows] == 4 * [0.125] + [None, None]
    waits = [(row["train/data_seconds"], row["train/reduction_seconds"]) for row in rows[:4]]
    assert waits == 4 * [(0.25, 0.125)]
    assert rows[0]["system/cpu_percent/worker0"] == 1.0
    assert (rows[5]["held_out/top1"], rows[5]["drift/bn1/mean_shift"]) == (0.94, 0.5)
    assert server.summary["val/top1"] == {"max": 0.99, "last": 0.975}
    assert server.summary["stages"]["train"]["top1"] == 0.975
    assert server.alerts == [("ERROR", "Run failed", f"{folder}: loss nan (after 2 updates)")]
    assert server.summary["status"] == "failed"
    assert not {"top1", "global_batch", "commit"} & server.summary.keys()
    shown = {key: server.run[key] for key in ("displayName", "groupName", "notes", "commit")}
    assert list(shown.values()) == ["mine", "seeds", "of three parts", "f00d"]
    assert (server.run["tags"], server.run["jobType"]) == (["x", "y"], "train")
    assert (server.run["name"], server.run["artifact"]) == (read_id(folder, "wandb"), "report")
    assert json.loads(server.run["config"])["seed"]["value"] == 1
    assert server.files["report.html"] == (folder / "report.html").read_bytes()


def with_wandb(folder: Path, notes: list[str] | None = None) -> Wandb:
    note = print if notes is None else notes.append
    return Wandb(folder, CONFIG, Tracking(), note=note)


def be_killed(folder: Path) -> None:
    """Record a part in a process that is killed in its middle, as kill -9 does."""
    log = folder / "log.jsonl"
    events = KILLED if not log.exists() else [replace(BEGUN, resume_step=2), *KILLED[3:]]
    follow_until_killed(folder, events, lambda: with_wandb(folder), lost=1)
    os.kill(os.getpid(), signal.SIGKILL)


def resume_after_4(folder: Path) -> None:
    follow(folder, [after_kill(4)], lambda: with_wandb(folder), resume=True)
    os._exit(0)  # W&B's own exit waits for more than the server knows


ROWS = [(0, None), (1, None), (2, 0.2), (3, None), (4, 0.4), (5, None), (6, 0.6), (6, 0.975)]
"""Step and accuracy of each row: an update has the evaluation before it in its row."""


def shown_rows(server: Server) -> list[tuple[int, float | None]]:
    rows = [server.rows[line] for line in sorted(server.rows)]
    assert [row.get("train/loss") for row in rows] == [10.0 + step for step in range(6)] + [
        None
    ] * 2
    return [(row["step"], row.get("val/top1")) for row in rows]


@pytest.mark.long
def test_after_two_kills_wandb_has_every_number_once_offline(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's file of a killed part lacks its end; the real library, with two real kills."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    for _ in range(2):
        process = SERVER.Process(target=be_killed, args=(folder,))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    notes: list[str] = []
    follow(folder, [after_kill(2)], lambda: with_wandb(folder, notes), resume=True)
    (note,) = notes
    assert shown_rows(sent(note)) == ROWS


@pytest.mark.long
@pytest.mark.parametrize("there", [2])
def test_after_a_kill_wandb_has_every_number_once_online(
    there: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has got the first rows of the killed part; it is sent every 15 s."""
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    rows = [{"step": step, "_step": step, "train/loss": 10.0 + step} for step in range(6)]
    for step, top1 in ((2, 0.2), (4, 0.4)):
        rows[step]["val/top1"] = top1
    follow_until_killed(folder, KILLED, lambda: SimpleNamespace(record=lambda _: None), lost=0)
    (folder / "report.html").unlink()  # whose upload asks for more than the server knows
    (folder / "wandb-id").write_text("abc123")
    (folder / "wandb-parts.json").write_text('{"events": 0, "open": "run-1"}')
    with serving() as server:
        server.rows = dict(enumerate(rows[:there]))
        for name, value in {
            "WANDB_BASE_URL": server.url, "WANDB_API_KEY": 40 * "a", "WANDB_MODE": "online",
            "HOME": str(folder.parent),
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        process = SERVER.Process(target=resume_after_4, args=(folder,))
        process.start()
        process.join()
        assert process.exitcode == 0
    assert "disabled" not in (folder / "log.jsonl").read_text()
    assert shown_rows(server) == ROWS


@pytest.mark.long
def test_a_run_of_two_commands_is_sent_with_what_it_printed(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    changes = ("duration={steps: 5}", "schedule.warmup=null", "polish=null", "tracking=[wandb]")
    words = [word for change in changes for word in ("--set", change)]
    start = [sys.executable, "-m", "largebatch", "train", "digits_96", "--out", f"{tmp_path}/run"]
    for more in (["--max-steps", "3"], ["--resume"]):
        environment = {**os.environ, "HOME": str(tmp_path), "WANDB_MODE": "offline"}
        shown = subprocess.check_output([*start, *words, *more], text=True, env=environment)
    (note,) = [line for line in shown.splitlines() if "send it: " in line]
    server = sent(note)
    assert [server.rows[line]["step"] for line in sorted(server.rows)] == [0, 1, 2, 3, 4, 5]
    assert server.summary["final"]["top1"] == server.summary["val/top1"]["last"]
    assert server.files["report.html"] == (tmp_path / "run/report.html").read_bytes()


@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow"])
def test_a_missing_package_is_named_before_the_run(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(MissingPackageError, match=tracker):
        run(load_recipe(DIGITS, [f"tracking=[{tracker}]"]), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_resumed_from_an_older_checkpoint_is_followed_as_one(
    tmp_path: Path, uri: str
) -> None:
    """The whole way, with updates that are made twice; and with the weights of a run alone."""
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes = (
        *("duration={steps: 4}", "schedule.warmup=null", "polish=null", "evaluation={}", *SMALL),
        "execution.checkpoints={every_steps: 1, keep_last: 4}",
    )
    followed = load_recipe(
        DIGITS, [*changes, "tracking=[tensorboard, mlflow]", "monitor=[trust_ratios, system]"]
    )
    out = tmp_path / "run"
    assert run(followed, out=out, max_steps=3).status == "paused"
    max((out / "checkpoints").iterdir()).unlink()
    assert run(followed, out=out, resume=True).status == "finished"
    run(load_recipe(DIGITS, [*changes]), out=tmp_path / "alone")
    torch.testing.assert_close(weights(out), weights(tmp_path / "alone"), rtol=0, atol=0)
    client, identity = MlflowClient(uri), (out / "mlflow-id").read_text()
    read = EventAccumulator(str(out / "tensorboard"))
    read.Reload()
    for name in ("train/loss", "trust_ratio/conv1", "system/memory_bytes/worker0"):
        found = client.get_metric_history(identity, name)
        assert [each.step for each in found] == [0, 1, 2, 3]
        assert [each.step for each in read.Scalars(name)] == [0, 1, 2, 3]
