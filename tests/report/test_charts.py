"""The charts of a run show what its log holds, and nothing else."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fake_runs
import numpy as np
import pytest
import torch
from fake_runs import FakeRun
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection, QuadMesh
from matplotlib.figure import Figure
from torch import nn

from largebatch.distributed.serial import Serial
from largebatch.polish.statistics import QUANTILES, polish
from largebatch.report.charts import (
    draw_accuracy,
    draw_drift,
    draw_loss,
    draw_ratios,
    draw_waits,
    scale_end,
)
from largebatch.report.course import POINTS, ceiling, thin
from largebatch.report.run import Run, read_run


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


def test_the_chart_of_stages_has_each_with_its_change_and_discarded_ones_hollow(
    tmp_path: Path,
) -> None:
    run = read_run(fake_runs.decided(tmp_path / "run"))
    figure = Figure()
    draw_accuracy(figure, run)
    ends = figure.axes[1]
    assert [label.get_text().split("\n") for label in ends.get_xticklabels()] == [
        ["train", ""],
        ["clean", "+1.39"],
        ["ema", "−1.11", "discarded"],
        ["affine", "+0.84"],
        ["statistics", "−1.67", "discarded"],
    ]
    assert np.asarray(ends.lines[0].get_xdata()).tolist() == [0, 1, 3]  # the line of what was kept
    hollow = [line.get_markerfacecolor() == "none" for line in ends.lines[1:]]
    assert hollow == [False, False, True, False, True]


def run_that_waited(folder: Path, *, data: float, reduction: float, workers: int = 2) -> Run:
    """A run of 300 updates; the first takes ten times as long, all of it for images."""
    run = FakeRun(folder, workers=workers)
    run.train(0, 300)
    for record in run.records[1:]:
        whole = record["step_seconds"]
        record |= {"data_seconds": data * whole, "reduction_seconds": reduction * whole}
    run.records[1] |= {"step_seconds": 1.2, "data_seconds": 1.2, "reduction_seconds": 0.0}
    return read_run(run.write())


def test_the_shares_of_every_update_are_drawn_one_above_the_other(tmp_path: Path) -> None:
    figure = Figure()
    draw_waits(figure, run_that_waited(tmp_path / "run", data=0.25, reduction=0.5))
    tops = [
        np.asarray(part.get_paths()[0].vertices)
        for part in figure.axes[0].collections
        if isinstance(part, PolyCollection)
    ]
    for part, top in zip(tops, (25, 75, 100), strict=True):
        late = part[part[:, 0] > 10]
        assert late[:, 1].max() == pytest.approx(top)
        assert part[:, 0].max() == 300
    assert tops[0][tops[0][:, 0] < 1][:, 1].max() > 80  # the first update


def drawn(run: Run, *, height: float = 8) -> Figure:
    figure = Figure((12, height))
    draw_drift(figure, run)
    return figure


def mesh(axes: Axes) -> QuadMesh:
    (found,) = (part for part in axes.collections if isinstance(part, QuadMesh))
    return found


def test_every_cell_is_a_number_of_the_log(tmp_path: Path) -> None:
    folder = fake_runs.like_resnet50(tmp_path / "run")
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    (drift,) = (line for line in lines if line["event"] == "drift")
    panels = drawn(read_run(folder)).axes[:2]
    for axes, key in zip(panels, ("shift_quantiles", "ratio_quantiles"), strict=True):
        logged = [layer[key] for layer in drift["layers"]]
        assert np.asarray(mesh(axes).get_array()).tolist() == logged
        assert [label.get_text() for label in axes.get_xticklabels()] == [
            "5 %", "25 %", "50 %", "75 %", "95 %",
        ]  # fmt: skip
        assert axes.get_ylim() == (53, 0)  # the input at the top


def test_the_drift_of_a_layer_is_in_the_figure(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(40, eps=0))
    torch.manual_seed(0)
    values = torch.randn(200, 40) * torch.linspace(0.5, 2, 40) + torch.linspace(-1, 3, 40)
    (layer,) = polish(model, [(values, torch.zeros(200))], Serial())
    run = FakeRun(tmp_path / "run")
    run.add("drift", samples=200, quantiles=QUANTILES, layers=[asdict(layer)])
    panels = drawn(read_run(run.write())).axes[:2]
    data = values.double().numpy()
    changes = data.mean(0), np.log(data.var(0, ddof=1))  # from mean 0 and variance 1
    for axes, expected in zip(panels, changes, strict=True):
        cells = np.asarray(mesh(axes).get_array())
        np.testing.assert_allclose(cells, [np.quantile(expected, QUANTILES)], rtol=1e-6)


def test_a_scale_ends_where_few_changes_are_larger() -> None:
    usual = np.random.default_rng(0).uniform(-0.4, 0.4, size=(53, 5))
    usual[0, 0] = 1e6
    assert 0.35 < scale_end(usual) < 0.45
    assert scale_end(np.full((2, 5), 1e-9)) == scale_end(np.full((2, 5), math.nan)) == 0.01


LAYERS = ["conv1.weight", "layer1.0.conv1.weight", "fc.weight"]


def monitored(folder: Path, *, steps: int = 400) -> Run:
    """A run of which the last layer's ratio is always 8 times the first one's."""
    run = FakeRun(folder)
    run.train(0, steps)
    run.records[0]["layers"] = LAYERS
    updates = [record for record in run.records if record["event"] == "step"]
    for place, record in enumerate(updates):
        low, middle = 0.01 * (1 + place), None if place < 2 else 1.0
        record |= {"trust_ratios": [low, middle, 8 * low]}
    return read_run(run.write())


def test_the_heat_map_has_a_row_for_each_layer_and_medians_of_its_ratios(tmp_path: Path) -> None:
    run = monitored(tmp_path / "run")
    figure = Figure((13, 7))
    draw_ratios(figure, run)
    axes, bar = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "conv1", "layer1.0.conv1", "fc",
    ]  # fmt: skip
    assert axes.yaxis_inverted()
    found = [each for each in axes.collections if isinstance(each, QuadMesh)]
    mesh: Any = found[0]
    cells = np.ma.getdata(mesh.get_array()).reshape(3, 200)
    pairs = 0.01 * (1 + np.arange(400)).reshape(200, 2)
    np.testing.assert_allclose(cells[0], pairs.mean(1))
    np.testing.assert_allclose(cells[2], 8 * pairs.mean(1))
    hidden = np.ma.getmaskarray(mesh.get_array()).reshape(3, 200)
    assert np.argwhere(hidden).tolist() == [[1, 0]]  # a layer without a gradient
    assert mesh.norm.vmin == pytest.approx(0.015)
    assert mesh.norm.vmax == pytest.approx(8 * 3.995)
    assert bar.get_title() == "Trust ratio"
