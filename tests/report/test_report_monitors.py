"""Trust ratios, gradient norm and the use of the machine in the report: what was recorded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runs import FakeRun
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from largebatch.report.monitors import draw_norm, draw_ratios, draw_system
from largebatch.report.page import CHARTS, make_page
from largebatch.report.run import Run, read_run
from largebatch.tracking.events import SYSTEM

LAYERS = ["conv1.weight", "layer1.0.conv1.weight", "fc.weight"]


def monitored(folder: Path, *, steps: int = 400) -> Run:
    """A run on three workers of which the last layer's ratio is always 8 times the first one's."""
    run = FakeRun(folder, workers=3)
    run.train(0, steps)
    run.records[0]["layers"] = LAYERS
    updates = [record for record in run.records if record["event"] == "step"]
    for place, record in enumerate(updates):
        low, middle = 0.01 * (1 + place), None if place < 2 else 1.0
        record |= {"gradient_norm": 5.0, "trust_ratios": [low, middle, 8 * low]}
    for place in range(0, steps, 100):
        columns: dict[str, Any] = {name: [100.0, 300.0, 200.0 + place] for name in SYSTEM}
        columns |= {"gpu_percent": [None] * 3, "gpu_memory_bytes": [None] * 3}
        columns["memory_bytes"] = [2.0**30, 2.0**31, 2.0**31]
        run.records.append({"event": "system", "stage": "train", "step": place, **columns})
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


def test_the_norm_is_drawn_from_0_on(tmp_path: Path) -> None:
    figure = Figure((13, 4))
    draw_norm(figure, monitored(tmp_path / "run"))
    (axes,) = figure.axes
    drawn: Any = axes.lines[-1]
    assert set(drawn.get_ydata()) == {5.0}
    assert axes.get_ylim()[0] == 0


def test_the_workers_are_drawn_as_their_median_and_extremes(tmp_path: Path) -> None:
    """Charts show only measured values: none of a GPU without one."""
    figure = Figure((13, 4))
    draw_system(figure, monitored(tmp_path / "run"))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["↑ Processor, % of a core", "↑ Memory, GiB"]
    parts: list[Any] = list(figure.axes)
    processor, memory = parts
    assert list(processor.lines[0].get_ydata()) == [200.0, 300.0, 300.0, 300.0]
    assert list(memory.lines[0].get_ydata()) == [2.0] * 4
    ends = processor.collections[0].get_paths()[0].vertices
    assert {*np.asarray(ends)[:, 1]} >= {100.0, 300.0, 400.0, 500.0}


def test_a_run_has_the_charts_of_what_it_monitored(tmp_path: Path) -> None:
    run, plain = monitored(tmp_path / "one", steps=40), FakeRun(tmp_path / "two", workers=3)
    plain.train(0, 40)
    names = ("ratios", "norm", "system")
    page, without = make_page(run), make_page(read_run(plain.write()))
    for name in names:
        assert f'<section id="{name}">' in page
        assert f'<section id="{name}">' not in without
    assert "Median of the 3 workers" in page
    assert "data:image/png;base64," in page  # the cells, which are too many to be shapes
    assert not [name for name in names if CHARTS[name].content(read_run(tmp_path / "two"))]


def test_what_a_resumed_run_did_again_is_not_drawn_twice(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", workers=3)
    run.train(0, 40)
    columns = {name: [1.0] for name in SYSTEM}
    for step, used in ((0, 1.0), (20, 2.0), (30, 3.0)):
        again = {**columns, "cpu_percent": [used]}
        run.records.append({"event": "system", "stage": "train", "step": step, **again})
    run.records.append({**run.records[0], "resume_step": 20})
    run.records.append({"event": "system", "stage": "train", "step": 20, **columns})
    found = read_run(run.write()).system
    assert [(used.step, used.cpu_percent) for used in found] == [(0, (1.0,)), (20, (1.0,))]
