"""Staleness studies carried out: against the synchronous core, and gone on with."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from short_staleness import STUDY, write_study

from largebatch import run
from largebatch.cli.main import DONE, USER, main
from largebatch.cli.printing import INTERRUPTED
from largebatch.lab.protocols.gradients import Gradients
from largebatch.lab.studies.staleness import run as carrying
from largebatch.lab.studies.staleness.page import PAGE
from largebatch.lab.studies.staleness.pictures import (
    HISTOGRAMS,
    TRADE_OFF,
    diagonals,
    draw_histograms,
    draw_trade_off,
)
from largebatch.lab.studies.staleness.run import Row
from largebatch.lab.studies.staleness.study import Cell, cells_of, load_study
from largebatch.lab.studies.staleness.trial import train
from largebatch.runs.options import Options


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study that has been carried out."""
    folder = tmp_path_factory.mktemp("study")
    study = write_study(folder)
    assert main(["lab", "study", "staleness", str(study), "--out", str(folder / "out")]) == DONE
    return folder


def read(folder: Path, cell: str, seed: int) -> dict[str, Any]:
    path = folder / "out" / cell / f"seed-{seed}.json"
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def one_cell(folder: Path, *, changes: dict[str, Any] | None = None, **grid: object) -> Cell:
    recipes = json.loads(json.dumps(STUDY["recipes"]))
    for recipe in recipes.values():
        recipe["set"] |= changes or {}
    path = write_study(folder, recipes=recipes, grids=[{**STUDY["grids"][0], **grid}])
    (cell,) = cells_of(load_study(str(path)), folder)
    return cell


@pytest.mark.parametrize("recipe", ["polished", pytest.param("plain", marks=pytest.mark.long)])
def test_hardsync_of_simulated_learners_ends_as_the_synchronous_core(
    tmp_path: Path, recipe: str
) -> None:
    """In every stage: 4 learners with 8 images each have the batch of 32 for which the rate is."""
    cell = one_cell(tmp_path, recipes=[recipe], sigma=[0])
    ours = train(cell, seed=3, options=Options(out=tmp_path / "ours"))
    synchronous = cell.recipe.model_copy(update={"protocol": None, "seed": 3})
    core = run(synchronous, out=tmp_path / "core", report=False)
    assert [stage["name"] for stage in ours["stages"]] == [stage.name for stage in core.stages]
    for one, other in zip(ours["stages"], core.stages, strict=True):
        assert one["loss"] == pytest.approx(other.loss, rel=2e-4)
        assert one["top1"] == pytest.approx(other.top1, abs=1 / 300)


def test_a_record_holds_what_was_found_and_how_to_find_it_again(done: Path) -> None:
    stale = read(done, "plain-usual-sigma4-mu8-lambda4-staleness", 2)
    assert stale["updates"] == sum(stale["tau"]) == 6
    assert stale["tau_mean"] == pytest.approx(2.5, abs=0.7)
    assert stale["recipe"]["seed"] == stale["seed"] == 2
    waiting = read(done, "plain-usual-sigma0-mu8-lambda4", 1)
    assert waiting["tau"] == [24]
    assert waiting["simulated_seconds"] > 6 * 0.018


def test_the_table_has_a_row_for_every_cell_and_nothing_is_trained_twice(
    done: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(carrying, "train")
    words = ["lab", "study", "staleness", str(done / "study.yaml"), "--out", str(done / "out")]
    assert main(words) == DONE
    head, *rows, page, trade_off, histograms = capsys.readouterr().out.splitlines()
    written = [str(done / "out" / name) for name in (PAGE, TRADE_OFF, HISTOGRAMS)]
    assert [page.removeprefix("page: "), trade_off, histograms] == written
    assert (done / "out" / HISTOGRAMS).read_bytes().startswith(b"\x89PNG")
    columns = re.split(" {2,}", head)
    first, second = (re.split(" {2,}", row.strip()) for row in rows[:2])
    assert (first[0], first[columns.index("sigma")]) == ("hardsync", "0")
    assert second[columns.index("sigma")] == "4"
    top1 = [read(done, "plain-usual-sigma0-mu8-lambda4", seed)["top1"] for seed in (1, 2)]
    assert first[columns.index("Top-1, %")] == f"{50 * sum(top1):.2f}"


def a_row(folder: Path, mu: int, learners: int, *records: dict[str, Any]) -> Row:
    return Row(one_cell(folder, sigma=[1], mu=[mu], learners=[learners]), records)


def test_the_pictures_show_error_by_time_and_the_share_of_every_staleness(tmp_path: Path) -> None:
    common = {"diverged": None, "tau_mean": 1.0, "updates": 4}
    record = {"top1": 0.75, "tau": [1, 2, 1], "simulated_seconds": 10.0, **common}
    other = {"top1": 0.65, "tau": [1, 2, 0, 1], "simulated_seconds": 30.0, **common}
    rows = [a_row(tmp_path, 8, 4, record, other), a_row(tmp_path, 16, 2, other)]
    figure = Figure()
    draw_trade_off(figure, rows)
    (axes,) = figure.axes
    lines = [np.asarray(line.get_xydata()).tolist() for line in axes.lines]
    assert [pytest.approx([20.0, 0.3])] in lines
    joined = next(line for line in lines if len(line) == 2)  # both have mu x lambda = 32
    assert joined == [pytest.approx([20.0, 0.3]), pytest.approx([30.0, 0.35])]
    figure = Figure()
    draw_histograms(figure, rows)
    bars = [bar.get_height() for bar in figure.axes[0].patches if isinstance(bar, Rectangle)]
    assert bars == pytest.approx([2 / 8, 4 / 8, 1 / 8, 1 / 8])
    assert (rows[0].late, sum(rows[0].counts)) == (1, 8)


def test_one_learner_that_waits_for_nobody_is_on_the_line_of_every_softsync(tmp_path: Path) -> None:
    grid = {
        "recipes": ["plain"], "times": ["usual"], "sigma": [0, 1, "lambda"], "mu": [8],
        "learners": [4], "modulation": ["n"],
    }  # fmt: skip
    alone = {**grid, "sigma": [0, 1], "mu": [32], "learners": [1]}
    study = load_study(str(write_study(tmp_path, grids=[grid, alone])))
    found = diagonals([Row(cell, ()) for cell in cells_of(study, tmp_path)])
    assert {
        protocol: [(row.cell.mu, row.cell.learners) for row in rows]
        for (protocol, _), rows in found.items()
    } == {
        "hardsync": [(8, 4), (32, 1)],
        "1-softsync, modulation n": [(8, 4), (32, 1)],
        "asynchronous, modulation n": [(8, 4), (32, 1)],
    }
    assert {product for _, product in found} == {32}


def test_what_is_left_is_listed_and_records_of_another_study_are_refused(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(done / "out")
    more = str(write_study(tmp_path, seeds=3))
    assert main(["lab", "study", "staleness", more, "--out", out, "--dry-run"]) == DONE
    *rest, total = capsys.readouterr().out.splitlines()
    assert rest == [
        "plain-usual-sigma0-mu8-lambda4 seed 3",
        "plain-usual-sigma4-mu8-lambda4-staleness seed 3",
    ]
    assert total.startswith("2 runs; about 0:00:0")
    assert total.endswith(" of forward, backward and update in 1 process on this machine")
    other = str(write_study(tmp_path, machines={"overhead": 0.02, "sample": 0.001}))
    assert main(["lab", "study", "staleness", other, "--out", out]) == USER
    assert "seed-1.json: was recorded with other settings" in capsys.readouterr().err


def test_a_run_at_too_high_a_rate_is_recorded_as_diverged_at_chance(tmp_path: Path) -> None:
    changes = {"schedule.peak_lr": 1e6}
    cell = one_cell(tmp_path, changes=changes, sigma=["lambda"], modulation=["none"])
    found = train(cell, seed=1, options=Options(out=tmp_path))
    assert found["diverged"] is not None
    assert found["top1"] == 0.1
    assert found["tau_mean"] > 0


def test_a_study_that_is_asked_to_stop_leaves_no_record_and_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if the signal came while the first gradient is computed."""
    compute = Gradients.of

    def signalled(self: Gradients, mini_batch: int) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return compute(self, mini_batch)

    monkeypatch.setattr(Gradients, "of", signalled)
    grid = {**STUDY["grids"][0], "sigma": ["lambda"]}
    study, out = str(write_study(tmp_path, grids=[grid])), tmp_path / "out"
    assert main(["lab", "study", "staleness", study, "--out", str(out)]) == INTERRUPTED
    assert "0 of 2 runs are done; to resume: the same command" in capsys.readouterr().out
    assert not list(out.rglob("*.json"))


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_processes_side_by_side_end_with_the_command(
    tmp_path: Path, number: signal.Signals
) -> None:
    study, out = str(write_study(tmp_path, seeds=200)), tmp_path / "out"
    words = ["lab", "study", "staleness", study, "--out", str(out), "--processes", "2"]
    command = [sys.executable, "-m", "largebatch", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert "seed 1: top-1" in parent.stdout.readline()
        workers = psutil.Process(parent.pid).children(recursive=True)
        parent.send_signal(number)
        printed = parent.stdout.read()
        assert parent.wait() == (INTERRUPTED if number != signal.SIGKILL else -number)
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    assert ("runs are done; to resume: the same command" in printed) == (number != signal.SIGKILL)
    assert len(list(out.rglob("*.json"))) < 100


@pytest.mark.long
def test_processes_side_by_side_record_the_same_as_one(done: Path, tmp_path: Path) -> None:
    study, out = str(done / "study.yaml"), tmp_path / "out"
    assert main(["lab", "study", "staleness", study, "--out", str(out), "--processes", "2"]) == DONE
    for cell in ("plain-usual-sigma0-mu8-lambda4", "plain-usual-sigma4-mu8-lambda4-staleness"):
        ours, theirs = read(tmp_path, cell, 2), read(done, cell, 2)
        assert ours["tau"] == theirs["tau"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
