"""The page on lost accuracy has the table of the newest results, and its loops do what they say."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import accuracy_fell as study  # noqa: E402
from measuring import RESULTS, newest  # noqa: E402

from largebatch.report.style import save_png  # noqa: E402

PAGE = ROOT / "docs" / "accuracy-fell.md"


def newest_loops() -> dict[str, object]:
    path = newest(study.NAME, RESULTS, machine="cpu2")
    assert path is not None
    loops: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))["loops"]
    return loops


def test_the_page_has_the_table_of_the_newest_results() -> None:
    table = "\n".join(study.table(newest_loops()))
    assert table in PAGE.read_text(encoding="utf-8")


def test_the_figure_is_drawn_from_the_results(tmp_path: Path) -> None:
    loops = newest_loops()
    picture = tmp_path / "curves.png"
    save_png(picture, lambda figure: study.draw(figure, loops=loops), size=(900, 430), pixels=900)
    assert picture.stat().st_size > 10_000


def test_the_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    rate = study.schedule(2.0, warm_up=4, updates=12)
    assert [rate(update) for update in (0, 3, 4, 8)] == [0.5, 2.0, 2.0, 1.0]


def test_one_process_learns_the_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "EPOCHS", 3)
    curves = study.Training(study.Loop("one process", times=1, warm_up=0), seed=1, workers=1).run()
    assert curves["top1"][-1] > 0.9
    assert curves["loss"][-1] < curves["loss"][0]
