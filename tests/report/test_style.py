"""The colours of pages are readable."""

from largebatch.report.pages import STRONGEST
from largebatch.report.style import PALETTE

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


def mixed(colour: str, paper: str, percent: float) -> str:
    """CSS: color-mix(in srgb, colour percent, paper)."""
    both = zip(bytes.fromhex(colour[1:]), bytes.fromhex(paper[1:]), strict=True)
    return "#" + bytes(round((percent * a + (100 - percent) * b) / 100) for a, b in both).hex()


def test_every_colour_of_text_and_marks_has_enough_contrast() -> None:
    found = {
        name: contrast(colour, PALETTE["paper"])
        for name, colour in PALETTE.items()
        if name not in BACKGROUNDS
    }
    assert {name for name, value in found.items() if value < ENOUGH} == set()
    assert all(contrast(PALETTE[name], PALETTE["tint"]) >= ENOUGH for name in ("ink", "muted"))


def test_numbers_on_a_coloured_cell_have_enough_contrast() -> None:
    """Numbers of a transfer matrix, at the strongest colour."""
    cell = mixed(PALETTE["clean"], PALETTE["paper"], STRONGEST)
    assert contrast(PALETTE["ink"], cell) >= ENOUGH
