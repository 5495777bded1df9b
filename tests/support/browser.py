"""A real browser to test written pages: the system's Chromium, without a network."""

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, Route, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

_PLACE = """([section, label, row]) => {
  const root = document.querySelector(`#${section} [data-root-id]`).dataset.rootId;
  const view = Bokeh.index.get_by_id(root);
  const named = view.model.renderers.filter((one) => one.name === label);
  const marks = named.find((one) => one.glyph.type === "Scatter" && one.visible);
  const { x, y } = marks.glyph;
  const data = marks.data_source.data;
  const box = view.canvas_view.el.getBoundingClientRect();
  return [
    box.x + view.frame.x_scale.compute(data[x.field][row]),
    box.y + view.frame.y_scale.compute(data[y.field][row]),
  ];
}"""
"""Where on the screen a series has its point of this row."""


class Axis(NamedTuple):
    """What an axis shows."""

    title: str
    start: float
    end: float


@contextmanager
def started_browser() -> Iterator[Browser]:
    """Start Chromium; skip the test where there is none."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, path: Path, *, width: int = 1280, scheme: Literal["light", "dark"] = "light"
) -> Iterator[Page]:
    """Open a page; assert at its end that it requested nothing, logged no error and fits in."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, offline=True, color_scheme=scheme
    )
    errors: list[str] = []
    requests: list[str] = []

    def answer(route: Route) -> None:
        requests.append(route.request.url)
        if len(requests) == 1:
            route.continue_()  # the page itself
        else:
            route.abort()

    context.set_default_timeout(120_000)  # milliseconds, on a busy machine
    context.route("**/*", answer)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type != "log" else None)
    page.goto(path.as_uri())
    page.wait_for_function("() => globalThis.Bokeh === undefined || Bokeh.documents.length > 0")
    _settle(page)
    yield page
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    context.close()
    assert widths[0] <= widths[1]
    assert requests == [path.as_uri()]
    assert errors == []


def _settle(page: Page) -> None:
    """Wait until what was done to the page is drawn."""
    page.wait_for_function("() => (globalThis.Bokeh?.documents ?? []).every((one) => one.is_idle)")
    page.evaluate(
        "() => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))"
    )


def point_at(page: Page, section: str, label: str, row: int) -> list[str]:
    """Point at one of a series' points in the chart of a section; return all tool tips."""
    page.mouse.move(0, 0)
    page.wait_for_function("() => document.querySelector('.bk-Tooltip') === null")
    page.locator(f"#{section}").scroll_into_view_if_needed()
    _settle(page)
    x, y = page.evaluate(_PLACE, [section, label, row])
    page.mouse.move(x - 3, y - 3)
    page.mouse.move(x, y)
    tips = page.locator(".bk-Tooltip")
    tips.first.wait_for()
    texts = tips.evaluate_all(
        """(tips) => tips.map((tip) => [...tip.shadowRoot.children]
            .filter((part) => part.tagName !== "STYLE").map((part) => part.innerText).join(" "))"""
    )
    return [" ".join(text.split()) for text in texts]


def shown_axis(page: Page, section: str) -> Axis:
    """Return what the horizontal axis of the chart of a section shows."""
    _settle(page)
    return Axis(
        *page.evaluate(
            """(section) => {
              const root = document.querySelector(`#${section} [data-root-id]`).dataset.rootId;
              const chart = Bokeh.index.get_by_id(root).model;
              return [chart.below[0].axis_label, chart.x_range.start, chart.x_range.end];
            }""",
            section,
        )
    )


def colours_of(page: Page, section: str) -> set[str]:
    """Return the colours, such as #0068a8, of the pixels of a section's chart."""
    _settle(page)
    drawn = page.locator(f"figure#{section}").screenshot()
    with Image.open(io.BytesIO(drawn)) as image:
        found = image.convert("RGB").getcolors(image.width * image.height) or []
    return {f"#{bytes(colour).hex()}" for _, colour in found if isinstance(colour, tuple)}


def titles_of(page: Page, table: str) -> list[str]:
    """Return the titles of the columns of a table."""
    return page.locator(f"#{table} thead th").all_inner_texts()


def rows_of(page: Page, table: str) -> list[list[str]]:
    """Return the cells of the visible rows of a table, from the top down."""
    rows = page.locator(f"#{table} tbody tr:visible")
    found: list[list[str]] = rows.evaluate_all(
        "(rows) => rows.map((row) => [...row.cells].map((it) => it.innerText))"
    )
    return found


def columns_in_sight(page: Page, table: str) -> list[str]:
    """Return the titles of the columns of a table that are not cut off."""
    _settle(page)
    edge = page.locator(f"#{table}").evaluate("(one) => one.getBoundingClientRect().right + 1")
    headers = page.locator(f"#{table} thead th").all()
    return [
        one.inner_text()
        for one in headers
        if one.evaluate("(header) => header.getBoundingClientRect().right") <= edge
    ]
