"""What pydantic found wrong with a recipe, in the words of whoever wrote it."""

import json
import re
from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from largebatch.errors import LONGEST_NAME, SHOWN, clip, nearest, shorten
from largebatch.recipe.kinds import kinds_of, sections_of
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


def explain_problems(error: ValidationError, root: type[Section], *, source: str) -> str:
    """Return what pydantic found wrong with a section and those below it, each by its path."""
    found = error.errors(include_url=False)
    problems = [one for one in found if not _is_explained(one, found)]
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [_explain(problem, root) for problem in problems[: SHOWN + 1]]
    return "\n  ".join([f"{source}: {count}", shorten(lines, between="\n  ")])


def _is_explained(problem: ErrorDetails, every: Iterable[ErrorDetails]) -> bool:
    """Return whether a list is short of nothing but those of its items that have problems."""
    where = problem["loc"]
    if problem["type"] != "too_short" or len(problem["input"]) < problem["ctx"]["min_length"]:
        return False
    return any(one["loc"][: len(where)] == where != one["loc"] for one in every)


def _explain(problem: ErrorDetails, root: type[Section]) -> str:
    """Say one of pydantic's findings the way the author of a section thinks of it."""
    keys, known = _locate(problem["loc"], root)
    where = clip(".".join(keys), LONGEST_NAME)
    context = problem.get("ctx", {})
    chooser = f"{where}.{context.get('discriminator', '')}".replace("'", "")
    match problem["type"]:
        case "missing":
            return f"{where}: missing"
        case "extra_forbidden":
            hint = nearest(keys[-1], known, otherwise=f"known keys: {', '.join(known)}", most=1)
            return f"{where}: {_MOVED.get(where) or f'unknown key; {hint}'}"
        case "value_error":
            return f"{where}: {context['error']}" if where else str(context["error"])
        case "union_tag_not_found":
            return f"{chooser}: missing"
        case "union_tag_invalid":
            found = clip(repr(context["tag"]), LONGEST_NAME)
            wrong = f"{chooser}: expected one of {context['expected_tags']}, got {found}"
            return wrong + _meant(context["tag"], context["expected_tags"])
        case _:
            message = problem["msg"][0].lower() + problem["msg"][1:]
            if "le" in context:  # with all of its digits in pydantic's words
                message = f"input should be less than or equal to {context['le']:.10g}"
            found = clip(json.dumps(problem["input"]), LONGEST_NAME)
            meant = _meant(problem["input"], context.get("expected", ""))
            return f"{where}: {message}, got {found}{meant}"


def _meant(found: object, expected: str) -> str:
    """Return a question after the word that may have been meant, of those in quotes."""
    hint = nearest(str(found), re.findall("'([^']*)'", expected), otherwise="", most=1)
    return hint and f"; {hint}"


def _locate(location: tuple[int | str, ...], root: type[Section]) -> tuple[list[str], list[str]]:
    """Return the dotted path an author would write, and the keys known where it ends.

    Pydantic's locations also name the member of a union; the author never writes that.
    """
    path: list[str] = []
    sections: list[type[Section]] = [root]
    fields = root.model_fields
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
