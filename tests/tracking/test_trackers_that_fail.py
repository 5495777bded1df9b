"""A run continues if a tracker fails."""

import io
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
from largebatch.recipe.keys import Tracking
from largebatch.recipe.recipe import Recipe
from largebatch.tracking.console import Console
from largebatch.tracking.events import (
    Event,
    Note,
    Tracker,
)
from largebatch.tracking.log import JsonLines, record
from largebatch.tracking.scalars import read_id
from largebatch.tracking.wandb import Wandb

ALL: list[Event] = [START, *STEPS, EVALUATION, DECISION, DRIFT, FINISH]


class FakeWandb:
    """`wandb` and the run that its init returns in one; the call `fails` raises ConnectionError.

    It records its calls and can fail in any of them.
    """

    def __init__(self, fails: str = "", *, at_key: str = "") -> None:
        self.fails, self.at_key = fails, at_key
        self.calls: list[str] = []
        self.offline = False
        self.starting_step = 0
        self.settings = SimpleNamespace(sync_dir="run-1")
        self.resumes: list[str | None] = []
        self.modes: list[str | None] = []
        """What each init was given."""

        self.summary = SimpleNamespace(update=self._summary)
        self.Settings = SimpleNamespace

    def _call(self, name: str, keys: object = "") -> None:
        self.calls.append(name)
        if name == self.fails and self.at_key in str(keys):
            raise ConnectionError(f"{name} of the fake\nand more lines")

    def login(self, **_: object) -> bool:
        self._call("login")
        return True

    def init(self, **words: Any) -> "FakeWandb":  # noqa: ANN401 -- whatever init takes
        self._call("init", words["mode"])
        self.modes.append(words["mode"])
        self.resumes.append(words["resume"])
        self.offline = words["mode"] == "offline"
        return self

    def define_metric(self, *_: object, **__: object) -> None:
        self._call("define_metric")

    def log(self, values: dict[str, object], **_: object) -> None:
        self._call("log", list(values))

    def alert(self, *_: object, **__: object) -> None:
        self._call("alert")

    def _summary(self, _: object) -> None:
        self._call("summary")

    def finish(self, **_: object) -> None:
        self._call("finish")


def fake(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails: str, at_key: str = ""
) -> tuple[FakeWandb, list[str], Wandb]:
    """Return a fake wandb, the notes of the tracker on it, and that tracker."""
    there = FakeWandb(fails, at_key=at_key)
    monkeypatch.setattr("largebatch.tracking.wandb.require_wandb", lambda: there)
    notes: list[str] = []
    return there, notes, Wandb(folder, CONFIG, Tracking(), note=notes.append)


@pytest.mark.parametrize(
    ("fails", "at_key", "event"),
    [
        pytest.param("define_metric", "", START, id="start"),
        pytest.param("log", "train/loss", STEPS[0], id="step"),
        pytest.param("log", "val/top1", EVALUATION, id="evaluation"),
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
    assert (note.stage, note.step) == (getattr(event, "stage", "train"), getattr(event, "step", 0))
    assert [each for each in found if not isinstance(each, Note)] == ALL
    assert shown.getvalue().count(f"{note.text}\n") == 1
    assert there.calls[-1] == fails
    assert wandb not in trackers


@pytest.mark.parametrize("requeued", [False, True])
def test_a_run_that_a_scheduler_starts_again_sends_no_alert(
    requeued: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, _, wandb = fake(tmp_path, monkeypatch, "")
    ended = replace(FINISH.summary, status="interrupted", reason="SIGTERM", is_requeued=requeued)
    for event in (START, replace(FINISH, summary=ended)):
        wandb.record(event)
    assert ("alert" in there.calls) == (not requeued)


@pytest.mark.parametrize(("known", "resume"), [(None, None), ("ab12", "allow")])
def test_a_resumed_run_keeps_its_run_in_wandb(
    known: str | None, resume: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the id in its folder; a new run has that of the environment, if there is one."""
    if known is not None:
        (tmp_path / "wandb-id").write_text(known)
    monkeypatch.setenv("WANDB_RUN_ID", "exp.3")
    there, _, wandb = fake(tmp_path, monkeypatch, "")
    wandb.record(START)
    assert there.resumes == [resume]
    assert read_id(tmp_path, "wandb") == (known or "exp.3")


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
    assert [command in note for note in notes] == [False, True]


@pytest.mark.parametrize(("sent", "mode"), [(False, "offline"), (True, None)])
def test_a_run_with_parts_that_are_not_sent_continues_offline(
    sent: bool, mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else W&B would write the earlier parts, which are sent later, over the later ones."""
    part = tmp_path / "wandb" / "offline-run-1-ab" / "run-ab.wandb"
    part.parent.mkdir(parents=True)
    for path in (part, part.with_name("run-ab.wandb.synced"))[: 1 + sent]:
        path.touch()
    monkeypatch.delenv("WANDB_MODE", raising=False)
    there, _, wandb = fake(tmp_path, monkeypatch, "")
    wandb.record(START)
    assert there.modes == [mode]


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
