"""A run with weights of classes and clipping: what it records, and what its report says."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from short_runs import a_recipe, log, summary

from largebatch import run
from largebatch.cli.main import DONE, main
from largebatch.formatting import percent
from largebatch.report import write_report

LIMIT = 0.7
CHANGES = (
    "polish=null",
    "duration={steps: 8}",
    "data.held_out={samples: 150}",
    "loss={kind: bce, class_weights: balanced}",
    f"optimizer.clip_norm={LIMIT}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "weighted"
    run(a_recipe(changes=CHANGES), out=path, report=False)
    write_report(path)
    return path


def test_the_mean_of_the_classes_is_in_log_and_summary(folder: Path) -> None:
    (mistakes,) = log(folder, "mistakes")
    wrong = Counter(mistakes["labels"])
    sizes = mistakes["sizes"]
    wanted = np.mean([1 - wrong[label] / size for label, size in enumerate(sizes)])
    last = log(folder, "evaluation")[-1]
    assert last["balanced_top1"] == pytest.approx(wanted, rel=1e-12)
    assert last["balanced_top1"] != last["top1"]
    found = summary(folder)
    assert found["balanced_top1"] == found["stages"][0]["balanced_top1"] == last["balanced_top1"]
    assert "Mean of classes" in (folder / "report.html").read_text(encoding="utf-8")


def test_evaluate_prints_the_mean_of_the_classes_and_which_images_it_measured(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(folder)]) == DONE
    printed = capsys.readouterr().out
    assert f"mean of classes {summary(folder)['balanced_top1']:.2%}" in printed
    assert "(150 images held out of the training images)" in printed
    assert main(["evaluate", str(folder), "--set", "data.held_out=null"]) == DONE
    assert "(360 images)" in capsys.readouterr().out


def test_the_norm_before_clipping_is_recorded_and_the_report_counts(folder: Path) -> None:
    norms = [step["gradient_norm"] for step in log(folder, "step")]
    share = float(np.mean([norm > LIMIT for norm in norms]))
    assert len(norms) == 8
    assert 0 < share < 1
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert f"{percent(share)} % of the updates were clipped" in page


def test_other_runs_record_neither(tmp_path: Path) -> None:
    recipe = a_recipe(changes=("polish=null", "duration={steps: 2}", "schedule.warmup=null"))
    found = run(recipe, out=tmp_path / "run", report=False)
    assert found.balanced_top1 is None
    assert "balanced_top1" not in log(tmp_path / "run", "evaluation")[-1]
    assert log(tmp_path / "run", "step")[-1]["gradient_norm"] is None
