"""Pages: tables, charts, legend and script, as a browser would read them, and their colours."""

import math
import re
from pathlib import Path

import pytest
from html_pages import Parsed

from largebatch.errors import LargebatchError
from largebatch.report.pages import (
    Code,
    Column,
    Facts,
    Headline,
    Line,
    Page,
    PageSection,
    Panel,
    Table,
    columns_over,
    line_chart,
    series,
)
from largebatch.report.style import PALETTE

HOSTILE = "<img src=x onerror=alert(1)>"


def made(**page: object) -> Page:
    """A page of three policies: one without a value, one of a hostile name."""
    looks = [series(place, label) for place, label in enumerate(("a", "b", HOSTILE))]
    column = columns_over(looks)
    table = Table(
        name="policies",
        columns=[
            column("Policy", lambda one: one.label, None),
            column("Top-1, %", lambda one: [91.5, math.nan, 93.25][one.place or 0], ".2f"),
            column("Never", lambda _: None, ".2f"),
            Column("Seeds", [1_000, 2, 3], ",d", details=["x", "", ""]),
        ],
        series=looks,
        printed={"Policy", "Top-1, %"},
    )
    x = [0.0, 1.0, 2.0]
    ends = {"low": [0, 1], "high": [2, 3]}
    lines = [Line(series=one, x=x, y=[1, 10, 100]) for one in looks]
    stages = Line(series=looks[0], x=["train", "clean"], y=[1, 2], **ends)  # type: ignore[arg-type]
    band = Line(series=looks[1], x=x[:2], y=[1, 2], points=False, **ends)  # type: ignore[arg-type]
    empty = Line(series=looks[2], x=[], y=[])
    panels = [
        Panel(lines=lines, x="Epoch", y="Loss", log="y"),
        Panel(lines=[stages, empty], x="Stage", y="Top-1, %"),
        Panel(lines=[band, empty], x="Epoch", y="Top-1, %", from_zero=True),
    ]
    fields = {
        "title": "Policies",
        "findings": ["a is best."],
        "legend": ("Policies", looks),
        "sections": [
            PageSection(title="Table", parts=[table], notes=["Means."]),
            PageSection(title="Empty"),
            PageSection(title="Chart", parts=[line_chart("loss", *panels, caption="The loss.")]),
        ],
        "source": "nothing",
    }
    return Page(**(fields | page))  # type: ignore[arg-type]


def test_a_page_has_its_tables_without_empty_columns_and_its_series_everywhere() -> None:
    page = Parsed(made().html())
    assert page.tables == {
        "policies": [
            ["Policy", "Top-1, %", "Seeds"],
            ["a", "91.50", "1,000x"],
            ["b", "–", "2"],
            [HOSTILE, "93.25", "3"],
        ]
    }
    assert page.headings == ["Policies", "Table", "Chart"]
    assert (
        page.series_of("tr") == page.series_of("button") == page.series_of("g") == {"0", "1", "2"}
    )
    cells = [found for tag, found in page.tags if tag == "td"]
    assert [one.get("data-number") for one in cells] == ["91.5", "1000", None, "2", "93.25", "3"]
    assert [one for one in cells if "data-missing" in one] == [cells[2]]
    assert not [tag for tag, _ in page.tags if tag == "img"]  # of the hostile name


def test_charts_have_names_of_their_own() -> None:
    svgs = re.findall(r"<svg role.*?</svg>", made().html(), flags=re.DOTALL)
    assert [re.search('class="(.*?)"', svg)[1] for svg in svgs] == ["loss"]  # type: ignore[index]
    ids = re.findall(r'\bid="(.*?)"', svgs[0])
    assert len(ids) == len(set(ids))


def test_a_page_loads_nothing_and_has_a_script_only_if_it_has_a_table_that_sorts() -> None:
    with_script = made().html()
    fixed = Table(columns=[Column("Stage", ["train"]), Column("Top-1", ["98"], before=["97"])],
                  sortable=False)  # fmt: skip
    plain = made(
        legend=("", ()),
        headlines=[Headline("Top-1", "98.61", "%", "after polishing", "good")],
        sections=[
            PageSection(title="A", parts=[fixed, Facts({"torch": "2"}), Code("r", "<x>"), "n"])
        ],
    ).html()
    for html in (with_script, plain):
        assert "default-src 'none'" in html
        assert not re.search(r'(src|href)="(?!#|data:)', html)
    assert ("<script>" in with_script, "<script>" in plain) == (True, False)
    assert "script-src" not in plain
    assert Parsed(plain).tables == {"": [["Stage", "Top-1"], ["train", "97 → 98"]]}
    assert "&lt;x&gt;" in plain


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LargebatchError, match="page.html"):
        made(sections=[]).write(tmp_path / "file" / "page.html")


BACKGROUNDS = ("paper", "tint", "rule")
ENOUGH = 4.5
"""WCAG 2.2, success criterion 1.4.3, for text."""


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2.2."""
    parts = [value / 255 for value in bytes.fromhex(colour[1:])]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_every_colour_of_text_and_marks_has_enough_contrast() -> None:
    found = {
        name: contrast(colour, PALETTE["paper"])
        for name, colour in PALETTE.items()
        if name not in BACKGROUNDS
    }
    assert {name for name, value in found.items() if value < ENOUGH} == set()
    assert all(contrast(PALETTE[name], PALETTE["tint"]) >= ENOUGH for name in ("ink", "muted"))
