"""Whether a run was input bound, in words and in a chart."""

import re
from pathlib import Path

import numpy as np
import pytest
from fake_runs import FakeRun
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from largebatch.report.numbers import describe_waits, headlines
from largebatch.report.page import make_page
from largebatch.report.run import Run, read_run
from largebatch.report.waits import draw_waits


def run_that_waited(folder: Path, *, data: float, reduction: float, workers: int = 2) -> Run:
    """A run of 300 updates; the first takes ten times as long, all of it for images."""
    run = FakeRun(folder, workers=workers)
    run.train(0, 300)
    for record in run.records[1:]:
        whole = record["step_seconds"]
        record |= {"data_seconds": data * whole, "reduction_seconds": reduction * whole}
    run.records[1] |= {"step_seconds": 1.2, "data_seconds": 1.2, "reduction_seconds": 0.0}
    return read_run(run.write())


@pytest.mark.parametrize(
    ("data", "reduction", "workers", "words"),
    [
        pytest.param(
            *(0.034, 0.25, 2),
            "Not input bound: updates spent 3.4 % of the time waiting for images and 25 % waiting "
            "for the sums of gradients.",
            id="no",
        ),
        pytest.param(
            *(0.0, 0.0, 1),
            "Not input bound: updates spent less than 0.1 % of the time waiting for images.",
            id="alone",
        ),
        pytest.param(
            *(0.5, 0.1, 2),
            "Input bound: updates spent 50 % of the time waiting for images and 10 % waiting for "
            "the sums of gradients. Without waiting for images, training would be 2 times as fast "
            "(see execution.cache and execution.decoder, or give each worker more cores).",
            id="yes",
        ),
    ],
)
def test_a_page_says_whether_the_run_was_input_bound(
    data: float,
    reduction: float,
    workers: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("largebatch.report.page.make_svg", lambda *_, label, **__: f"<{label}>")
    run = run_that_waited(tmp_path / "run", data=data, reduction=reduction, workers=workers)
    assert describe_waits(run) == words
    assert headlines(run)[2].note.endswith("input bound") == (data >= 0.1)
    page = make_page(run)
    assert f"<p>{words}</p>" in page
    assert page.count("<What updates waited for>") == 2


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


def test_a_log_from_before_waits_were_recorded_still_has_a_page(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.train(0, 3)
    page = make_page(read_run(run.write()))
    assert not re.search("nput bound|What updates waited for", page)
