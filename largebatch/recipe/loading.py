"""A YAML file and `--set` overrides -> Recipe; one error has every mistake.

The file is YAML 1.2: `1e-4` is a number, `on` is a word, and a key given twice is an error.
Overrides are merged before validation, so they are validated like the file.

A recipe may come from an untrusted source, so its size is bounded before it is read, and again with
all aliases expanded: ten levels of them turn a few lines into a gigabyte.
"""

import json
import logging
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError
from ruamel.yaml import YAML, MappingNode, Node, ScalarNode
from ruamel.yaml.constructor import DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scanner import Scanner
from ruamel.yaml.tokens import Token

from largebatch.errors import LONGEST_NAME, RecipeError, clip, nearest
from largebatch.recipe.installed import installed, read_installed
from largebatch.recipe.problems import explain_problems
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import CHOOSERS, Section, kinds_of, sections_of

Kind = TypeVar("Kind", bound=Section)

_LOG = logging.getLogger(__name__)

MAX_LENGTH = 2**16
"""Bytes of a recipe: twenty times the longest known one. YAML of this length takes seconds."""

MAX_DEPTH = 32
"""Depth of nested sections; the deepest known key is eight levels below the recipe."""

LONGEST_NUMBER = 64
"""Characters of a number; no setting needs more, and Python refuses some thousands."""


class _Scanner(Scanner):
    def fetch_flow_collection_start(self, kind: type[Token], to_push: str) -> None:
        """Raise RecursionError early: parsing time grows with the square of the nested brackets."""
        if len(self.flow_context) > MAX_DEPTH:
            raise RecursionError
        super().fetch_flow_collection_start(kind, to_push)


class _Constructor(SafeConstructor):
    """Constructs keys that are words, and values that JSON has."""

    def construct_object(self, node: Node, deep: bool = False) -> object:  # noqa: FBT001, FBT002 -- ruamel's
        """Construct a value; raise MarkedYAMLError if its tag does not fit it."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError, AttributeError):
            kind, given = str(node.tag).rpartition(":")[2], clip(repr(node.value), LONGEST_NAME)
            problem = f"{given} is no {kind}"
            raise MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None

    def flatten_mapping(self, node: MappingNode) -> None:
        """Raise MarkedYAMLError for merge keys, which hide values, and keys that are no words."""
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise MarkedYAMLError(problem="write << out", problem_mark=key.start_mark)
            if key.tag != "tag:yaml.org,2002:str":
                given = clip(repr(self.construct_object(key, deep=True)), LONGEST_NAME)
                raise MarkedYAMLError(
                    problem=f"key {given} is not a word", problem_mark=key.start_mark
                )

    def construct_word(self, node: ScalarNode) -> str:
        """Return a string; raise ValueError if it has control characters."""
        text: str = self.construct_scalar(node)
        if not text.isprintable():
            raise ValueError
        return text

    def construct_number(self, node: ScalarNode) -> float:
        """Return an int or a float; raise ValueError if it is none, or too long."""
        if len(node.value) > LONGEST_NUMBER:
            raise ValueError
        whole = str(node.tag).endswith(":int")
        return self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)


_TAG = "tag:yaml.org,2002:"
_Constructor.yaml_constructors = {
    f"{_TAG}null": SafeConstructor.construct_yaml_null,
    f"{_TAG}bool": SafeConstructor.construct_yaml_bool,
    f"{_TAG}int": _Constructor.construct_number,
    f"{_TAG}float": _Constructor.construct_number,
    f"{_TAG}str": _Constructor.construct_word,
    f"{_TAG}timestamp": _Constructor.construct_word,  # JSON has none
    f"{_TAG}seq": SafeConstructor.construct_yaml_seq,
    f"{_TAG}map": SafeConstructor.construct_yaml_map,
    None: SafeConstructor.construct_undefined,
}


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe; `overrides` are strings like `optimizer.eta=0.002`.

    A bare name, such as digits_96, is that of an installed recipe unless there is a file with this
    name. Raises RecipeError with every mistake, each by its dotted path.
    """
    path = Path(path)
    named = path.name == str(path) and not path.suffix
    if os.path.isdir(path) and not (named and path.name in installed()):  # noqa: PTH112 -- of any name
        raise RecipeError(_describe_folder(path))
    if named and not os.path.isfile(path):  # noqa: PTH113 -- of any name
        return parse_recipe(read_installed(path.name), overrides, source=path.name)
    return parse_recipe(read_text(path, what="recipe"), overrides, source=str(path))


def _describe_folder(path: Path) -> str:
    """Return an error with what to give in place of a folder of a run or of images."""
    wrong = f"{path}: a folder, expected a recipe"
    if (path / "recipe.yaml").is_file():
        return f"{wrong}; it holds one: {path / 'recipe.yaml'}"
    return (
        f"{wrong}; a command on its images takes RECIPE --data {path}, and `largebatch init "
        f"{path}` writes a recipe for them"
    )


def read_text(path: Path, *, what: str) -> str:
    """Return the text of a recipe or study; raise RecipeError if it is missing or too long."""
    try:
        return _read(path, what=what).decode("utf-8")
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: a {what} is UTF-8 text, this file is not") from None
    except (OSError, ValueError) as error:  # ValueError: an impossible path
        reason = getattr(error, "strerror", None) or error
        hint = nearest(path.stem, installed(), otherwise="", most=1) if what == "recipe" else ""
        hint = hint and f"; an installed recipe is named without folder and .yaml: {hint}"
        raise RecipeError(f"{path}: cannot read the {what}: {reason}{hint}") from None


def _read(path: Path, *, what: str) -> bytes:
    """Return the bytes of a file; refuse long files, and pipes and devices, which may not end."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise RecipeError(f"{path}: a {what} is a file, this is a pipe or a device")
        content = file.read(MAX_LENGTH + 1)
    if len(content) > MAX_LENGTH:
        raise RecipeError(f"{path}: too long for a {what}, which has at most {MAX_LENGTH:,} bytes")
    return content


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe without a writer would block


def parse_recipe(text: str, overrides: Sequence[str] = (), *, source: str = "recipe") -> Recipe:
    """Validate the text of a recipe; every message begins with `source`."""
    if sum(map(len, overrides)) > MAX_LENGTH:
        raise RecipeError(f"--set: more than {MAX_LENGTH:,} characters; write them into a recipe")
    tree = parse_yaml(text, source=source)
    if not isinstance(tree, dict):
        raise RecipeError(
            f"{source}: a recipe is a mapping of sections, found "
            f"{'nothing' if tree is None else type(tree).__name__}; `largebatch recipes copy "
            "digits_96` writes one to begin with"
        )
    for override in overrides:
        _override(tree, override)
    pairs = (override.partition("=") for override in overrides)
    typed = {key.strip(): value for key, _, value in pairs}
    return validate_tree(Recipe, tree, source=source, typed=typed)


def validate_tree(
    kind: type[Kind],
    tree: dict[str, Any],
    *,
    source: str,
    typed: Mapping[str, str] = MappingProxyType({}),
) -> Kind:
    """Return the section that a tree describes; raise RecipeError with every mistake.

    `typed` has the values of the keys that `--set` gave, for the message.
    """
    try:
        return kind.model_validate_json(_as_json(tree, source=source))
    except ValidationError as error:
        raise RecipeError(explain_problems(error, kind, source=source, typed=typed)) from None


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


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)  # libyaml supports YAML 1.1 only
    yaml.Scanner = _Scanner
    yaml.Constructor = _Constructor
    return yaml


def parse_yaml(text: str, *, source: str) -> Any:  # noqa: ANN401 -- any YAML
    """Return the values of a YAML text, with all aliases expanded.

    Raises RecipeError, with the line, if it is not YAML.
    """
    try:
        return json.loads(_yaml_as_json(text, source=source))
    except MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        problem = str(error.problem or error.context)
        if isinstance(error, DuplicateKeyError):
            problem = problem.partition(" with value ")[0]  # the values may be long
        problem = clip(problem, 2 * LONGEST_NAME)
        raise RecipeError(f"{source}{line}: {problem}") from None
    except YAMLError as error:
        raise RecipeError(f"{source}: not YAML: {error}") from None
    except RecursionError:
        raise _too_deep(source) from None


@lru_cache(maxsize=64)
def _yaml_as_json(text: str, *, source: str) -> str:
    """Return the values as JSON; cached, since a recipe is often read with several overrides."""
    return _as_json(_yaml().load(text), source=source)


def _as_json(tree: object, *, source: str) -> str:
    """Return a tree as JSON; raise RecipeError if it is deep or long with all aliases expanded."""
    length = 0
    for each in _lengths(tree, depth=0, source=source):
        length += each
        if length > MAX_LENGTH:
            raise RecipeError(
                f"{source}: too long for a recipe, which has at most {MAX_LENGTH:,} characters "
                "when its aliases are written out"
            )
    return json.dumps(tree)


def _lengths(value: object, *, depth: int, source: str) -> Iterator[int]:
    """Yield the length of every value in a tree, as it is written; a tree may contain itself."""
    if depth > MAX_DEPTH:
        raise _too_deep(source)
    below: list[Any] = []
    match value:
        case dict():
            yield 2 + sum(map(len, value))
            below = list(value.values())
        case list():
            yield 2
            below = value
        case _:
            yield 1 + len(str(value))
    for each in below:
        yield from _lengths(each, depth=depth + 1, source=source)


def _too_deep(source: str) -> RecipeError:
    return RecipeError(
        f"{source}: more than {MAX_DEPTH} sections lie in each other, or a section contains itself"
    )


def _override(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key of the tree, or each key of a mapping, which is what sweep agents pass."""
    dotted, equals, text = override.partition("=")
    shown = f"--set {clip(override, LONGEST_NAME)}"
    if override.startswith("{"):
        for dotted, value in parse_yaml(override, source=shown).items():
            _set(tree, dotted.split("."), value, shown=shown)
        return
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(f"{shown}: expected KEY=VALUE, such as optimizer.eta=0.002")
    _set(tree, keys, parse_yaml(text, source=shown), shown=shown)


def _set(tree: dict[str, Any], keys: Sequence[str], value: object, *, shown: str) -> None:
    """Set one key of the tree; create the sections above it."""
    section = tree
    for key in keys[:-1]:
        below = section.setdefault(key, {})
        if below is None:
            below = section[key] = {}
        if not isinstance(below, dict):
            raise RecipeError(f"{shown}: {key} is {below!r:.{LONGEST_NAME}}, not a section")
        section = below
    if keys[-1] in CHOOSERS and isinstance(value, str):
        _leave_out_other_kind(section, keys, value, shown=shown)
    section[keys[-1]] = value


def _leave_out_other_kind(
    section: dict[str, Any], keys: Sequence[str], kind: str, *, shown: str
) -> None:
    """Remove keys that only the section's previous kind has; log a warning."""
    known: list[type[Section]] = [Recipe]
    for key in keys[:-1]:
        fields = [each.model_fields[key] for each in known if key in each.model_fields]
        known = [each for field in fields for each in sections_of(field.annotation)]
    before = [each for each in known if section.get(keys[-1]) in kinds_of(each)]
    after = [each for each in known if kind in kinds_of(each)]
    if before and after:
        only_before = before[0].model_fields.keys() - after[0].model_fields
        gone = [key for key in section if key in only_before]
        for key in gone:
            del section[key]
        if gone:
            _LOG.warning("%s: dropped %s, which %s does not use", shown, ", ".join(gone), kind)
