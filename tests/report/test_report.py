"""The report of every kind of run folder: complete, self-contained, true to the log."""

import errno
import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fake_runs
import matplotlib as mpl
import numpy as np
import pytest
from fake_runs import FakeRun
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from PIL import Image

from largebatch.cli.main import DONE, USER, main
from largebatch.errors import MissingPackageError
from largebatch.formatting import duration
from largebatch.report import write_report
from largebatch.report.figures import POINTS, ceiling, draw_accuracy, draw_loss, thin
from largebatch.report.numbers import headlines
from largebatch.report.page import CHARTS, make_page
from largebatch.report.run import Run, read_run


class Attributes(HTMLParser):
    """Collects what a page refers to, and the text it shows."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in {"src", "href", "xlink:href", "srcset", "data", "poster", "action"}:
                self.references.append(value or "")
            self.references += re.findall(r"url\((.*?)\)", value or "")

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a whole run."""
    return make_page(read_run(fake_runs.full_run(tmp_path_factory.mktemp("full") / "run")))


@pytest.fixture
def no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the drawings out of a page, which take all its time, where its words are read."""
    monkeypatch.setattr("largebatch.report.page.make_svg", lambda *_, **__: "<svg></svg>")


def more(make: Callable[[Path], Path]) -> Any:  # noqa: ANN401 -- pytest's own type
    """Return a kind of run with nothing in its figures that another kind has not."""
    return pytest.param(make, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "make",
    [
        more(fake_runs.full_run),
        more(fake_runs.train_only),
        more(fake_runs.statistics_that_hurt),
        more(fake_runs.like_resnet50),
        more(fake_runs.resumed),
        fake_runs.interrupted_after_one_step,
        more(fake_runs.interrupted_while_clean),
        more(fake_runs.diverged),
        more(fake_runs.interrupted_after_a_skipped_step),
        fake_runs.failed_at_once,
        more(fake_runs.killed),
        more(fake_runs.decided),
        fake_runs.polished_checkpoint,
    ],
)
def test_every_kind_of_run_has_a_page_that_loads_nothing_and_figures_of_what_it_has(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = make(tmp_path / "run")
    before = dict(mpl.rcParams)
    page = write_report(folder)
    assert page == folder / "report.html"
    run = read_run(folder)
    there = [name for name, chart in CHARTS.items() if chart.content(run)]
    assert {path.stem for path in folder.glob("*.png")} == {*there, "report"}
    for name in (*there, "report"):
        with Image.open(folder / f"{name}.png") as image:
            image.verify()
            assert image.width == (1600 if name == "report" else 1920)
    found = Attributes(page.read_text(encoding="utf-8"))
    assert not found.tags & {"script", "link", "img", "iframe", "object", "base"}
    assert "http" not in page.read_text(encoding="utf-8").replace("http-equiv", "")
    assert len(found.ids) == len(set(found.ids))
    assert set(found.ids) & set(CHARTS) == set(there)
    assert {reference.lstrip("#") for reference in found.references} <= set(found.ids)
    assert all(reference.startswith("#") for reference in found.references)
    assert dict(mpl.rcParams) == before


def test_the_page_shows_the_numbers_of_the_run(full_run: str) -> None:
    words = Attributes(full_run).words
    shown = ("98.61", "+1.39", "806", "96", "600", "74.7")  # the headlines, in order
    assert [word for word in words if word in shown][: len(shown)] == list(shown)
    for cell in ("95.83 →", "97.22 %", "+1.39", "0.2834", "525", "4f2a9c1d5e6b+", "0.75 GiB"):
        assert cell in words, cell
    assert "train" in words
    assert "layer2.0.bn2" in words
    assert "eta: 0.02" in full_run


def test_colours_in_the_page_follow_its_scheme(full_run: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", full_run, flags=re.DOTALL)
    assert len(drawings) == 8
    names = re.findall(r'<svg role="img" aria-label="([^"]+)"', full_run)
    assert [name for name in names if names.count(name) == 2] == names
    assert len(names) == 8  # on a desktop and on a phone
    assert not re.search(r":\s*#[0-9a-f]{6}", "".join(drawings))
    used = set(re.findall(r"var\(--(\w+)\)", full_run))
    dark = re.findall(r"prefers-color-scheme: dark\) \{\s+:root \{(.*?)\}", full_run, re.DOTALL)
    assert used == set(re.findall(r"--(\w+): #", "".join(dark)))


@pytest.mark.usefixtures("no_drawings")
def test_a_stage_that_lowered_top1_is_named_and_marked(tmp_path: Path) -> None:
    page = make_page(read_run(fake_runs.statistics_that_hurt(tmp_path / "run")))
    assert "Here the statistics stage lowered it." in page


@pytest.mark.parametrize(
    ("make", "values"),
    [
        pytest.param(
            fake_runs.like_resnet50,
            ["76.08", "+0.17", "1,624,000", "86,016", "1,350", "74.7"],
            id="large",
        ),
        pytest.param(fake_runs.train_only, ["96.67", "–", "806", "96", "600", "74.7"], id="train"),
        pytest.param(fake_runs.failed_at_once, ["–", "–", "–", "96", "0", "74.7"], id="nothing"),
        pytest.param(fake_runs.killed, ["98.61", "+1.39", "816", "96", "600", "–"], id="killed"),
    ],
)
def test_what_is_unknown_is_a_dash(
    make: Callable[[Path], Path], values: list[str], tmp_path: Path
) -> None:
    run = read_run(make(tmp_path / "run"))
    assert [number.value for number in headlines(run)] == values


def gain(run: Run) -> tuple[str, str, str, str]:
    """Return what the tile on polishing shows, and its colour: green, red or grey."""
    tile = headlines(run)[1]
    return tile.label, tile.value, tile.note, tile.colour


def test_a_gain_is_that_over_the_end_of_the_schedule_and_grey_within_the_noise(
    tmp_path: Path,
) -> None:
    """Clean epochs are epochs of the schedule, so what they add is not what polishing gained."""
    noise = "within the noise of 360 validation images"
    for make, shown in {
        fake_runs.train_only: ("–", "not polished"),
        fake_runs.full_run: ("+1.39", f"{noise}; clean epochs before: +1.39"),
        fake_runs.statistics_that_hurt: ("−1.67", noise),
        fake_runs.decided: ("+0.84", f"{noise}, in 4.0 epochs; clean epochs before: +1.39"),
        fake_runs.all_discarded: ("±0.00", noise),
        fake_runs.polished_checkpoint: ("+1.00", noise),
    }.items():
        run = read_run(make(tmp_path / make.__name__))
        assert gain(run) == ("Gain by polishing", *shown, "" if shown[0] == "–" else "grey"), (
            make.__name__
        )


def test_a_run_that_ends_with_clean_epochs_claims_no_gain_by_polishing(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.end("train", 525, 0.5)
    run.end("clean", 75, 0.9)
    tile = gain(read_run(run.write()))
    assert tile[:2] == ("Gain in the clean epochs", "+40.00")
    assert tile[2:] == ("144 of 360 validation images, in 5.0 epochs", "")


@pytest.mark.usefixtures("no_drawings")
def test_polishing_is_what_comes_after_the_schedule_wherever_a_page_names_it(
    tmp_path: Path,
) -> None:
    """Top-1, gain, wall time and note all leave the clean epochs to the schedule."""
    polished = read_run(fake_runs.decided(tmp_path / "decided"))
    accuracy, shown, *_, wall_time = headlines(polished)
    assert (accuracy.note, shown.label) == ("after polishing", "Gain by polishing")
    assert wall_time.note == "3.20 s of it clean epochs, 9.60 s polishing"
    run = FakeRun(tmp_path / "clean")
    run.end("train", 525, 0.95)
    run.end("clean", 75, 0.96)
    clean_only = read_run(run.write())
    accuracy, shown, *_, wall_time = headlines(clean_only)
    assert (accuracy.note, shown.label) == ("after 600 steps", "Gain in the clean epochs")
    assert wall_time.note == "3.20 s of it clean epochs"
    note = "polishing is every stage after <em>clean</em>, with which the schedule ends."
    assert note in make_page(polished)
    assert note not in make_page(clean_only)


@pytest.mark.parametrize(("after", "colour"), [(0.95, "good"), (0.60, "bad")])
def test_a_gain_beyond_the_noise_is_green_and_a_loss_red(
    after: float, colour: str, tmp_path: Path, no_drawings: None
) -> None:
    run = FakeRun(tmp_path / "run")
    run.end("train", 600, 0.85)
    run.end("statistics", 0, after)
    found = read_run(run.write())
    assert gain(found)[3] == colour
    assert f'<div class="{colour}"><dt>Gain by polishing</dt>' in make_page(found)


@pytest.mark.parametrize(
    ("fixed", "broken", "colour"),
    [
        pytest.param(5, 0, "good", id="5 of 5 changed for the better"),
        pytest.param(4, 0, "grey", id="4 of 4 may be chance"),
        pytest.param(15, 10, "grey", id="so may 15 of 25"),
        pytest.param(2, 14, "bad", id="14 of 16 for the worse"),
    ],
)
def test_the_noise_is_that_of_the_images_that_changed(
    fixed: int, broken: int, colour: str, tmp_path: Path, no_drawings: None
) -> None:
    """McNemar: what stays as it was adds no noise, so less is seen than with counts alone."""
    run = FakeRun(tmp_path / "run")
    wrong = set(range(20))
    run.end("train", 600, 1 - len(wrong) / 360, wrong=wrong)
    now = wrong - set(range(fixed)) | set(range(100, 100 + broken))
    run.end("statistics", 0, 1 - len(now) / 360, wrong=now)
    found = read_run(run.write())
    assert gain(found)[3] == colour
    words = " ".join(" ".join(Attributes(make_page(found)).words).split())
    noise = "" if colour != "grey" else " (within the noise)"
    assert f"turned {fixed} from wrong to right and {broken} from right to wrong{noise}." in words


def test_who_discarded_all_that_polishing_did_is_not_polished(tmp_path: Path) -> None:
    run = read_run(fake_runs.all_discarded(tmp_path / "run"))
    assert headlines(run)[0].note == "after 600 steps"
    assert headlines(run)[1].value == "±0.00"


@pytest.mark.usefixtures("no_drawings")
def test_stages_that_were_discarded_are_shown_as_such_and_do_not_count(tmp_path: Path) -> None:
    run = read_run(fake_runs.decided(tmp_path / "run"))
    assert [stage.kept for stage in run.stages] == [True, True, False, True, False]
    befores = [stage.before.top1 if stage.before else None for stage in run.stages]
    assert befores == [None, 0.9583, 0.9722, 0.9722, 0.9806]
    assert [number.value for number in headlines(run)][:2] == ["98.06", "+0.84"]
    page = make_page(run)
    words = Attributes(page).words
    for word in ("clean", "ema (discarded)", "affine", "statistics (discarded)"):
        assert word in words
    assert '<td data-name="Held out"><i>97.00 →</i> 96.00 %</td>' in page
    assert "Held out: top-1 on 200 training images that no stage trains or measures on" in page
    assert "lowered it" not in page
    figure = Figure()
    draw_accuracy(figure, run)
    ends = figure.axes[1]
    below: dict[float, list[str]] = {}
    for text in ends.texts:
        if isinstance(text, Annotation) and text.xy[1] == 0:
            below.setdefault(text.xy[0], []).append(text.get_text())
    assert below == {
        0: ["train"],
        1: ["clean", "+1.39", "held out", "+2.00", "kept"],
        2: ["ema", "−1.11", "held out", "−1.00", "discarded"],
        3: ["affine", "+0.84", "held out", "+1.00", "kept"],
        4: ["statistics", "−1.67", "held out", "−1.00", "discarded"],
    }
    assert np.asarray(ends.lines[0].get_xdata()).tolist() == [0, 1, 3]  # the line of what was kept
    hollow = [line.get_markerfacecolor() == "none" for line in ends.lines[1:]]
    assert hollow == [False, False, True, False, True]


@pytest.mark.usefixtures("no_drawings")
@pytest.mark.parametrize(
    ("make", "explained"),
    [
        pytest.param(fake_runs.train_only, [], id="not polished"),
        pytest.param(fake_runs.full_run, ["clean", "statistics"], id="the quickstart's"),
        pytest.param(fake_runs.decided, ["clean", "ema", "affine", "statistics"], id="all"),
        pytest.param(fake_runs.polished_checkpoint, ["statistics"], id="a checkpoint"),
    ],
)
def test_only_stages_that_a_run_has_are_explained(
    make: Callable[[Path], Path], explained: list[str], tmp_path: Path
) -> None:
    page = make_page(read_run(make(tmp_path / "run")))
    assert re.findall(r"In <em>(\w+)</em>, ", page) == explained
    assert ("Held out" in page) == (len(explained) == 4)
    assert ("is the checkpoint before polishing" in page) == (len(explained) == 1)


def test_names_are_shown_and_never_interpreted(tmp_path: Path) -> None:
    evil = "<script>alert('&')</script> $x_1$"
    run = FakeRun(tmp_path / "run<b>", name=evil)
    run.train(0, 2)
    run.end("train", 2, 0.5)
    run.drift([evil])
    run.end("statistics", 0, 0.6)
    page = write_report(run.write(versions={evil: evil})).read_text(encoding="utf-8")
    assert Attributes(page).words.count(evil) == 3  # the heading, and a version's two sides
    assert f"…{evil[-21:]}" in Attributes(page).words  # the layer, shortened
    assert "script" not in Attributes(page).tags
    assert "name: &lt;script&gt;" in page


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


def test_names_of_lines_stay_apart_in_a_font_that_is_a_quarter_wider(tmp_path: Path) -> None:
    """A page is laid out with the fonts of the machine that trained and read on another."""
    figure = Figure((9, 4))
    draw_loss(figure, read_run(fake_runs.full_run(tmp_path / "run")))
    figure.canvas.draw()
    words = ("↑ Loss", "training", "validation")
    boxes = {
        text.get_text(): text.get_window_extent()
        for text in figure.findobj(Text)
        if text.get_text() in words
    }
    for left, right in itertools.pairwise(words):
        assert boxes[right].x0 > boxes[left].x0 + 1.25 * boxes[left].width


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


def test_without_matplotlib_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fake_runs.failed_at_once(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match="pip install matplotlib"):
        write_report(folder)


def test_importing_the_report_does_not_import_matplotlib() -> None:
    code = "import sys, largebatch.report; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_times_are_written_in_the_unit_that_suits_them() -> None:
    assert [duration(s) for s in (0.0, 59.96, 119.9, 120, 7_200)] == [
        "0 s", "60.0 s", "120 s", "2.00 min", "2.00 h",
    ]  # fmt: skip


@pytest.mark.usefixtures("no_drawings")
def test_the_note_of_a_stage_is_on_the_page_until_it_runs_again(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.end("train", 600, 0.9)
    run.add("note", stage="affine", step=660, text="the loss became <nan>; lower the rate")
    run.add("note", stage="affine", step=660, text="the loss rose too")
    run.add("note", stage="affine", step=660, text="the loss rose too")
    run.end("affine", 60, 0.1)
    page = make_page(read_run(run.write()))
    assert page.count("<em>affine</em>: the loss became &lt;nan&gt;; lower the rate.") == 1
    assert page.count("<em>affine</em>: the loss rose too.") == 1
    run.start(600)
    run.folder = tmp_path / "resumed"
    assert read_run(run.write()).notes == ()


@pytest.mark.usefixtures("no_drawings")
def test_of_many_notes_the_last_are_on_the_page_and_the_others_counted(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    for step in range(60):
        run.add("note", stage="train", step=step, text=f"update skipped: step {step}")
    run.end("train", 600, 0.9)
    page = make_page(read_run(run.write()))
    assert page.count("update skipped") == 50
    assert "step 59." in page
    assert "10 earlier notes" in page


def test_sections_that_a_run_does_not_have_are_absent(tmp_path: Path) -> None:
    """What an earlier part of the run left as a file goes, too."""
    folder = fake_runs.failed_at_once(tmp_path / "run")
    (folder / "recipe.yaml").unlink()
    (folder / "drift.png").write_bytes(b"of another part")
    page = write_report(folder).read_text(encoding="utf-8")
    assert re.findall("<h2>(.*?)</h2>", page) == ["Environment"]
    assert [path.name for path in folder.glob("*.png")] == ["report.png"]


@pytest.mark.long
def test_a_report_of_a_folder_that_is_only_read_is_written_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = fake_runs.paused(tmp_path / "run"), tmp_path / "new" / "reports"
    before = {path.name: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    assert main(["report", str(folder), "--out", str(out)]) == DONE
    assert capsys.readouterr().out == f"{out}/report.html\n"
    assert {path.name for path in out.iterdir()} == {
        *("report.html", "report.png", "loss.png", "throughput.png")
    }
    assert {path.name: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())} == before

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("largebatch.report.page.save_png", refuse)
    assert main(["report", str(folder)]) == USER
    assert capsys.readouterr().err == (
        f"largebatch: {folder}: the report cannot be written there: Read-only file system; choose "
        "a folder for it with: largebatch report RUN --out DIR\n"
    )
