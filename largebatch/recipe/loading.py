"""A YAML file and `--set` overrides -> Recipe, or one error naming every mistake.

The file is YAML 1.2: `1e-4` is a number, `on` a word, and a key given twice an error. Overrides are
merged before validation, so they are validated like the file.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML, MappingNode
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from largebatch.errors import RecipeError, nearest
from largebatch.recipe.installed import read_installed
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.sections import Section

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


class _Constructor(SafeConstructor):
    """Keys are words, written where they belong."""

    def flatten_mapping(self, node: MappingNode) -> None:
        """Raise MarkedYAMLError for a key that is no word; a merge key hides what a recipe says."""
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise MarkedYAMLError(problem="write << out", problem_mark=key.start_mark)
            if key.tag != "tag:yaml.org,2002:str":
                found = repr(self.construct_object(key, deep=True))
                raise MarkedYAMLError(
                    problem=f"key {found} is not a word", problem_mark=key.start_mark
                )


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe; `overrides` are texts like `optimizer.eta=0.002`.

    A path that is a bare name, such as digits_96, is that of an installed recipe unless there is a
    file of this name. Raises RecipeError naming every mistake at once, each by its dotted path.
    """
    path = Path(path)
    if path.name == str(path) and not path.suffix and not path.is_file():
        return parse_recipe(read_installed(path.name), overrides, source=path.name)
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
    text = io.StringIO()
    _yaml().dump(recipe.model_dump(mode="json"), text)
    return text.getvalue()


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


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)  # libyaml knows YAML 1.1 only
    yaml.Constructor = _Constructor
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # typed as None
    return yaml


def _parse_yaml(text: str, *, source: str) -> object:
    try:
        return _yaml().load(text)
    except MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise RecipeError(f"{source}{line}: {error.problem or error.context}") from None
    except YAMLError as error:
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
