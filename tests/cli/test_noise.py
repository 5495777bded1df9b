"""The command `noise`, and what a monitored run leaves: its record, its report, its weights."""

from pathlib import Path

import pytest
import torch
from short_runs import HALF, a_recipe, log, weights

from largebatch import run
from largebatch.cli.main import DONE, USER, main
from largebatch.report import write_report
from largebatch.report.noise import LEAST, PARTS, course, describe_noise
from largebatch.report.page import make_page
from largebatch.report.run import read_run
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
    assert parts[1].scale == estimate(squares[30:])


def test_the_command_reads_a_run_and_draws_no_conclusion_without_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "noise", str(folder)]) == DONE
    assert "report.html" not in capsys.readouterr().out
    write_report(folder)
    assert main(["lab", "noise", str(folder)]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == describe_noise(read_run(folder))
    assert str(folder / "report.html") in lines[1]
    page = (folder / "report.html").read_text()
    assert 'id="noise"' in page
    assert describe_noise(read_run(folder))[:60] in page
    assert main(["lab", "noise", "digits_96", "--out", str(folder)]) == USER  # of another run
    assert "model" in capsys.readouterr().err
    run(a_recipe(changes=(*LENET, "duration={steps: 3}")), out=tmp_path / "other")
    assert 'id="noise"' not in make_page(read_run(tmp_path / "other"))
    assert main(["lab", "noise", str(tmp_path / "other")]) == USER
    assert "--set monitor=noise_scale" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--max-steps", "8", "--set", "schedule.warmup={steps: 2}"], "--max-steps 8"),
        (["--set", "duration={steps: 8}", "--set", "polish=null",
          "--set", "schedule.warmup={steps: 2}"], "duration has 8 updates"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_one_line(
    words: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "noise", "digits_96", "--out", str(tmp_path / "out"), *words]) == USER
    assert name in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


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
