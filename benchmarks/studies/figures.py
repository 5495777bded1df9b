"""Figures of documents: SVG files whose colours follow the reader's, light or dark."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.report.style import COLOURS, INK, MUTED, PAPER, RULE, make_svg

if TYPE_CHECKING:
    from largebatch.report.style import Figure

DARK = {
    INK: "#e6eaf0",
    MUTED: "#9aa5b1",
    RULE: "#343b44",
    PAPER: "#14181d",
    COLOURS["train"]: "#5aa9e6",
    COLOURS["clean"]: "#f0953f",
    COLOURS["ema"]: "#c9b53a",
    COLOURS["swa"]: "#a493f0",
    COLOURS["affine"]: "#dd7fb5",
    COLOURS["statistics"]: "#3dbf95",
}
"""Colours on a dark page, by those on a light one."""


def save_svg(path: Path, draw: Callable[["Figure"], None], *, size: tuple[float, float]) -> None:
    """Write a drawing of `size` points; text of 10 points stays readable on a phone up to 480."""
    svg = make_svg(draw, size=size, name=path.stem, label=path.stem.replace("_", " "))
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        "style=\"font-family:'Helvetica Neue',Arial,sans-serif\" "
    )
    style = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"
    svg = re.sub(r"<svg ([^>]*>)", lambda found: head + found[1] + style, svg, count=1)
    width, height = size
    box = f'height="{height + 12}pt" viewBox="0 -6 {width} {height + 12}"'  # room around the title
    path.write_text(re.sub(r'height="[^"]*" viewBox="[^"]*"', box, svg, count=1), encoding="utf-8")
