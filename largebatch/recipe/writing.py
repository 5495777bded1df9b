"""A recipe or another section -> YAML: complete, as a record, or with comments, to be edited."""

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML

from largebatch.recipe.section import CHOOSERS, Section

COLUMN = 34  # column of the comments
WIDTH = 100  # characters of a line; a longer value is written in several lines


def dump_yaml(section: Section) -> str:
    """Return a recipe or another section as YAML with all defaults; parse_recipe reads it."""
    return dump_tree(section.model_dump(mode="json"))


def dump_commented(section: Section, comments: Mapping[str, str], *, header: Sequence[str]) -> str:
    """Return a recipe as YAML to be edited, with the keys that were set and not their defaults.

    `comments` are those of dotted keys, of the sections of a recipe and the keys in them; `header`
    has the lines of the comment above.
    """
    blocks = [[f"# {line}" for line in header], []]
    for key, value in section.model_dump(mode="json", exclude_unset=True).items():
        if not isinstance(value, dict) or len(value) <= 1:
            own = [f"{key}.{below}" for below in value] if isinstance(value, dict) else []
            comment = next(filter(None, map(comments.get, [key, *own])), None)
            blocks[-1].append(_line(key, value, comment))
            continue
        lines = [
            _line(below, setting, comments.get(f"{key}.{below}"), indent="  ")
            for below, setting in value.items()
        ]
        blocks += [[_commented(f"{key}:", comments.get(key)), *lines], []]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def recipe_name(text: str, *, otherwise: str) -> str:
    """Return a text as a recipe may be called."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:100] or otherwise


def _line(key: str, value: object, comment: str | None, *, indent: str = "") -> str:
    line = dump_tree({key: _short(value)}, flow=True).strip()[1:-1]
    if len(line) > WIDTH:
        line = dump_tree({key: _short(value)}).rstrip()
    return _commented(textwrap.indent(line, indent), comment)


def _commented(line: str, comment: str | None) -> str:
    return line if comment is None else f"{line:{COLUMN}}# {comment}"


def _short(value: Any) -> Any:  # noqa: ANN401 -- any JSON
    """Return a value with its whole floats as integers, and a section with its kind first."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: key not in CHOOSERS)
        return {key: _short(value[key]) for key in keys}
    if isinstance(value, list):
        return [_short(below) for below in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def dump_tree(value: object, *, flow: bool = False) -> str:
    """Return plain values as YAML 1.2; with `flow` in one line."""
    yaml = YAML(typ="safe", pure=True)  # libyaml supports YAML 1.1 only
    yaml.default_flow_style = flow
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # typed as None
    if flow:
        yaml.width = 2**16
    text = io.StringIO()
    yaml.dump(value, text)
    return text.getvalue()
