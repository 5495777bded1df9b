"""The command `diagnose`: two runs side by side, their causes, and the repaired recipe."""

from pathlib import Path

import fake_runs
import pytest

from largebatch.cli.main import DONE, USER, main
from largebatch.recipe.loading import load_recipe

CSV = "epoch,train_loss,eval_loss,eval_top1,lr\n0,{},2.2,20,0.1\n1,1.9,1.8,40,0.5\n2,{},{},{},0\n"


@pytest.fixture
def diverged(tmp_path: Path) -> Path:
    return fake_runs.give_recipe(fake_runs.diverged(tmp_path / "diverged"), "polish=null")


def test_a_run_is_shown_with_its_causes_and_what_was_not_checked(
    diverged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "diagnose", str(diverged)]) == DONE
    shown = capsys.readouterr().out.splitlines()
    assert [line.split() for line in shown[:3]] == [
        ["diverged"],
        ["global", "batch", "96"],
        ["updates", "40"],
    ]
    place = shown.index("likely causes in diverged, the most likely first:")
    words = " ".join(" ".join(shown[place + 1 :]).split())
    assert words.startswith("1. diverged: the training loss rose from 1.89 at step 33 ")
    assert " and was not finite at step 39 " in words
    assert " to change it: lower schedule.peak_lr or lengthen" in words
    assert shown[-2].startswith("not checked, for lack of a record: validation loss, exact Batch")


def test_the_repaired_recipe_is_written_and_loads(
    diverged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "repaired.yaml"
    assert main(["report", "diagnose", str(diverged), "--out", str(out)]) == DONE
    shown = capsys.readouterr().out
    recipe = load_recipe(out)
    was = load_recipe("digits_96")
    assert 0 < recipe.schedule.peak_lr < was.schedule.peak_lr
    assert f"changed schedule.peak_lr: was {was.schedule.peak_lr:g}; half of the rate" in shown
    assert recipe.optimizer == was.optimizer
    assert main(["report", "diagnose", str(diverged), "--out", str(out)]) == USER
    assert "exists already" in capsys.readouterr().err


def test_two_logs_of_another_program_stand_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large, small = tmp_path / "large.csv", tmp_path / "small.csv"
    large.write_text(CSV.format(2.3, 1.7, 1.6, 45))
    small.write_text(CSV.format(1.5, 0.3, 0.4, 90))
    assert main(["report", "diagnose", str(large), str(small), "--classes", "10"]) == DONE
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["top-1", "90.00", "%", "45.00", "%"] in rows
    assert ["peak", "learning", "rate", "0.5", "0.5"] in rows
    assert "1. underfit: the training loss ends at 1.7 against 0.3" in shown
    assert "top-1 ends at 45.00 % against 90.00 %" in " ".join(shown.split())
    assert "judged, on the right: " in " ".join(shown.split())
    assert "large.csv: train_loss, eval_loss, eval_top1, lr (eval_top1 in per cent)" in " ".join(
        shown.split()
    )


def test_a_repair_without_a_recipe_is_refused_after_the_causes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.csv"
    log.write_text(CSV.format(2.3, "nan", 1.6, 45))
    assert main(["report", "diagnose", str(log), "--out", str(tmp_path / "new.yaml")]) == USER
    shown = capsys.readouterr()
    assert "1. diverged: the training loss was not finite at epoch 2" in shown.out
    assert "has no recipe that can be read" in shown.err
    assert not (tmp_path / "new.yaml").exists()


def test_a_run_that_did_not_finish_is_shown_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fake_runs.give_recipe(fake_runs.paused(tmp_path / "run"), "polish=null")
    assert main(["report", "diagnose", str(folder)]) == DONE
    assert "The run paused at --max-steps" in capsys.readouterr().out
    assert main(["report", "diagnose", str(folder), "--classes", "10"]) == USER
    assert "--classes: a run folder has its number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: not found; expected a run folder or a log"),
        (["a", "b", "c"], "diagnose takes one run or two, got 3"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "diagnose", *words]) == USER
    error = capsys.readouterr().err
    assert error.startswith(f"largebatch: {message}")
    assert error.count("\n") == 1
