"""Every stage of a run has its place in the report."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import fake_runs
import pytest

from largebatch.report import write_report
from largebatch.report.run import read_run
from largebatch.report.style import COLOURS, DARK, LIGHT, MARKERS
from largebatch.tracking.events import StageName


@pytest.mark.parametrize("stage", get_args(StageName))
def test_every_stage_has_a_colour_a_marker_and_a_variable(stage: StageName) -> None:
    page = Path(fake_runs.__file__).parents[2] / "largebatch" / "report" / "page.html"
    text = page.read_text(encoding="utf-8")
    assert f"th.{stage} {{ color: var(--{stage}); }}" in text
    assert LIGHT[stage] == COLOURS[stage] != DARK[stage]
    assert list(COLOURS.values()).count(COLOURS[stage]) == 1
    assert list(MARKERS.values()).count(MARKERS[stage]) == 1


def test_averages_are_explained_and_the_drift_of_one_is_that_of_its_statistics(
    tmp_path: Path,
) -> None:
    run = fake_runs.FakeRun(tmp_path / "run")
    run.train(0, 600)
    run.end("train", 600, 0.95)
    run.end("swa", 0, 0.94)
    run.decide("swa", before=0.97, after=0.96)
    run.drift(["bn1", "bn2"], stage="affine")
    run.end("affine", 0, 0.96)
    run.decide("affine", before=0.97, after=0.98)
    folder = run.write()
    read = read_run(folder)
    assert read.drift_kept
    judged = [replace(each, kept=not each.kept) for each in read.decisions]
    assert not replace(read, decisions=tuple(judged)).drift_kept
    page = write_report(folder).read_text()
    assert "swa (discarded)" in page
    assert "the mean of the weights at a regular interval" in page
