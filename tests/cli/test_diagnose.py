"""`report diagnose`: runs side by side, and their causes."""

import json
from pathlib import Path

import fake_runs
import pytest

from largebatch.cli.main import DONE, USER, main

CSV = "epoch,train_loss,eval_loss,eval_top1,lr\n0,{},2.2,20,0.1\n1,1.9,1.8,40,0.5\n2,{},{},{},0\n"
DIAGNOSE = ["report", "diagnose"]


def test_a_run_is_shown_with_its_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fake_runs.give_recipe(fake_runs.diverged(tmp_path / "diverged"), "polish=null")
    assert main([*DIAGNOSE, str(folder)]) == DONE
    shown = capsys.readouterr().out
    assert ["updates", "40"] in [line.split() for line in shown.splitlines()]
    assert "1. diverged: " in shown
    assert main([*DIAGNOSE, str(folder), "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["runs"][0]["updates"] == 40
    assert found["causes"][0]["kind"] == "diverged"
    assert {"figure", "remedy"} < found["causes"][0].keys()


def test_two_logs_of_another_program_are_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large, small = tmp_path / "large.csv", tmp_path / "small.csv"
    large.write_text(CSV.format(2.3, 1.7, 1.6, 45))
    small.write_text(CSV.format(1.5, 0.3, 0.4, 90))
    assert main([*DIAGNOSE, str(large), str(small), "--classes", "10"]) == DONE
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["top-1", "90.00", "%", "45.00", "%"] in rows
    assert ["peak", "learning", "rate", "0.5", "0.5"] in rows
    assert "1. underfit: " in shown


@pytest.mark.parametrize(("words", "name"), [(["nowhere"], "nowhere"), (["a", "b", "c"], "'c'")])
def test_bad_input_is_one_line(
    words: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DIAGNOSE, *words]) == USER
    error = capsys.readouterr().err
    assert name in error
    assert error.count("\n") == 1
