"""The core of the package knows no wing: what extends a run plugs into general seams."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "largebatch"

CORE = (
    *("data", "distributed", "models", "optim", "polish", "report", "runs", "schedules"),
    *("tracking", "training"),
)
"""Rooms that know no wing. A recipe may name what a wing does: it is data."""

CHOOSE = ("runs/build.py",)
"""Files that choose what plugs into a run and its page."""

WORDS = re.compile(
    r"(?i)learner|parameter.?server|softsync|hardsync|local_steps|staleness|arrivals|simulator"
    r"|\bspare\b|\bowed\b|\bexchange\b|(?-i:\bExchange|\bprotocol)"
)
"""Words of the protocols, which exchange gradients with servers."""


def core_files() -> Iterator[Path]:
    """Yield the files of the core but those that choose what plugs in."""
    for room in CORE:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            name = path.relative_to(PACKAGE).as_posix()
            if name not in CHOOSE:
                yield path


def names_and_texts(tree: ast.Module) -> Iterator[str]:
    """Yield every name and every text of a module, without docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                yield node.value
        else:
            for field in ("id", "attr", "arg", "name", "module"):
                value = getattr(node, field, None)
                if isinstance(value, str):
                    yield value


def words_of(source: str) -> set[str]:
    """Return the words of protocols in names and texts of a module."""
    found = names_and_texts(ast.parse(source))
    return {match.lower() for text in found for match in WORDS.findall(text)}


def test_the_core_uses_no_word_of_the_protocols() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): words
        for path in core_files()
        if (words := words_of(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_words_are_found_in_names_and_texts_and_not_in_docstrings() -> None:
    assert words_of('"""A learner."""\n# softsync\n"""An exchange."""\n') == set()
    assert words_of("def f(learners): return recipe.protocol") == {"learner", "protocol"}
    assert words_of("from typing import Protocol\nx = f'{y} lost its Parameter Server'") == {
        "parameter server"
    }
    assert words_of("import largebatch.lab.protocols.exchange as e") == {
        "protocol",
        "exchange",
    }
