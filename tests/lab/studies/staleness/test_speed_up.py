"""Speed-up by learners: from simulated times alone, on the page and as a picture."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from short_staleness import STUDY, write_study

from largebatch.errors import RecipeError
from largebatch.lab.studies.staleness.page import make_page
from largebatch.lab.studies.staleness.pictures import draw_speed_up, write_speed_up
from largebatch.lab.studies.staleness.run import Row
from largebatch.lab.studies.staleness.speed_up import SpeedUp, lines_of, speed_ups
from largebatch.lab.studies.staleness.study import cells_of, load_study
from largebatch.report.interactive import Table

WEIGHTS = 4 * 431_080
"""Bytes of LeNet-5."""

TIMES = {"even": {"factor": {"kind": "constant", "seconds": 1.0}}}
SECTION = {"recipe": "plain", "mu": [8], "learners": [4], "gradients": 40}


def study(folder: Path, serving: dict[str, float] | None = None) -> list[SpeedUp]:
    machines: dict[str, Any] = {"overhead": 0.01, "sample": 0.001, "serving": serving}
    grids = [{**STUDY["grids"][0], "times": ["even"]}]
    path = write_study(folder, machines=machines, times=TIMES, grids=grids, speed_up=SECTION)
    return speed_ups(load_study(str(path)), folder)


def test_learners_of_equal_times_are_as_many_times_as_fast(tmp_path: Path) -> None:
    found = study(tmp_path)
    assert [(one.protocol, one.cell.learners) for one in found] == [
        (protocol, learners)
        for protocol in ("hardsync", "1-softsync", "asynchronous")
        for learners in (1, 4)
    ]
    for one in found:
        assert one.over_alone.mean == pytest.approx(one.cell.learners)
        assert list(one.seconds) == [1, 2]


def test_the_time_of_the_server_counts(tmp_path: Path) -> None:
    """A gradient takes 18 ms, as an update does; one learner waits for both."""
    serving = {"pull": 0.0, "gradient": 0.0, "update": 0.018 / WEIGHTS}
    found = {
        one.protocol: one.over_alone.mean
        for one in study(tmp_path, serving)
        if one.cell.learners == 4
    }
    assert found["hardsync"] == pytest.approx(4.0)  # 4 gradients and an update in 36 ms
    assert found["asynchronous"] == pytest.approx(4 * 36 / (18 + 4 * 18), rel=0.1)
    assert found["1-softsync"] > 4.0


def test_the_page_and_the_picture_show_it(tmp_path: Path) -> None:
    found = study(tmp_path)
    (cell, *_) = cells_of(load_study(str(tmp_path / "study.yaml")), tmp_path)
    record = {
        "top1": 0.5, "diverged": None, "tau": [4], "tau_mean": 0.0, "updates": 6,
        "simulated_seconds": 1.0,
    }  # fmt: skip
    rows = [Row(cell, (record,))]
    page = make_page(rows, title="tiny", speed_ups=found)
    (section,) = [section for section in page.sections if section.title == "Speed-up"]
    table = section.parts[0]
    assert isinstance(table, Table)
    columns = {column.title: column.values for column in table.columns}
    assert columns["lambda"] == [1, 4] * 3
    assert columns["Speed-up"] == pytest.approx([1.0, 4.0] * 3)
    labels = [look.label for look in page.legend[1]]
    assert labels == ["hardsync", "1-softsync", "asynchronous"]
    assert "Speed-up" in page.html()
    assert "Speed-up" not in [each.title for each in make_page(rows, title="tiny").sections]
    figure = Figure()
    draw_speed_up(figure, found)
    (axes,) = figure.axes
    assert axes.get_title() == "↑ Speed-up: even, mu 8"
    assert list(lines_of(found)) == ["even, mu 8"]
    assert write_speed_up(found, tmp_path / "speed_up.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({**SECTION, "recipe": "other"}, "speed_up.recipe: there is no other; recipes has plain"),
        ({**SECTION, "sigma": [9]}, "n (9) must be at most learners (1)"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    tmp_path: Path, section: dict[str, Any], message: str
) -> None:
    path = write_study(tmp_path, speed_up=section)
    with pytest.raises(RecipeError) as error:
        speed_ups(load_study(str(path)), tmp_path)
    assert message in str(error.value)


def test_a_study_without_the_section_simulates_nothing(tmp_path: Path) -> None:
    assert speed_ups(load_study(str(write_study(tmp_path))), tmp_path) == []
