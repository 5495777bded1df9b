"""The command `noise`, and what a monitored run leaves: its record, its report, its weights."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from short_runs import HALF, a_recipe, log, weights

from largebatch import run
from largebatch.cli.main import DONE, USER, main
from largebatch.errors import LargebatchError
from largebatch.lab.measure import critical_batch, lr_range
from largebatch.lab.measure.critical_batch import Critical, Trial, measure_critical
from largebatch.report import write_report
from largebatch.report.noise import LEAST, PARTS, course, describe_noise
from largebatch.report.page import make_page
from largebatch.report.run import read_run
from largebatch.runs.options import Options
from largebatch.tracking.noise_scale import Squares, estimate

LENET = ("model={name: lenet5}", "batch={global_batch: 96, bn_span: null}", "polish=null")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A monitored run of sixty updates."""
    out = tmp_path_factory.mktemp("noise") / "run"
    changes = (*LENET, "monitor=noise_scale", "duration={steps: 60}", "schedule.peak_lr=0.05",
               "optimizer={kind: sgd}")  # fmt: skip
    run(a_recipe(changes=changes), out=out)
    return out


def test_a_monitored_run_has_the_weights_of_one_that_is_not(tmp_path: Path) -> None:
    found = []
    for name, monitor in (("with", "[noise_scale]"), ("without", "[]")):
        recipe = a_recipe("ema: 0.5", changes=(f"monitor={monitor}", "execution.device_batch=48"))
        run(recipe, out=tmp_path / name)
        found.append((weights(tmp_path / name), log(tmp_path / name, "step")))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    assert [step["loss"] for step in found[0][1]] == [step["loss"] for step in found[1][1]]
    assert all(step["global_square"] is None for step in found[1][1])
    assert all(step["device_square"] > 0 for step in found[0][1])


def test_the_records_hold_what_the_estimate_needs(folder: Path) -> None:
    steps = log(folder, "step")
    squares = [Squares(s["device_square"], s["global_square"], 48, 96) for s in steps]
    assert steps[0]["noise_scale"] is None
    assert steps[40]["noise_scale"] == pytest.approx(estimate(squares[:41]).value)
    record = read_run(folder)
    parts = course(record)
    assert len(parts) == 60 // LEAST <= PARTS
    assert [(part.first, part.last) for part in parts] == [(0, 29), (30, 59)]
    assert parts[1].found == estimate(squares[30:])


def test_the_command_reads_a_run_and_draws_no_conclusion_without_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "noise", str(folder)]) == DONE
    assert "report:" not in capsys.readouterr().out
    write_report(folder)
    assert main(["lab", "noise", str(folder)]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["0-29", "30-59"]
    assert lines[3] == describe_noise(read_run(folder))
    assert lines[4] == f"report: {folder / 'report.html'}"
    page = (folder / "report.html").read_text()
    assert 'id="noise"' in page
    assert describe_noise(read_run(folder))[:60] in page
    run(a_recipe(changes=(*LENET, "duration={steps: 3}")), out=tmp_path / "other")
    assert 'id="noise"' not in make_page(read_run(tmp_path / "other"))
    assert main(["lab", "noise", str(tmp_path / "other")]) == USER
    assert "holds no noise scale; train with --set monitor=noise_scale" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--max-steps", "8", "--set", "schedule.warmup={steps: 2}"], "--max-steps 8"),
        (["--set", "duration={steps: 8}", "--set", "polish=null",
          "--set", "schedule.warmup={steps: 2}"], "duration has 8 updates"),
        (["--measure", "32,64"], "4 batches"),
        (["--measure", "32,64,97,128", "--set", "batch.bn_span=48"], "--measure 32"),
        (["--measure", "48,96,192,384"], "--measure 48"),
        (["--measure", "32,64,96,128", "--epochs", "0"], "--epochs"),
        (["--measure", "32,64,96,128", "--max-steps", "3"], "--max-steps"),
        (["--measure", "64,abc"], "64,abc"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_one_line(
    words: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "noise", "digits_96", "--out", str(tmp_path / "out"), *words]) == USER
    assert name in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def lawful(
    monkeypatch: pytest.MonkeyPatch, *, least: float, noise: float, best: float = 1.0
) -> list[tuple[int, float]]:
    """Make runs reach any loss after S_min (1 + B_noise / B) steps; return the runs that were made.

    The loss falls in a straight line, faster at the best rate than at others.
    """
    made: list[tuple[int, float]] = []
    longest: dict[tuple[int, float], int] = {}

    def train(
        study: Any,  # noqa: ANN401 -- a class of the module's own
        batch: int,
        factor: float,
        epochs: float,
    ) -> Any:  # noqa: ANN401 -- a Run, as far as it is read
        made.append((batch, factor))
        speed = 1 / (1 + math.log2(factor / best) ** 2)
        # A run that is there and longer stays as long.
        number = max(study.updates(batch, epochs), longest.get((batch, factor), 0))
        longest[batch, factor] = number
        steps = least * (1 + noise / batch) / speed
        losses = 2 - np.arange(1, number + 1) / steps
        updates = [SimpleNamespace(loss=loss) for loss in losses.tolist()]
        return SimpleNamespace(steps=updates, diverged=False)

    monkeypatch.setattr(critical_batch._Study, "train", train)
    found = estimate([Squares(3.0, 2.0, 10, 40), Squares(5.0, 2.0, 10, 40)])
    monkeypatch.setattr(critical_batch, "over", lambda *_: found)
    return made


def measured(out: Path, batches: list[int]) -> Iterator[Trial | Critical]:
    recipe = a_recipe(changes=LENET)
    return measure_critical(recipe, Options(out=out), batches, epochs=40)


def test_runs_that_follow_the_law_have_its_critical_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("out").mkdir()
    lawful(monkeypatch, least=40, noise=300, best=4.0)
    *trials, result = measured(tmp_path / "out", [16, 32, 64, 128, 256, 512])
    assert isinstance(result, Critical)
    assert result.measured == pytest.approx(60, rel=0.03)  # a fifth, but for the smoothing
    assert result.low < 60 * 1.03
    assert result.high > 60 * 0.97
    assert result.least_steps / (2 - result.target) == pytest.approx(40, rel=0.05)
    assert result.predicted == pytest.approx(4)
    assert {trial.batch for trial in result.best} == {16, 32, 64, 128, 256, 512}
    rates = [trial.rate for trial in trials if isinstance(trial, Trial) and trial.batch == 16]
    assert len(rates) == 5  # 1/2, 1, 2, and on to 4 and 8, beyond the best
    saved = json.loads((tmp_path / "out" / critical_batch.RESULT).read_text())
    assert saved["measured"] == result.measured


@pytest.mark.parametrize(
    ("least", "noise", "words"),
    [
        (1e-4, 1e8, "far above"),
        (400, 1e-4, "far below"),
    ],
)
def test_batches_on_one_side_of_the_critical_one_have_no_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: float, noise: float, words: str
) -> None:
    lawful(monkeypatch, least=least, noise=noise)
    with pytest.raises(LargebatchError, match=words):
        list(measured(tmp_path, [16, 18, 20, 24]))


def test_runs_of_another_recipe_are_not_taken_for_those_of_this_one(tmp_path: Path) -> None:
    def study(smoothing: str) -> critical_batch._Study:
        changes = (*LENET, "optimizer={kind: sgd}", f"loss.label_smoothing={smoothing}")
        return critical_batch._Study(
            recipe=a_recipe(changes=changes),
            options=Options(out=tmp_path),
            workers=1,
            sizes=[96],
            epochs=0.2,
        )

    assert len(study("0.1").train(96, 1.0, 0.2).steps) == 3
    assert len(study("0.1").train(96, 1.0, 0.2).steps) == 3
    with pytest.raises(LargebatchError, match="another recipe"):
        study("0.0").train(96, 1.0, 0.2)


def test_a_stop_request_starts_no_further_run_of_a_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Path] = []

    def stopped(_: object, options: Options) -> SimpleNamespace:
        started.append(options.out)
        return SimpleNamespace(status="interrupted")

    monkeypatch.setattr(lr_range, "start", stopped)
    words = [word for change in LENET for word in ("--set", change)]
    out = tmp_path / "out"
    words += ["--measure", "16,32,64,128", "--out", str(out)]
    assert main(["lab", "noise", "digits_96", *words]) == 75
    assert len(started) == 1
    assert str(out) in capsys.readouterr().out


@pytest.mark.long
def test_the_critical_batch_of_real_runs_resumes_after_a_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [*LENET, "data.image_size=16", "optimizer={kind: sgd}", "schedule.peak_lr=0.1"]
    words = ["lab", "noise", "digits_96", "--measure", "16,32,64,128", "--epochs", "2"]
    words += ["--out", str(tmp_path / "out"), *(word for s in sets for word in ("--set", s))]
    assert main(words) == DONE
    first = capsys.readouterr().out
    assert "critical batch (20% more steps than linear scaling), in samples" in first
    assert main(words) == DONE
    again = capsys.readouterr().out
    assert [line for line in first.splitlines() if line.startswith("batch")] == [
        line for line in again.splitlines() if line.startswith("batch")
    ]


@pytest.mark.long
def test_a_resumed_run_measures_in_the_units_of_its_restored_scale(
    tmp_path: Path,
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = (*HALF, "batch.bn_span=24", "monitor=noise_scale")
    recipe = a_recipe("affine: {steps: 2, lr: 0.05}", changes=changes)
    run(recipe, out=whole)
    run(recipe, out=parts, max_steps=5)
    run(recipe, out=parts, resume=True)
    expected, found = (log(folder, "step") for folder in (whole, parts))
    assert expected[4]["loss_scale"] != 2.0**16
    for key in ("device_square", "global_square"):
        assert [step[key] for step in found] == [step[key] for step in expected]
    assert [step["device_square"] is None for step in found][-3:] == [False] + [True] * 2
