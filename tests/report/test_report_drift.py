"""The heat map of what polishing changed: every layer and channel of the log, and nothing else."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import fake_runs
import numpy as np
import pytest
import torch
from fake_runs import FakeRun
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from torch import nn

from largebatch.distributed.serial import Serial
from largebatch.polish.statistics import QUANTILES, polish
from largebatch.report.drift import draw_drift, scale_end
from largebatch.report.page import make_page
from largebatch.report.run import Run, read_run
from largebatch.report.style import HIGH, LOW


def drawn(run: Run, *, height: float = 8) -> Figure:
    figure = Figure((8, height))
    draw_drift(figure, run)
    return figure


def mesh(axes: Axes) -> QuadMesh:
    (found,) = (part for part in axes.collections if isinstance(part, QuadMesh))
    return found


def shown(cells: QuadMesh, value: float) -> tuple[float, ...]:
    """Return the colour that a change has: red, green, blue, opacity."""
    return tuple(np.asarray(cells.to_rgba(np.array([value])))[0].tolist())


def test_every_cell_is_a_number_of_the_log(tmp_path: Path) -> None:
    folder = fake_runs.like_resnet50(tmp_path / "run")
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    (drift,) = (line for line in lines if line["event"] == "drift")
    panels = drawn(read_run(folder)).axes[:2]
    for axes, key in zip(panels, ("shift_quantiles", "ratio_quantiles"), strict=True):
        logged = [layer[key] for layer in drift["layers"]]
        assert np.asarray(mesh(axes).get_array()).tolist() == logged
        assert [label.get_text() for label in axes.get_xticklabels()] == [
            "5 %", "25 %", "median", "75 %", "95 %",
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


def test_no_change_has_no_colour_and_the_two_directions_have_their_own(tmp_path: Path) -> None:
    figure = drawn(read_run(fake_runs.full_run(tmp_path / "run")))
    for axes in figure.axes[:2]:
        cells = mesh(axes)
        low, high = cells.get_clim()
        assert low == -high
        for value, colour in ((low, LOW), (high, HIGH)):
            assert shown(cells, value) == to_rgba(colour)
        assert shown(cells, 0.0)[3] == 0
        assert shown(cells, high / 2)[:3] == to_rgba(HIGH)[:3]
        assert 0.4 < shown(cells, high / 2)[3] < 0.6


def test_the_scale_above_each_panel_names_its_unit_and_its_ends(tmp_path: Path) -> None:
    figure = drawn(read_run(fake_runs.full_run(tmp_path / "run")))
    titles = [axes.get_title() for axes in figure.axes[2:]]
    assert titles == ["Mean: (polished − running) / running σ", "Variance: ln(polished / running)"]
    for panel, bar in zip(figure.axes[:2], figure.axes[2:], strict=True):
        end = mesh(panel).get_clim()[1]
        labels = [label.get_text() for label in bar.get_xticklabels()]
        assert labels == [f"−{end:g}", "0", f"+{end:g}"]


def test_a_scale_ends_at_the_largest_change_unless_few_are_far_larger() -> None:
    usual = np.random.default_rng(0).uniform(-0.4, 0.4, size=(53, 5))
    end = scale_end(usual)
    assert np.abs(usual).max() <= end <= 1.1 * np.abs(usual).max()
    usual[0] = 1e6
    assert 0.9 < scale_end(usual) < 1.3
    assert scale_end(np.full((2, 5), 1e-9)) == 0.01
    assert scale_end(np.full((2, 5), math.nan)) == 0.01
    assert scale_end(np.array([123.4])) == 130
    assert scale_end(np.array([0.3])) == 0.3


def test_a_change_that_is_no_number_is_a_dash_and_takes_no_part_in_the_scale(
    tmp_path: Path,
) -> None:
    run = FakeRun(tmp_path / "run")
    run.drift(["bn1", "bn2"])
    layers = run.records[-1]["layers"]
    layers[1]["ratio_quantiles"] = [None, -0.2, 0.0, 0.1, None]
    layers[0]["ratio_quantiles"] = [0.0] * 5
    axes = drawn(read_run(run.write())).axes[1]
    assert [(text.get_text(), text.get_position()) for text in axes.texts] == [
        ("–", (0.5, 1.5)),
        ("–", (4.5, 1.5)),
    ]
    assert mesh(axes).get_clim()[1] == 0.2


def test_layers_are_named_one_by_one_where_there_is_room_and_by_group_elsewhere(
    tmp_path: Path,
) -> None:
    run = read_run(fake_runs.like_resnet50(tmp_path / "run"))
    names = {}
    for height in (4, 20):
        axes = drawn(run, height=height).axes[0]
        names[height] = [label.get_text() for label in axes.get_yticklabels()]
        assert len(axes.lines) == 4  # between five groups
    assert names[4] == ["bn1", "layer1", "layer2", "layer3", "layer4"]
    assert names[20] == fake_runs.RESNET50
    assert len(names[20]) == 53


@pytest.mark.parametrize("kept", [True, False])
def test_the_figure_says_when_the_statistics_were_discarded(kept: bool, tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.train(0, 600)
    run.end("train", 600, 0.9)
    run.drift(["bn1"])
    run.end("statistics", 0, 0.91)
    run.decide("statistics", before=0.9, after=0.95 if kept else 0.85)
    read = read_run(run.write())
    figure = drawn(read)
    assert figure.get_supxlabel().startswith("Discarded") == (not kept)
    assert ("The stage and these changes were discarded" in make_page(read)) == (not kept)


def test_statistics_that_were_measured_again_replace_those_before(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.drift(["bn1"])
    run.start(600)
    run.drift(["bn2"])
    (label,) = drawn(read_run(run.write())).axes[0].get_yticklabels()
    assert label.get_text() == "bn2"


def test_a_log_from_before_channels_were_recorded_still_has_a_page(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.drift(["bn1"])
    del run.records[-1]["quantiles"]
    for key in ("shift_quantiles", "ratio_quantiles"):
        del run.records[-1]["layers"][0][key]
    page = make_page(read_run(run.write()))
    assert "<title>digits-96" in page
    assert "What polishing changed in BatchNorm" not in page
