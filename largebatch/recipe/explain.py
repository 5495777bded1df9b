"""The meaning of a recipe's keys, from the schema and docstrings of its sections."""

import json
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from largebatch.errors import LONGEST_NAME, RecipeError, clip, nearest
from largebatch.formatting import table
from largebatch.recipe.problems import meant_key
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import (
    CHOOSERS,
    Section,
    chooser_of,
    every_field,
    kinds_of,
    sections_of,
)

_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Meaning:
    """Meaning of a key, in all kinds of its section that share it."""

    kinds: tuple[str, ...]
    """The kinds; none if the section has no kinds, or for `kind` itself."""

    chooser: str
    """The key that chooses one of them."""

    values: str
    """Allowed values, and the default."""

    text: str


def explain(key: str) -> str:
    """Return the meaning, values and default of a dotted key; an empty key lists the sections.

    Raises RecipeError for a key that no recipe has, with the nearest one.

    >>> print(explain("optimizer.eta"))
    optimizer.eta (kind: lars): number > 0 and <= 3e+38, default 0.001
        Trust coefficient: |step| / |weight| at learning rate 1, before momentum and decay.
    """
    if not key:
        return _list_fields("", Recipe)
    blocks = [_block(key, meaning) for meaning in meanings(key)]
    lists = [_list_fields(f"{key}.", section) for section in sections_below(key)]
    return "\n\n".join([*blocks, *lists])


def meanings(key: str, root: type[Section] = Recipe) -> list[Meaning]:
    """Return the meanings of a dotted key; kinds that share a meaning are listed together.

    `root` is the section with the key: a recipe, or the file of a study. Raises RecipeError for a
    key that it does not have, with the nearest one.
    """
    fields = _find(key, root)
    above, _, last = key.rpartition(".")
    if last in CHOOSERS:
        words = " | ".join(kind for section, _ in fields for kind in kinds_of(section))
        text = " ".join(field.description for _, field in fields if field.description)
        defaults = [field.default for _, field in fields if not field.is_required()]
        need = f"default {defaults[0]}" if defaults else "required"
        return [Meaning((), last, f"{words}, {need}", text or f"See: largebatch explain {above}")]
    owners: dict[tuple[str, str], list[str]] = {}
    chooser = chooser_of(fields[0][0]) or "kind"
    for section, field in fields:
        meaning = (_values(section, field, last), field.description or "")
        owners.setdefault(meaning, []).extend(kinds_of(section))
    return [Meaning(tuple(kinds), chooser, *meaning) for meaning, kinds in owners.items()]


def sections_below(key: str, root: type[Section] = Recipe) -> list[type[Section]]:
    """Return the sections that a dotted key may hold, one for each kind; `root` for an empty key.

    Raises as `meanings`.
    """
    if not key:
        return [root]
    fields = [field for _, field in _find(key, root)]
    return list(dict.fromkeys(below for field in fields for below in sections_of(field.annotation)))


def _find(key: str, root: type[Section]) -> list[tuple[type[Section], FieldInfo]]:
    """Return the fields with this dotted key: several kinds of a union may have it."""
    fields = [(section, field) for name, section, field in every_field(root) if name == key]
    if not fields:
        meant = meant_key(key, root)
        known = dict.fromkeys([meant] if meant else (name for name, _, _ in every_field(root)))
        hint = nearest(meant or key, known, otherwise="`largebatch explain` lists them")
        raise RecipeError(f"no recipe has the key {clip(repr(key), LONGEST_NAME)}; {hint}")
    return fields


def _block(key: str, meaning: Meaning) -> str:
    owner = f" ({meaning.chooser}: {', '.join(meaning.kinds)})" if meaning.kinds else ""
    text = textwrap.indent(textwrap.fill(meaning.text, _WIDTH - 4), "    ")
    return f"{key}{owner}: {meaning.values}\n{text}".rstrip()


def _values(section: type[Section], field: FieldInfo, name: str) -> str:
    schema = section.model_json_schema()
    if "$ref" in schema:  # of a section that may be in itself
        schema = schema["$defs"][section.__name__]
    values = _in_words(schema["properties"][name])
    if field.is_required():
        return f"{values}, required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, Section):
        return f"{values}, may be left out"
    return f"{values}, default {json.dumps(default)}"


def _list_fields(prefix: str, section: type[Section]) -> str:
    kinds = kinds_of(section)
    # A section of another package may have no docstring.
    head = (section.__doc__ or "").strip().partition("\n")[0]
    fields = {name: field for name, field in section.model_fields.items() if name != "kind"}
    lines = [f"{chooser_of(section)}: {' or '.join(kinds)}: {head}" if kinds else head]
    rows = [
        [f"  {prefix}{name}", _first_sentence(section, field, name)]
        for name, field in fields.items()
    ]
    if rows:
        lines.append(table(rows, wrap_at=_WIDTH))
    return "\n".join(lines)


def _first_sentence(section: type[Section], field: FieldInfo, name: str) -> str:
    """Return the first sentence about a field, or its kinds or values if there is none."""
    below = sections_of(field.annotation)
    text = field.description or (below[0].__doc__ if len(below) == 1 else None)
    if text:
        return re.split(r"(?<=[^.]\.)\s", text.strip())[0]
    if below:
        kinds = [kind for section in below for kind in kinds_of(section)]
        return f"One of the kinds {', '.join(kinds)}."
    return _values(section, field, name)


def _in_words(schema: dict[str, Any]) -> str:  # noqa: PLR0911 -- one for each form
    if "$ref" in schema or "oneOf" in schema:
        return "section"
    if "anyOf" in schema:
        return " or ".join(_in_words(choice) for choice in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        values = schema.get("enum") or [schema["const"]]
        return " | ".join(
            value if isinstance(value, str) else json.dumps(value) for value in values
        )
    if "prefixItems" in schema:
        return f"[{', '.join(_in_words(item) for item in schema['prefixItems'])}]"
    if schema.get("type") == "array":
        return f"list of {_in_words(schema['items']).replace('section', 'sections')}"
    if schema.get("type") == "object":
        return "mapping"
    bounds = [
        f"{sign} {_number(schema[bound])}" for bound, sign in _BOUNDS.items() if bound in schema
    ]
    return f"{schema.get('type', 'any value')} {' and '.join(bounds)}".rstrip()


def _number(bound: float) -> str:
    return f"{int(bound):,}" if bound == int(bound) < 10**12 else f"{bound:g}"
