"""The report of every kind of run folder: complete, self-contained, true to the log."""

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_runs
import matplotlib as mpl
import pytest
from fake_runs import FakeRun
from html_pages import Parsed
from PIL import Image

from largebatch.cli.main import DONE, USER, main
from largebatch.report import write_report
from largebatch.report.page import charts_of, describe_waits, headlines, make_page
from largebatch.report.pages import Headline
from largebatch.report.run import Run, read_run

Make = Callable[[Path], Path]


@pytest.fixture
def no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the drawings out of a page, which take all its time, where its words are read."""
    monkeypatch.setattr("largebatch.report.pages.make_svg", lambda *_, **__: "<svg></svg>")


def more(make: Make) -> Any:  # noqa: ANN401 -- pytest's own type
    """Return a kind of run with nothing in its figures that another kind has not."""
    return pytest.param(make, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "make",
    [
        fake_runs.full_run,
        fake_runs.failed_at_once,
        *map(
            more,
            [
                fake_runs.interrupted_after_one_step, fake_runs.polished_checkpoint,
                fake_runs.train_only, fake_runs.statistics_that_hurt, fake_runs.like_resnet50,
                fake_runs.resumed, fake_runs.interrupted_while_clean, fake_runs.diverged,
                fake_runs.interrupted_after_a_skipped_step, fake_runs.killed, fake_runs.decided,
            ],
        ),
    ],
)  # fmt: skip
def test_every_kind_of_run_has_a_page_that_loads_nothing_and_figures_of_what_it_has(
    make: Make, tmp_path: Path
) -> None:
    folder = make(tmp_path / "run")
    before = dict(mpl.rcParams)
    page = write_report(folder)
    assert page == folder / "report.html"
    drawn = charts_of(read_run(folder))
    with Image.open(folder / "report.png") as image:
        image.verify()
        assert image.width == 1600
    text = page.read_text(encoding="utf-8")
    found = Parsed(text)
    assert not {tag for tag, _ in found.tags} & {"script", "link", "img", "iframe", "object"}
    assert "http" not in text.replace("http-equiv", "")
    ids = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert set(drawn) <= set(ids)
    references = re.findall(r'(?:href|src)="([^"]*)"|url\((.*?)\)', text)
    assert {"".join(one) for one in references} <= {f"#{one}" for one in ids}
    assert dict(mpl.rcParams) == before


@pytest.mark.usefixtures("no_drawings")
def test_the_page_shows_the_numbers_of_the_run(tmp_path: Path) -> None:
    run = read_run(fake_runs.full_run(tmp_path / "run"))
    values = [number.value for number in headlines(run)]
    assert values == ["98.61", "+1.39", "806", "96", "600", "74.7"]
    text = make_page(run)
    stages = Parsed(text).tables[""]
    assert stages[0] == ["Stage", "Updates", "Time", "Top-1", "Change", "Top-5", "Loss"]
    assert stages[2] == [
        *("clean", "75", "3.20 s", "95.83 → 97.22 %", "+1.39"),
        *("100.00 %", "0.2834 → 0.2556"),
    ]
    for shown in ("4f2a9c1d5e6b+", "0.75 GiB", "eta: 0.02", *values):
        assert shown in text, shown


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
def test_an_unknown_number_is_a_dash(make: Make, values: list[str], tmp_path: Path) -> None:
    run = read_run(make(tmp_path / "run"))
    assert [number.value for number in headlines(run)] == values


def gain(run: Run) -> Headline:
    return list(headlines(run))[1]


@pytest.mark.parametrize(
    ("make", "value"),
    [
        pytest.param(fake_runs.train_only, "–", id="not polished"),
        pytest.param(fake_runs.interrupted_while_clean, "–", id="clean epochs alone"),
        pytest.param(fake_runs.full_run, "+1.39", id="without the clean epochs"),
        pytest.param(fake_runs.statistics_that_hurt, "−1.67", id="a loss"),
        pytest.param(fake_runs.decided, "+0.84", id="stages kept"),
        pytest.param(fake_runs.all_discarded, "±0.00", id="all discarded"),
        pytest.param(fake_runs.polished_checkpoint, "+1.00", id="a checkpoint"),
    ],
)
def test_a_gain_is_that_over_the_end_of_the_schedule_and_grey_within_the_noise(
    make: Make, value: str, tmp_path: Path
) -> None:
    """Clean epochs are epochs of the schedule, so what they add is not what polishing gained."""
    found = gain(read_run(make(tmp_path / "run")))
    assert found.value == value
    assert found.colour == ("" if value == "–" else "grey")


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
    """McNemar: images that stay as they were add no noise."""
    run = FakeRun(tmp_path / "run")
    wrong = set(range(20))
    run.end("train", 600, 1 - len(wrong) / 360, wrong=wrong)
    now = wrong - set(range(fixed)) | set(range(100, 100 + broken))
    run.end("statistics", 0, 1 - len(now) / 360, wrong=now)
    found = read_run(run.write())
    assert gain(found).colour == colour
    noise = r" \(within the noise\)" if colour == "grey" else ""
    assert re.search(
        rf"turned {fixed} from wrong to right and {broken} from right to wrong{noise}\.",
        make_page(found),
    )


@pytest.mark.usefixtures("no_drawings")
def test_stages_that_were_discarded_are_shown_as_such_and_do_not_count(tmp_path: Path) -> None:
    run = read_run(fake_runs.decided(tmp_path / "run"))
    assert [stage.kept for stage in run.stages] == [True, True, False, True, False]
    befores = [stage.before.after.top1 if stage.before else None for stage in run.stages]
    assert befores == [None, 0.9583, 0.9722, 0.9722, 0.9806]
    assert [number.value for number in headlines(run)][:2] == ["98.06", "+0.84"]
    titles, *rows = Parsed(make_page(run)).tables[""]
    held_out = titles.index("Held out")
    assert [(row[0], row[held_out]) for row in rows] == [
        ("train", "–"),
        ("clean", "95.00 → 97.00 %"),
        ("ema (discarded)", "97.00 → 96.00 %"),
        ("affine", "97.00 → 98.00 %"),
        ("statistics (discarded)", "98.00 → 97.00 %"),
    ]


@pytest.mark.usefixtures("no_drawings")
def test_the_causes_of_a_bad_run_are_a_table_with_links_to_their_charts(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", clean_steps=0)
    run.train(0, 600)
    run.evaluate("train", 15, 0.2)
    run.records[-1]["loss"] = 114.0
    run.end("train", 600, 0.95, wrong=range(18))
    page = make_page(read_run(fake_runs.give_recipe(run.write())))
    titles, row = Parsed(page).tables[""][:2]
    assert (len(titles), row[0]) == (3, "statistics off")
    assert "114" in row[1]
    assert '<a href="#loss">' in page


@pytest.mark.parametrize(
    ("data", "reduction", "workers", "shown"),
    [
        pytest.param(0.034, 0.25, 2, ["3.4 %", "25 %"], id="no"),
        pytest.param(0.0, 0.0, 1, ["0 %"], id="alone"),
        pytest.param(0.5, 0.1, 2, ["50 %", "10 %", "2 times"], id="yes"),
    ],
)
def test_a_page_says_whether_the_run_was_input_bound(
    data: float, reduction: float, workers: int, shown: list[str], tmp_path: Path
) -> None:
    """The first update, which warms up, does not count."""
    made = FakeRun(tmp_path / "run", workers=workers)
    made.train(0, 300)
    for record in made.records[1:]:
        whole = record["step_seconds"]
        record |= {"data_seconds": data * whole, "reduction_seconds": reduction * whole}
    made.records[1] |= {"step_seconds": 1.2, "data_seconds": 1.2, "reduction_seconds": 0.0}
    run = read_run(made.write())
    words = describe_waits(run)
    assert re.findall(r"[\d.]+ (?:%|times)", words) == shown
    assert words.startswith("Input bound") == (data >= 0.1)
    assert list(headlines(run))[2].note.endswith("input bound") == (data >= 0.1)


def test_names_are_shown_and_never_interpreted(tmp_path: Path) -> None:
    evil = "<script>alert('&')</script> $x_1$"
    run = FakeRun(tmp_path / "run<b>", name=evil)
    run.classes = [f'{evil}" onerror="{number}' for number in range(3)]
    run.train(0, 2)
    run.end("train", 2, 0.5, wrong=(3, 13, 14))
    run.drift([evil])
    run.end("statistics", 0, 0.6)
    page = write_report(run.write(versions={evil: evil})).read_text(encoding="utf-8")
    assert Parsed(page).headings[0] == evil
    assert not [tag for tag, _ in Parsed(page).tags if tag == "script"]
    assert 'onerror="' not in page
    assert Parsed(page).tables["drift"][1][0] == evil


def test_a_change_of_the_batch_and_of_the_image_size_is_on_the_page(tmp_path: Path) -> None:
    change = {"step": 300, "position": 300 * 96, "global_batch": 192, "lr_factor": 1.0}
    run = FakeRun(tmp_path / "run", clean_steps=0)
    sizes = [{"end": 200, "image_size": 96}, {"end": 600, "image_size": 128}]
    run.plan |= {"batch_changes": [change], "sizes": sizes}
    run.curve(600, best=0.97)
    run.end("train", 600, 0.9667)
    page = make_page(read_run(run.write()))
    assert "; 192 from step 300" in page
    assert "60.1 epochs" in page  # 300 updates of 96 and 300 of 192 images, of 1,437
    for text in ("batch 192", "128 px"):
        assert page.count(text) >= 2  # beside the losses and the speed
    assert "96 px" not in page


@pytest.mark.usefixtures("no_drawings")
def test_the_gap_and_the_workers_of_each_part_are_on_the_page(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.plan = run.plan | {"workers": 4}
    run.start(300)
    run.end("train", 600, 0.9)
    gap = {"samples": 1437, "top1": 0.999, "loss": 0.15, "gap": 0.25}
    run.add("generalization_gap", stage="train", step=600, **gap)
    page = make_page(read_run(run.write()))
    assert re.search(r"gap is \+0\.2500.*0\.1500, on 1,437 images.*99\.90 %", page)
    assert "2, then 4 workers" in page


@pytest.mark.usefixtures("no_drawings")
def test_every_note_of_a_stage_is_on_the_page_until_it_runs_again(tmp_path: Path) -> None:
    """Two failures are two notes; a remark that each part repeats is one."""
    run = FakeRun(tmp_path / "run")
    run.end("train", 600, 0.9)
    for step in (610, 620):
        run.add("note", kind="tracker", stage="affine", step=step, text="W&B is lost")
    for step in (610, 660, 660):
        run.add("note", stage="affine", step=step, text="<cannot> be compiled")
    run.end("affine", 60, 0.1)
    found = read_run(run.write())
    assert [note.step for note in found.notes if note.kind == "tracker"] == [610, 620]
    page = make_page(found)
    assert page.count("W&amp;B is lost") == 2
    assert page.count("&lt;cannot&gt; be compiled") == 1
    run.start(600)
    run.folder = tmp_path / "resumed"
    assert [note.step for note in read_run(run.write()).notes] == [610, 620]  # still happened


def test_sections_that_a_run_does_not_have_are_absent(tmp_path: Path) -> None:
    folder = fake_runs.failed_at_once(tmp_path / "run")
    (folder / "recipe.yaml").unlink()
    page = write_report(folder).read_text(encoding="utf-8")
    assert Parsed(page).headings[1:] == ["Environment"]
    assert [path.name for path in folder.glob("*.png")] == ["report.png"]


def test_a_report_of_a_folder_that_is_only_read_is_written_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = fake_runs.failed_at_once(tmp_path / "run"), tmp_path / "new" / "reports"
    before = {path.name: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    assert main(["report", str(folder), "--out", str(out)]) == DONE
    assert capsys.readouterr().out == f"{out}/report.html\n"
    assert {path.name for path in out.iterdir()} == {"report.html", "report.png"}
    assert {path.name: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())} == before

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("largebatch.report.page.save_png", refuse)
    assert main(["report", str(folder)]) == USER
    assert f"{folder}: " in capsys.readouterr().err
