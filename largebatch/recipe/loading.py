"""A YAML file and `--set` overrides -> Recipe, or one error naming every mistake.

YAML is read strictly: a key given twice is an error (PyYAML keeps the last), and `1e-4` is a number
(PyYAML reads a string). Overrides are merged before validation, so they are judged like the file.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from largebatch.errors import RecipeError, nearest
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.sections import Section

_NUMBER = re.compile(
    r"""^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?)$"""
)


_MOVED = {
    **{f"data.{key}": f"now execution.{key}" for key in ("decoder", "cache")},
    "optimizer.lars.kernels": "now execution.kernels",
    "optimizer.kernels": "now execution.kernels",
    "reduction.groups": "now execution.groups",
    "reduction.hierarchical": "gone: NCCL sums inside each machine first by itself; leave it out",
    "data.eval_decoder": "gone: execution.decoder decodes all images; leave it out",
    "data.antialias": "gone: images are always resized with antialiasing; leave it out",
}
"""Keys that recipes had, and what stands in their place."""


class _StrictLoader(yaml.SafeLoader):
    """YAML 1.2 numbers; every key at most once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 -- PyYAML's signature
        seen: set[str] = set()
        for key_node, _ in node.value:
            mark = key_node.start_mark
            if key_node.value == "<<":
                raise yaml.MarkedYAMLError(problem="write << out", problem_mark=mark)
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is not a word", problem_mark=mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith((":float", ":int"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:largebatch-number", _NUMBER, list("-+.0123456789")
)


def _construct_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float:
    text = loader.construct_scalar(node).replace("_", "")
    return float(text) if any(mark in text for mark in ".eE") else int(text)


_StrictLoader.add_constructor("tag:yaml.org,2002:largebatch-number", _construct_number)


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe; `overrides` are texts like `optimizer.eta=0.002`.

    Raises RecipeError naming every mistake at once, each by its dotted path.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{path}: cannot read the recipe: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: a recipe is UTF-8 text, this file is not") from None
    return parse_recipe(text, overrides, source=str(path))


def parse_recipe(text: str, overrides: Sequence[str] = (), *, source: str = "recipe") -> Recipe:
    """Validate the text of a recipe; `source` begins every message."""
    tree = _parse_yaml(text, source=source)
    if not isinstance(tree, dict):
        raise RecipeError(
            f"{source}: a recipe is a mapping of sections, found {type(tree).__name__}"
        )
    for override in overrides:
        _override(tree, override)
    try:
        return Recipe.model_validate_json(json.dumps(tree, default=str))
    except (ValueError, RecursionError) as error:
        if not isinstance(error, ValidationError):  # an alias inside its own anchor
            raise RecipeError(f"{source}: a section contains itself") from None
        problems = [_explain(problem) for problem in error.errors()]
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise RecipeError("\n  ".join([f"{source}: {count}", *problems]))


def dump_recipe(recipe: Recipe) -> str:
    """Return the recipe as YAML with every default written out; parse_recipe reads it back."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def sections_of(annotation: object) -> list[type[Section]]:
    """Return the sections a field may hold: one, or several for a union chosen by `kind`.

    >>> [section.__name__ for section in sections_of(Recipe.model_fields["optimizer"].annotation)]
    ['LARS', 'SGD']
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_of(part)]


def kinds_of(section: type[Section]) -> tuple[str, ...]:
    """Return the words that choose this section in its union; none if it stands in no union.

    >>> kinds_of(sections_of(Recipe.model_fields["optimizer"].annotation)[0]), kinds_of(Recipe)
    (('lars',), ())
    """
    field = section.model_fields.get("kind")
    return () if field is None else get_args(field.annotation)


def _parse_yaml(text: str, *, source: str) -> object:
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 -- a SafeLoader subclass
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise RecipeError(f"{source}{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{source}: not YAML: {error}") from None


def _override(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key of the tree, making sections on the way."""
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(f"--set {override}: expected KEY=VALUE, such as optimizer.eta=0.002")
    value = _parse_yaml(text, source=f"--set {override}")
    section = tree
    for key in keys[:-1]:
        below = section.setdefault(key, {})
        if below is None:
            below = section[key] = {}
        if not isinstance(below, dict):
            raise RecipeError(
                f"--set {override}: {key} is {below!r}, not a section with keys of its own"
            )
        section = below
    section[keys[-1]] = value


def _explain(problem: ErrorDetails) -> str:
    """Say one of pydantic's findings the way a recipe's author thinks of it."""
    keys, known = _locate(problem["loc"])
    where = ".".join(keys)
    context = problem.get("ctx", {})
    match problem["type"]:
        case "missing":
            return f"{where}: missing"
        case "extra_forbidden":
            hint = nearest(keys[-1], known, otherwise=f"known keys: {', '.join(known)}", most=1)
            return f"{where}: {_MOVED.get(where) or f'unknown key; {hint}'}"
        case "value_error":
            return f"{where}: {context['error']}" if where else str(context["error"])
        case "union_tag_not_found":
            return f"{where}.kind: missing"
        case "union_tag_invalid":
            return (
                f"{where}.kind: expected one of {context['expected_tags']}, got {context['tag']!r}"
            )
        case _:
            message = problem["msg"][0].lower() + problem["msg"][1:]
            return f"{where}: {message}, got {json.dumps(problem['input'])}"


def _locate(location: tuple[int | str, ...]) -> tuple[list[str], list[str]]:
    """Return the dotted path a recipe's author would write, and the keys known where it ends.

    Pydantic's locations also name the member of a union; the author never writes that.
    """
    path: list[str] = []
    sections: list[type[Section]] = [Recipe]
    fields = Recipe.model_fields
    for part in location:
        chosen = [section for section in sections if part in kinds_of(section)]
        if len(sections) > 1 and chosen:
            sections = chosen
            fields = sections[0].model_fields
            continue
        path.append(str(part))
        known = list(fields)
        if part in fields:
            sections = sections_of(fields[str(part)].annotation)
            fields = sections[0].model_fields if len(sections) == 1 else {}
    return path, known if path else []
