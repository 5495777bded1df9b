"""The charts of a run, and its pairs of mixed-up classes, show what its log holds, and no more."""

import math
from pathlib import Path

import fake_runs
import numpy as np
from fake_runs import FakeRun
from matplotlib.figure import Figure

from largebatch.report.charts import (
    draw_accuracy,
    draw_loss,
)
from largebatch.report.course import POINTS, ceiling, thin
from largebatch.report.page import wrong_predictions
from largebatch.report.run import read_run
from largebatch.report.style import looks_of
from largebatch.tracking.events import Mistakes


def test_one_wild_validation_loss_does_not_flatten_the_loss_chart(tmp_path: Path) -> None:
    """114 at one evaluation, among training losses from 2.3 to 0.5."""
    run = FakeRun(tmp_path / "run", clean_steps=0)
    run.train(0, 300)
    run.evaluate("train", 300, 0.5)
    run.records[-1]["loss"] = 114.0
    run.train(300, 600)
    run.end("train", 600, 0.96)
    figure = Figure()
    draw_loss(figure, read_run(run.write()))
    axes = figure.axes[0]
    assert axes.get_yscale() == "log"
    low, high = axes.transAxes.inverted().transform(axes.transData.transform([(0, 0.6), (0, 2.2)]))
    assert high[1] - low[1] > 0.2  # of the height; 0.014 on a linear axis


def test_figures_show_what_the_log_holds(tmp_path: Path) -> None:
    run = read_run(fake_runs.full_run(tmp_path / "run"))
    figure = Figure()
    draw_loss(figure, run)
    losses, rates = figure.axes
    drawn = [np.asarray(line.get_xydata()).tolist() for line in losses.lines]
    assert [[found.step, found.loss] for found in run.evaluations] in drawn
    assert rates.get_yticks().tolist() == [0, max(step.lr for step in run.steps)]


def test_thinning_keeps_every_extreme_and_passes_over_what_is_not_finite() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    values[[7, 50_000]] = 40.0, -40.0
    values[200:1_000] = math.nan
    thinned = thin(np.arange(100_000.0), values)
    assert len(thinned.step) == POINTS
    assert np.nanmax(thinned.high) == 40
    assert np.nanmin(thinned.low) == -40
    assert np.nanmax(np.abs(thinned.trend)) < 0.2
    assert np.isnan(thinned.trend[2])


def test_rare_peaks_do_not_set_the_scale() -> None:
    assert ceiling(np.array([5.0] * 999 + [1e9])) == 6.25
    assert ceiling(np.array([8.0])) == 10
    assert ceiling(np.array([math.nan])) == 1


def test_the_line_of_accuracy_is_of_what_was_kept_and_discarded_stages_are_hollow(
    tmp_path: Path,
) -> None:
    run = read_run(fake_runs.decided(tmp_path / "run"))
    figure = Figure()
    draw_accuracy(figure, run)
    kept, *stages = figure.axes[0].lines
    expected = [100 * found.top1 for found in run.kept_evaluations]
    assert np.asarray(kept.get_ydata()).tolist() == expected
    hollow = [line.get_markerfacecolor() == "none" for line in stages]
    assert hollow == [False, False, True, False, True]


def test_what_is_mixed_up_most_comes_first() -> None:
    random = np.random.default_rng(0)
    labels, predicted = random.integers(0, 4, (2, 500))
    wrong = np.flatnonzero(labels != predicted)
    found = Mistakes(
        stage="train", step=1, classes=("a", "b", "c", "d"),
        sizes=tuple(np.bincount(labels).tolist()), samples=tuple(wrong.tolist()),
        labels=tuple(labels[wrong].tolist()), predicted=tuple(predicted[wrong].tolist()),
    )  # fmt: skip
    counted = [[int(((labels == i) & (predicted == j)).sum()) for j in range(4)] for i in range(4)]
    off = {(i, j): counted[i][j] for i in range(4) for j in range(4) if i != j}
    first = max(off, key=lambda pair: (off[pair], -pair[0], -pair[1]))
    (table,) = wrong_predictions(found)
    label, predicted, images = (column.values for column in table.columns)
    assert (label[0], predicted[0]) == ("abcd"[first[0]], "abcd"[first[1]])
    assert images[0] == f"{off[first]} of {sum(counted[first[0]])}"
    most = sorted(off.values(), reverse=True)[:10]
    assert [int(shown.split()[0]) for shown in images] == most


def test_the_mistakes_shown_are_those_of_the_stage_that_was_kept(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.end("train", 600, 0.9, wrong=(3, 13, 14))
    run.end("statistics", 0, 0.5, wrong=range(180))
    run.decide("statistics", before=0.9, after=0.5)
    found = read_run(run.write())
    assert found.last_stage is not None
    assert found.last_stage.name == "train"
    assert found.final_mistakes is not None
    assert found.final_mistakes.stage == "train"


def test_stages_of_other_packages_have_looks_of_their_own() -> None:
    looks = looks_of(["train", "shrink", "grow", "statistics"])
    assert len({look.colour for look in looks.values()}) == 4
    assert len({look.marker for look in looks.values()}) == 4
    assert looks["train"] == looks_of(["train"])["train"]
