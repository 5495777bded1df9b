"""Say what a key of a recipe means, from the recipe's own documentation."""

import difflib
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from largebatch.errors import RecipeError
from largebatch.loading import kind_of, sections_of
from largebatch.recipe import Recipe, Section

_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def explain(key: str) -> str:
    """Return the meaning, values and default of a dotted key; an empty key lists the sections.

    Raises RecipeError for a key that no recipe has, with the nearest one.

    >>> print(explain("optimizer.eta"))
    optimizer.eta (kind: lars): number > 0, default 0.001
        Trust coefficient: |step| / |weight| at rate 1, before momentum and decay.
    """
    if not key:
        return _list_fields("", Recipe)
    found = [(section, field) for name, section, field in _every_field(Recipe, "") if name == key]
    if not found:
        known = list(dict.fromkeys(name for name, _, _ in _every_field(Recipe, "")))
        close = difflib.get_close_matches(key, known, n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "`largebatch explain` lists them"
        raise RecipeError(f"no recipe has the key {key!r}; {hint}")
    return "\n\n".join(_describe(key, section, field) for section, field in found)


def _every_field(
    section: type[Section], prefix: str
) -> Iterator[tuple[str, type[Section], FieldInfo]]:
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        yield dotted, section, field
        for below in sections_of(field.annotation):
            yield from _every_field(below, f"{dotted}.")


def _describe(key: str, section: type[Section], field: FieldInfo) -> str:
    below = sections_of(field.annotation)
    if below:
        optional = not field.is_required() and field.default is None
        parts = [_list_fields(f"{key}.", one) for one in below]
        return "\n\n".join([*parts, *([f"{key} may be left out, or null"] if optional else [])])
    kind = kind_of(section)
    owner = f" (kind: {kind})" if kind else ""
    name = key.rpartition(".")[2]
    values = _in_words(section.model_json_schema()["properties"][name])
    default = "required" if field.is_required() else f"default {json.dumps(field.default)}"
    text = textwrap.indent(textwrap.fill(field.description or "", 92), "    ")
    return f"{key}{owner}: {values}, {default}\n{text}".rstrip()


def _list_fields(prefix: str, section: type[Section]) -> str:
    kind = kind_of(section)
    head = (section.__doc__ or "").strip().splitlines()[0]
    lines = [f"kind: {kind}: {head}" if kind else head]
    width = max(len(name) for name in section.model_fields) + len(prefix) + 2
    for name, field in section.model_fields.items():
        below = sections_of(field.annotation)
        text = field.description or (below[0].__doc__ if len(below) == 1 else None) or ""
        first = textwrap.shorten(text.strip().split(". ")[0], 110 - width, placeholder=" ...")
        lines.append(f"  {prefix + name:<{width}}{first}".rstrip())
    return "\n".join(lines)


def _in_words(schema: dict[str, Any]) -> str:
    """Say which values a JSON schema allows."""
    if "anyOf" in schema:
        return " or ".join(_in_words(part) for part in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if "prefixItems" in schema:
        return f"[{', '.join(_in_words(part) for part in schema['prefixItems'])}]"
    bounds = [f"{sign} {schema[bound]:g}" for bound, sign in _BOUNDS.items() if bound in schema]
    return " ".join([schema.get("type", "any value"), *bounds])
