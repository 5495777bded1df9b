"""A YAML file and `--set` overrides -> Recipe; one error has every mistake.

The file is YAML 1.2, read by ruamel's safe loader: `1e-4` is a number, `on` is a word. It may come
from an untrusted source: size, depth, aliases and tags are checked before any value is built.
"""

import json
import logging
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

from largebatch.errors import LONGEST_NAME, RecipeError, clip, nearest
from largebatch.recipe.installed import installed, read_installed
from largebatch.recipe.problems import explain_problems
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import CHOOSERS, Section, kinds_of, sections_of

Kind = TypeVar("Kind", bound=Section)

_LOG = logging.getLogger(__name__)

MAX_LENGTH = 2**16
"""Bytes of a recipe: twenty times the longest known one. YAML of this length takes seconds."""

MAX_DEPTH = 32  # depth of nested sections; the deepest known key is eight levels below the recipe


Overrides = Sequence[str] | Mapping[str, object]
"""Changes to a recipe: strings like `optimizer.eta=0.002`, or values by dotted key."""


def override_words(changes: Overrides) -> tuple[str, ...]:
    """Return changes as the words of `--set`."""
    if isinstance(changes, str):
        raise TypeError(f"overrides: expected [{changes!r}] or a dict of keys, got a str")
    if isinstance(changes, Mapping):
        pairs = changes.items()
        return tuple(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in pairs)
    return tuple(changes)


def load_recipe(path: Path | str, overrides: Overrides = ()) -> Recipe:
    """Read and validate a recipe; `overrides` are `["optimizer.eta=0.002"]` or a dict of keys.

    >>> load_recipe("digits_96", {"optimizer.eta": 0.002, "seed": 3}).optimizer.eta
    0.002

    A bare name, such as digits_96, is that of an installed recipe unless there is a file with this
    name. Raises RecipeError with every mistake, each by its dotted path.
    """
    path = Path(path)
    # A file comes before an installed recipe of its name, and that one before a folder.
    named = path.name == str(path) and not path.suffix
    if os.path.isdir(path) and not (named and path.name in installed()):  # noqa: PTH112 -- of any name
        hint = f"a command on its images takes RECIPE --data {path}; `largebatch init {path}` "
        hint += "writes a recipe for them"
        if (path / "recipe.yaml").is_file():
            hint = f"it contains one: {path / 'recipe.yaml'}"
        raise RecipeError(f"{path}: a folder, expected a recipe; {hint}")
    if named and not os.path.isfile(path):  # noqa: PTH113 -- of any name
        return parse_recipe(read_installed(path.name), overrides, source=path.name)
    return parse_recipe(read_text(path, what="recipe"), overrides, source=str(path))


def read_text(path: Path, *, what: str) -> str:
    """Return the text of a recipe or study; raise RecipeError if it is missing or too long."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe without a writer would block
            raise RecipeError(f"{path}: a {what} is a file, this is a pipe or a device")
        with path.open("rb") as file:
            # One byte more than allowed is enough to know that it is too long.
            content = file.read(MAX_LENGTH + 1)
        if len(content) > MAX_LENGTH:
            raise RecipeError(f"{path}: too long for a {what}: at most {MAX_LENGTH:,} bytes")
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: a {what} is UTF-8 text, this file is not") from None
    except (OSError, ValueError) as error:  # ValueError: an impossible path
        reason = getattr(error, "strerror", None) or error
        hint = "give a file that can be read"
        if what == "recipe":
            found = nearest(path.stem, installed(), otherwise="see `largebatch recipes`", most=1)
            hint += f", or an installed recipe, without folder and .yaml; {found}"
        raise RecipeError(f"{path}: cannot read the {what}: {reason}; {hint}") from None


def parse_recipe(text: str, overrides: Overrides = (), *, source: str = "recipe") -> Recipe:
    """Validate the text of a recipe; every message begins with `source`."""
    overrides = override_words(overrides)
    if sum(map(len, overrides)) > MAX_LENGTH:
        raise RecipeError(f"--set: more than {MAX_LENGTH:,} characters; write them into a recipe")
    tree = parse_yaml(text, source=source)
    if not isinstance(tree, dict):
        raise RecipeError(
            f"{source}: a recipe is a mapping of sections, found "
            f"{'nothing' if tree is None else type(tree).__name__}; start with the output of "
            "`largebatch recipes copy digits_96`"
        )
    for override in overrides:
        _override(tree, override)
    try:
        return validate_tree(Recipe, tree, source=source)
    except RecipeError as error:
        for key, _, value in (override.partition("=") for override in overrides):
            if value.startswith("{") and f"{key}." in str(error):
                hint = f"{key}={{...}} replaces the whole section; to change a part: {key}.KEY"
                raise RecipeError(f"{error}; {hint}") from None
        raise


def validate_tree(kind: type[Kind], tree: dict[str, Any], *, source: str) -> Kind:
    """Return the section that a tree describes; raise RecipeError with every mistake."""
    try:
        # As JSON: pydantic then accepts lists for tuples and is still strict on numbers.
        return kind.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        raise RecipeError(explain_problems(error, kind, source=source)) from None


def differences(
    first: Any,  # noqa: ANN401 -- any JSON
    second: Any,  # noqa: ANN401 -- any JSON
    where: str = "",
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted key of each value that differs between two trees, and both values."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in {**first, **second}:
            yield from differences(first.get(key), second.get(key), f"{where}.{key}".lstrip("."))
    elif first != second:
        yield where, first, second


def parse_yaml(text: str, *, source: str) -> Any:  # noqa: ANN401 -- any YAML
    """Return the values of a YAML text; raise RecipeError, with the line, if it is not YAML."""
    try:
        return json.loads(_yaml_as_json(text))
    except MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        problem = str(error.problem or error.context).partition(" with value ")[0]  # of a key twice
        raise RecipeError(f"{source}{line}: {clip(problem, 2 * LONGEST_NAME)}") from None
    except (YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:
        # ValueError: a number of thousands of digits, half a character; the others are ruamel's.
        raise RecipeError(f"{source}: not YAML: {clip(str(error), 2 * LONGEST_NAME)}") from None


def _keys(tree: object) -> Iterator[object]:
    if isinstance(tree, dict):
        yield from tree
        tree = list(tree.values())
    for value in tree if isinstance(tree, list) else ():
        yield from _keys(value)


@lru_cache(maxsize=64)  # a recipe is often read with several overrides
def _yaml_as_json(text: str) -> str:
    """Return the values as JSON, in which a date is a string."""
    yaml = YAML(typ="safe", pure=True)  # libyaml supports YAML 1.1 only
    depth = 0
    # Events come before any value is built: aliases of aliases grow exponentially when they are
    # expanded, tags stand for other types, and thousands of brackets exhaust the stack.
    for event in yaml.parse(text):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        problem = None
        if depth > MAX_DEPTH:
            problem = f"nested deeper than {MAX_DEPTH} sections"
        elif isinstance(event, AliasEvent):
            problem = f"aliases (*{event.anchor}) are not supported: repeat the value"
        elif getattr(event, "tag", None):
            problem = f"tags ({event.tag}) are not supported"
        if problem:
            raise MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
    tree = yaml.load(text)
    # JSON would turn the key 1 into "1", which then could equal another key.
    if odd := next((key for key in _keys(tree) if not isinstance(key, str)), None):
        raise MarkedYAMLError(problem=f"a key must be a word, got {odd!r}")
    text = json.dumps(tree, ensure_ascii=False, default=str)
    text.encode()  # raises ValueError for half a character
    return text


def _override(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    shown = f"--set {clip(override, LONGEST_NAME)}"
    if override.startswith("{"):  # what agents of sweeps pass
        for name, value in parse_yaml(override, source=shown).items():
            _set(tree, name.split("."), value, shown=shown)
        return
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(f"{shown}: expected KEY=VALUE, such as optimizer.eta=0.002")
    if len(keys) > MAX_DEPTH:
        raise RecipeError(f"{shown}: nested deeper than {MAX_DEPTH} sections")
    _set(tree, keys, parse_yaml(text, source=shown), shown=shown)


def _set(tree: dict[str, Any], keys: Sequence[str], value: object, *, shown: str) -> None:
    if keys == ["tracking"] and isinstance(value, (str, list)):
        keys = ["tracking", "trackers"]
    section = tree
    for key in keys[:-1]:
        below = section.setdefault(key, {})
        if section is tree and key == "tracking" and isinstance(below, (str, list)):
            below = section[key] = {"trackers": below}
        if below is None:
            below = section[key] = {}
        if not isinstance(below, dict):
            raise RecipeError(f"{shown}: {key} is {below!r:.{LONGEST_NAME}}, not a section")
        section = below
    if keys[-1] in CHOOSERS and isinstance(value, str):
        _drop_keys_of_previous_kind(section, keys, value, shown=shown)
    section[keys[-1]] = value


def _drop_keys_of_previous_kind(
    section: dict[str, Any], keys: Sequence[str], kind: str, *, shown: str
) -> None:
    """Remove keys that only the section's previous kind has; log a warning."""
    # Follow the keys down the types; where a key has a union, all its members stay candidates.
    candidates: list[type[Section]] = [Recipe]
    for key in keys[:-1]:
        fields = [above.model_fields[key] for above in candidates if key in above.model_fields]
        candidates = [below for field in fields for below in sections_of(field.annotation)]
    choosers = [
        candidate.model_fields[keys[-1]]
        for candidate in candidates
        if keys[-1] in candidate.model_fields
    ]
    # A recipe need not name the kind of its loss.
    default = next((chooser.default for chooser in choosers if not chooser.is_required()), None)
    kind_before = section.get(keys[-1], default)
    before = [candidate for candidate in candidates if kind_before in kinds_of(candidate)]
    after = [candidate for candidate in candidates if kind in kinds_of(candidate)]
    if before and after:
        only_before = before[0].model_fields.keys() - after[0].model_fields
        gone = [key for key in section if key in only_before]
        for key in gone:
            del section[key]
        if gone:
            _LOG.warning("%s: dropped %s, which %s does not use", shown, ", ".join(gone), kind)
