"""Which sections a key of a recipe may hold, and the words that choose one of several."""

from collections.abc import Iterator
from typing import get_args

from pydantic.fields import FieldInfo

from largebatch.recipe.sections import Section


def sections_of(annotation: object) -> list[type[Section]]:
    """Return the sections a field may hold: one, or several for a union chosen by one key.

    >>> from largebatch.recipe.recipe import Recipe
    >>> [section.__name__ for section in sections_of(Recipe.model_fields["optimizer"].annotation)]
    ['LARS', 'SGD', 'Shampoo', 'ScheduleFree', 'LAMB']
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_of(part)]


CHOOSERS = ("kind", "source")
"""The keys whose words choose one section of a union: `source` that of the data."""


def kinds_of(section: type[Section]) -> tuple[str, ...]:
    """Return the words that choose this section in its union; none if it stands in no union.

    >>> from largebatch.recipe.recipe import Recipe
    >>> kinds_of(sections_of(Recipe.model_fields["optimizer"].annotation)[0]), kinds_of(Recipe)
    (('lars',), ())
    """
    chooser = chooser_of(section)
    return () if chooser is None else get_args(section.model_fields[chooser].annotation)


def chooser_of(section: type[Section]) -> str | None:
    """Return the key that chooses this section in its union; None if it stands in no union."""
    return next((key for key in CHOOSERS if key in section.model_fields), None)


def every_field(
    section: type[Section], prefix: str = ""
) -> Iterator[tuple[str, type[Section], FieldInfo]]:
    """Yield the dotted key of every field of a section and of those below it, and its owner."""
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        yield dotted, section, field
        for below in sections_of(field.annotation):
            yield from every_field(below, f"{dotted}.")
