"""What of the site is made from the package: every key of a recipe, and docstrings as Markdown."""

import argparse
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from largebatch.cli.main import make_parser
from largebatch.recipe.explain import meanings, sections_below
from largebatch.recipe.kinds import chooser_of, kinds_of
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.sections import Section


def setup(app: Sphinx) -> dict[str, bool]:
    """Register both with Sphinx."""
    app.add_directive("recipe-reference", RecipeReference)
    app.connect("autodoc-process-docstring", mark_up)
    return {"parallel_read_safe": True}


class RecipeReference(SphinxDirective):
    """Every key of a recipe: values, default and meaning, from the schema and its docstrings."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each top-level key; `page#optimizer.eta` leads to a key."""
        self.first: dict[type[Section], str] = {}
        return [self._part(name) for name in Recipe.model_fields]

    def _part(self, name: str) -> nodes.section:
        part = nodes.section("", nodes.title(name, name), ids=[name], names=[name])
        self._note(name)
        for meaning in meanings(name):
            part += [nodes.paragraph(text=meaning.values), *self._text(meaning.text)]
        part += self._kinds(name)
        entries = [entry for key in self._keys(name) for entry in self._entry(key)]
        if entries:
            part += nodes.definition_list("", *entries)
        return part

    def _keys(self, key: str) -> Iterator[str]:
        """Yield the keys below a key, and not again those of a section that stood before."""
        below = [section for section in sections_below(key) if section not in self.first]
        self.first |= dict.fromkeys(below, key)
        for name in dict.fromkeys(name for section in below for name in section.model_fields):
            yield f"{key}.{name}"
            yield from self._keys(f"{key}.{name}")

    def _entry(self, key: str) -> Iterator[nodes.Node]:
        """Yield a definition for each meaning; the first one is what a link to the key leads to."""
        self._note(key)
        if key.endswith(".kind"):  # the list of kinds stands above
            return
        for place, meaning in enumerate(meanings(key)):
            term = nodes.term("", "", nodes.literal(text=key), ids=[] if place else [key])
            if meaning.kinds:
                term += nodes.Text(f" ({meaning.chooser}: {', '.join(meaning.kinds)})")
            text = [nodes.paragraph("", "", nodes.emphasis(text=meaning.values))]
            text += [*self._text(meaning.text), *self._kinds(key), *self._elsewhere(key)]
            yield nodes.definition_list_item("", term, nodes.definition("", *text))

    def _note(self, key: str) -> None:
        """Let other pages link to a key."""
        labels = self.env.domains.standard_domain
        labels.labels[key] = self.env.docname, key, key
        labels.anonlabels[key] = self.env.docname, key

    def _kinds(self, key: str) -> list[nodes.Node]:
        """Return what the kinds of a section are, where it has some; or what the section is."""
        new = [section for section in sections_below(key) if self.first.get(section, key) == key]
        lines = [
            f"- {chooser_of(section)} `{'` or `'.join(kinds_of(section))}`: {_text_of(section)}"
            if kinds_of(section)
            else _text_of(section)
            for section in new
        ]
        return self._text("\n".join(lines))

    def _elsewhere(self, key: str) -> list[nodes.Node]:
        """Return where the keys of a section stand that was there before."""
        before = dict.fromkeys(self.first.get(section, key) for section in sections_below(key))
        return [
            nodes.paragraph("", "Keys as those of ", nodes.reference(place, place, refid=place))
            for place in before
            if place != key
        ]

    def _text(self, text: str) -> list[nodes.Node]:
        return self.parse_text_to_nodes(text) if text else []


def _text_of(section: type[Section]) -> str:
    return re.sub(r"\s*\n\s*", " ", (section.__doc__ or "").strip())


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program, its help texts marked up."""
    made = make_parser()
    _mark_up_help(made)
    return made


def _mark_up_help(parser: argparse.ArgumentParser) -> None:
    parser.description = parser.description and _escape(parser.description)
    for action in parser._actions:  # argparse has no other list of them
        action.help = action.help and _escape(action.help)
        action.default = action.default or None  # an empty list is none
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _mark_up_help(below)


def mark_up(*event: Any) -> None:  # noqa: ANN401 -- Sphinx's
    """Keep reStructuredText from reading formulas in a docstring, such as |w|, as markup."""
    lines: list[str] = event[-1]
    lines[:] = [line if line.startswith((">>>", "    ")) else _escape(line) for line in lines]


def _escape(text: str) -> str:
    """Take from |, * and a last _ what they mean in reStructuredText, but in `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([|*\\]|_\b)", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)
