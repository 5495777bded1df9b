"""What a report reads from a run folder: every step once, and what is wrong by file and line."""

import json
import math
import re
from pathlib import Path

import fake_runs
import pytest
from fake_runs import FakeRun

from largebatch.errors import CheckpointError
from largebatch.report.run import read_run


def test_a_resumed_run_counts_every_step_once(tmp_path: Path) -> None:
    run = read_run(fake_runs.resumed(tmp_path / "run"))
    assert [step.step for step in run.steps] == list(range(600))
    assert max(step.images_per_second for step in run.steps) < 1000
    assert [(found.step, found.top1) for found in run.evaluations] == [(300, 0.91), (600, 0.95)]


def test_updates_that_a_resumed_run_has_not_made_again_do_not_count(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.train(0, 350)
    run.start(300)
    run.train(300, 310)
    assert len(read_run(run.write(status="interrupted")).steps) == 310


@pytest.mark.parametrize(
    ("resume_step", "kept"),
    [pytest.param(600, True, id="after the end"), pytest.param(525, False, id="from before")],
)
def test_a_resumed_run_forgets_the_drift_it_will_measure_again(
    resume_step: int, kept: bool, tmp_path: Path
) -> None:
    run = FakeRun(tmp_path / "run")
    run.drift(["bn1"])
    run.start(resume_step)
    assert (read_run(run.write()).drift is not None) == kept


GOOD = '{"event": "evaluation", "stage": "train", "step": 1, "epoch": 1, "top1": 0, "top5": 0, '


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        pytest.param("{", "JSON", id="half a line"),
        pytest.param("[]", "", id="a list"),
        pytest.param("{}", "'event' is missing", id="no event"),
        pytest.param(GOOD + '"loss": 0}', "samples: ", id="no samples"),
        pytest.param(GOOD + '"loss": "low", "samples": 1}', "loss: ", id="a word"),
        pytest.param(
            GOOD.replace('"train"', "3") + '"loss": 0, "samples": 1}',
            "stage: ",
            id="a stage without a name",
        ),
    ],
)
def test_a_malformed_line_is_named(line: str, reason: str, tmp_path: Path) -> None:
    log = fake_runs.failed_at_once(tmp_path / "run") / "log.jsonl"
    log.write_text(log.read_text() + line + "\n" + log.read_text())
    with pytest.raises(CheckpointError, match=rf"log\.jsonl:2: .*{re.escape(reason)}"):
        read_run(log.parent)


def test_the_line_a_killed_run_was_writing_is_passed_over(tmp_path: Path) -> None:
    log = fake_runs.killed(tmp_path / "run") / "log.jsonl"
    whole = read_run(log.parent)
    log.write_text(log.read_text() + '{"event": "st')
    assert read_run(log.parent) == whole


@pytest.mark.parametrize("files", [{}, {"log.jsonl": ""}])
def test_a_folder_without_a_run_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=r"log\.jsonl"):
        read_run(tmp_path)


def test_a_broken_summary_is_named(tmp_path: Path) -> None:
    folder = fake_runs.full_run(tmp_path / "run")
    (folder / "summary.json").write_text(json.dumps({"status": "finished"}))
    with pytest.raises(CheckpointError, match=r"summary\.json: .*recipe"):
        read_run(folder)


def test_what_is_null_in_the_log_is_nan_in_the_report(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = FakeRun(folder)
    run.train(0, 2)
    run.records[-1] |= {"loss": None, "skipped": True}
    run.evaluate("train", 2, 0.5)
    run.records[-1]["loss"] = None
    run.drift(["bn1"])
    run.records[-1]["layers"][0]["log_variance_ratio"] = None
    run.write()
    read = read_run(folder)
    assert [math.isnan(step.loss) for step in read.steps] == [False, True]
    assert [step.skipped for step in read.steps] == [False, True]
    assert math.isnan(read.evaluations[0].loss)
    assert read.drift is not None
    assert math.isnan(read.drift.layers[0].log_variance_ratio)
