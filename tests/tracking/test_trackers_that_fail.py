"""A run continues if a tracker fails, and no log holds a secret."""

import io
import os
import re
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_wandb import FakeWandb
from short_runs import DIGITS, log, weights
from test_tracking import (
    CONFIG,
    DECISION,
    DRIFT,
    EVALUATION,
    FINISH,
    START,
    STEPS,
    read,
)

from largebatch import load_recipe, run
from largebatch.errors import TrackerError
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_yaml
from largebatch.tracking.console import Console
from largebatch.tracking.events import (
    Decision,
    Drift,
    Evaluation,
    Event,
    Note,
    Step,
    Tracker,
)
from largebatch.tracking.log import JsonLines, record
from largebatch.tracking.scalars import read_id
from largebatch.tracking.wandb import Wandb

ALL: list[Event] = [START, *STEPS, EVALUATION, DECISION, DRIFT, FINISH]
KEY = "0123456789abcdef" * 2 + "5ec2e700"


def fake(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails: str, at_key: str = ""
) -> tuple[FakeWandb, list[str], Wandb]:
    """Return a fake wandb, the notes of the tracker on it, and that tracker."""
    there = FakeWandb(fails, at_key=at_key)
    monkeypatch.setattr("largebatch.tracking.wandb.require_wandb", lambda: there)
    notes: list[str] = []
    return there, notes, Wandb(folder, CONFIG, note=notes.append)


@pytest.mark.parametrize(
    ("fails", "at_key", "event"),
    [
        pytest.param("login", "", START, id="login"),
        pytest.param("define_metric", "", START, id="start"),
        pytest.param("log", "train/loss", STEPS[0], id="step"),
        pytest.param("log", "val/top1", EVALUATION, id="evaluation"),
        pytest.param("log", "held_out/top1", DECISION, id="decision"),
        pytest.param("log", "drift/", DRIFT, id="drift"),
        pytest.param("summary", "", FINISH, id="summary"),
        pytest.param("finish", "", FINISH, id="finish"),
    ],
)
def test_a_tracker_that_fails_is_left_out_from_then_on(
    fails: str, at_key: str, event: Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it failed it is called no more, and one note stands in the log and on the console."""
    there, _, wandb = fake(tmp_path, monkeypatch, fails, at_key)
    shown = io.StringIO()
    with closing(JsonLines(tmp_path / "log.jsonl", resume=False)) as file:
        trackers: list[Tracker] = [Console(shown), file, wandb]
        for each in ALL:
            record(trackers, each)
    found = read(tmp_path / "log.jsonl")
    (note,) = [each for each in found if isinstance(each, Note)]
    assert note.kind == "tracker"
    assert f"{fails} of the fake" in note.text
    assert (note.stage, note.step) == _place(event)
    assert [each for each in found if not isinstance(each, Note)] == ALL
    assert shown.getvalue().count(f"{note.text}\n") == 1
    assert there.calls[-1] == fails
    assert wandb not in trackers


@pytest.mark.parametrize(
    ("there", "given", "right"),
    [
        (None, "ab12-cd", "ab12-cd"),
        ("its-own", "ab12-cd", "its-own"),
        ("exp.3", None, "exp.3"),
        (None, "../../../etc", None),
        ("a b\n", None, None),
        (None, None, None),
    ],
)
def test_a_run_keeps_its_id_in_wandb_and_no_id_is_a_path(
    there: str | None,
    given: str | None,
    right: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The id is the folder's, else the checkpoint's; a new one where neither has one."""
    monkeypatch.setattr("largebatch.tracking.wandb.require_wandb", FakeWandb)
    if there is not None:
        (tmp_path / "wandb-id").write_text(there)
    Wandb(tmp_path, CONFIG, note=print, identity=given).record(START)
    found = read_id(tmp_path, "wandb")
    assert found is not None
    assert re.fullmatch(r"[0-9a-f]{8}" if right is None else right, found)


@pytest.mark.parametrize(
    ("known", "step", "resume"), [(None, 0, None), ("ab12", 0, "allow"), (None, 3, "allow")]
)
def test_a_run_that_wandb_has_is_not_started_again(
    known: str | None,
    step: int,
    resume: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the earlier part saved nothing, so that the run begins at step 0 again."""
    if known is not None:
        (tmp_path / "wandb-id").write_text(known)
    there, _, wandb = fake(tmp_path, monkeypatch, "")
    wandb.record(replace(START, resume_step=step))
    assert there.resumes == [resume]


def test_an_id_of_the_environment_is_kept_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id that is not read back would make every part of a run a run of its own."""
    for chosen in ("a/b", "a b", ".a", "a" * 65):
        monkeypatch.setenv("WANDB_RUN_ID", chosen)
        with pytest.raises(TrackerError, match=r"WANDB_RUN_ID is '.*'.*; expected at most 64 le"):
            fake(tmp_path, monkeypatch, "")
    monkeypatch.setenv("WANDB_RUN_ID", "exp.3")
    _, _, wandb = fake(tmp_path, monkeypatch, "")
    wandb.record(START)
    assert read_id(tmp_path, "wandb") == "exp.3"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WANDB_MODE", "garbage"),
        ("WANDB_PROJECT", "a/b"),
        ("WANDB_BASE_URL", "our server"),
        ("WANDB_API_KEY", f" {KEY}"),
    ],
)
def test_a_bad_value_in_the_environment_is_named_before_the_run(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real library, which names its own field, or says that the server is not reached."""
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    monkeypatch.setenv(name, value)
    with pytest.raises(TrackerError, match=name) as caught:
        Wandb(tmp_path, CONFIG, note=print)
    assert (value in str(caught.value)) == (name != "WANDB_API_KEY")
    assert KEY not in str(caught.value)


def test_the_rows_of_a_run_whose_log_is_lost_begin_above_those_that_wandb_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else W&B would drop all of them."""
    there, _, wandb = fake(tmp_path, monkeypatch, "")
    there.step = 51
    events: list[Event] = [START, *STEPS]
    for event in events:
        wandb.record(event)
    assert there.rows == [52, 53]


def _place(event: Event) -> tuple[str, int]:
    """Return the stage and the step of an event."""
    known = {START.event: ("train", 0), FINISH.event: ("train", 2)}
    if event.event in known:
        return known[event.event]
    assert isinstance(event, Step | Evaluation | Decision | Drift)
    return event.stage, event.step


class Broken:
    """A tracker whose pipe is closed."""

    def record(self, _: Event) -> None:
        raise BrokenPipeError("Broken pipe")


def test_two_trackers_that_fail_at_once_are_both_left_out(tmp_path: Path) -> None:
    with closing(JsonLines(tmp_path / "log.jsonl", resume=False)) as file:
        trackers: list[Tracker] = [Broken(), file, Broken()]
        for each in (STEPS[0], FINISH):
            record(trackers, each)
    assert [each.event for each in read(tmp_path / "log.jsonl")] == ["note"] * 2 + [
        "step",
        "finish",
    ]
    assert len(trackers) == 1


def test_a_server_that_is_not_reached_leaves_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, notes, wandb = fake(tmp_path, monkeypatch, "init", "None")
    wandb.record(START)
    wandb.record(STEPS[0])
    command = f"wandb sync {tmp_path}/wandb/offline-run-*"
    assert there.calls[:3] == ["login", "init", "init"]
    assert there.calls[-1] == "log"
    wandb.record(FINISH)
    assert [note.endswith(command) for note in notes] == [True, True]


def a_recipe(*changes: str) -> Recipe:
    """Return the digits' recipe with a short schedule and every kind of event but decisions."""
    short = ("duration={steps: 3}", "schedule.warmup=null", "polish={clean: {steps: 1}}")
    return load_recipe(DIGITS, [*short, "evaluation={}", "data.image_size=16", *changes])


def test_a_run_whose_tracker_fails_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = FakeWandb("log")
    monkeypatch.setattr("largebatch.tracking.wandb.require_wandb", lambda: there)
    assert run(a_recipe("tracking=[wandb]"), out=tmp_path / "with").status == "finished"
    assert run(a_recipe(), out=tmp_path / "without").status == "finished"
    one, two = weights(tmp_path / "with"), weights(tmp_path / "without")
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert len(log(tmp_path / "with", "step")) == 3
    assert [each["kind"] for each in log(tmp_path / "with", "note")] == ["tracker"]


@pytest.mark.long
def test_a_refused_connection_is_one_line_and_no_file_holds_the_key(tmp_path: Path) -> None:
    """The real library, with a key, and a port where nothing listens; as a command of its own."""
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}
    environment |= {
        "HOME": str(tmp_path / "home"),
        "WANDB_API_KEY": KEY,
        "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
        "WANDB_INIT_TIMEOUT": "2",
    }
    (tmp_path / "recipe.yaml").write_text(dump_yaml(a_recipe("tracking=[wandb]")))
    words = ["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "largebatch", *words],
        env=environment, check=False, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("W&B cannot be reached (") == 1
    assert "Traceback" not in done.stdout + done.stderr
    command = f"wandb sync {tmp_path}/run/wandb/offline-run-*"
    assert [note["text"].endswith(command) for note in log(tmp_path / "run", "note")] == [True] * 2
    assert done.stdout.splitlines()[-2].endswith(f"offline only; to send it: {command}")
    assert list((tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb"))
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"log.jsonl", "summary.json", "report.html"} <= {path.name for path in files}
    holders = [path for path in files if KEY.encode() in path.read_bytes()]
    assert holders == []
    assert KEY not in done.stdout + done.stderr
