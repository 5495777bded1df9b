"""The colours of pages are readable."""

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


def test_every_colour_of_text_and_marks_has_enough_contrast() -> None:
    found = {
        name: contrast(colour, PALETTE["paper"])
        for name, colour in PALETTE.items()
        if name not in BACKGROUNDS
    }
    assert {name for name, value in found.items() if value < ENOUGH} == set()
    assert all(contrast(PALETTE[name], PALETTE["tint"]) >= ENOUGH for name in ("ink", "muted"))
