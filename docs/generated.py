"""Parts of the site that come from the package: keys, commands, docstrings with safe markup."""

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar, get_type_hints

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from largebatch.cli.main import make_app
from largebatch.recipe.explain import meanings, sections_below
from largebatch.recipe.section import Section, chooser_of, kinds_of


def setup(app: Sphinx) -> dict[str, bool]:
    """Register them with Sphinx."""
    app.add_directive("keys", Keys)
    app.add_directive("commands", Commands)
    app.connect("autodoc-process-docstring", mark_up)
    return {"parallel_read_safe": True}


class Keys(SphinxDirective):
    """Every key of a file: values, default and meaning, from its schema and docstrings.

    The first argument names the section of the whole file. The second one is a prefix of the keys
    in the targets of links, because other files have keys of the same name. `only` names the
    top-level keys of this page.
    """

    required_arguments = 1
    optional_arguments = 1
    option_spec: ClassVar = {"only": str.split}

    def run(self) -> list[nodes.Node]:
        """Return a section for each top-level key; `page#optimizer.eta` leads to a key."""
        self.root: type[Section] = resolve_name(self.arguments[0])
        self.before = "".join(f"{word}." for word in self.arguments[1:])
        self.first: dict[type[Section], str] = {}
        only = self.options.get("only", self.root.model_fields)
        parts = {}
        for name in self.root.model_fields:
            if name in only:
                parts[name] = self._part(name)
            else:
                list(self._keys(name))  # another page has these
        return [parts[name] for name in only]

    def _part(self, name: str) -> nodes.section:
        part = nodes.section("", nodes.title(name, name), ids=[self.before + name])
        self._note(name)
        for meaning in meanings(name, self.root):
            part += [nodes.paragraph(text=meaning.values), *self._text(meaning.text)]
        part += self._kinds(name)
        entries = [entry for key in self._keys(name) for entry in self._entry(key)]
        if entries:
            part += nodes.definition_list("", *entries)
        return part

    def _keys(self, key: str) -> Iterator[str]:
        """Yield the keys below a key, except those of an earlier section."""
        below = [section for section in sections_below(key, self.root) if section not in self.first]
        self.first |= dict.fromkeys(below, key)
        for name in dict.fromkeys(name for section in below for name in section.model_fields):
            yield f"{key}.{name}"
            yield from self._keys(f"{key}.{name}")

    def _entry(self, key: str) -> Iterator[nodes.Node]:
        """Yield a definition for each meaning; a link to the key leads to the first one."""
        self._note(key)
        if key.endswith(".kind"):  # the list of kinds is above
            return
        target = self.before + key
        for place, meaning in enumerate(meanings(key, self.root)):
            term = nodes.term("", "", nodes.literal(text=key), ids=[] if place else [target])
            if meaning.kinds:
                term += nodes.Text(f" ({meaning.chooser}: {', '.join(meaning.kinds)})")
            text = [nodes.paragraph("", "", nodes.emphasis(text=meaning.values))]
            text += [*self._text(meaning.text), *self._kinds(key), *self._elsewhere(key)]
            yield nodes.definition_list_item("", term, nodes.definition("", *text))

    def _note(self, key: str) -> None:
        """Make a key a target for links of other pages."""
        labels, target = self.env.domains.standard_domain, self.before + key
        labels.labels[target] = self.env.docname, target, key
        labels.anonlabels[target] = self.env.docname, target

    def _kinds(self, key: str) -> list[nodes.Node]:
        """Return the kinds of a section, described, or the description of one without kinds."""
        new = [
            section
            for section in sections_below(key, self.root)
            if self.first.get(section, key) == key
        ]
        lines = [
            f"- {chooser_of(section)} `{'` or `'.join(kinds_of(section))}`: {_text_of(section)}"
            if kinds_of(section)
            else _text_of(section)
            for section in new
        ]
        return self._text("\n".join(lines))

    def _elsewhere(self, key: str) -> list[nodes.Node]:
        """Return links to the keys of sections that came before."""
        before = dict.fromkeys(
            self.first.get(section, key) for section in sections_below(key, self.root)
        )
        return [
            nodes.paragraph("", "Keys as those of ", self._link(place))
            for place in before
            if place != key
        ]

    def _link(self, key: str) -> nodes.Node:
        link = addnodes.pending_xref("", nodes.inline(text=key), refdomain="std", reftype="ref")
        link.attributes |= {
            "reftarget": self.before + key,
            "refexplicit": True,
            "refdoc": self.env.docname,
        }
        return link

    def _text(self, text: str) -> list[nodes.Node]:
        return self.parse_text_to_nodes(text) if text else []


class Commands(SphinxDirective):
    """Every command with its arguments and options, from the command line itself."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each command."""
        text = make_app().generate_docs(output_format="rst", heading_level=2)
        text = re.sub(r"^\.\. contents::.*\n(   .*\n)*", "", text, flags=re.MULTILINE)
        lines = text.replace("[**Required**]", "[required]").splitlines()
        marked = ("**", "``", "..", "::")  # headings of lists, names of options, targets
        safe = [line if line.startswith(marked) else _escape(line) for line in lines]
        return self.parse_text_to_nodes("\n".join(safe), allow_section_headings=True)


def _text_of(section: type[Section]) -> str:
    return re.sub(r"\s*\n\s*", " ", (section.__doc__ or "").strip())


def mark_up(*event: Any) -> None:  # noqa: ANN401 -- Sphinx's
    """Keep reStructuredText from reading formulas in a docstring, such as |w|, as markup.

    Also reduce pydantic's annotations of fields to their types: Sphinx prints its internals.
    """
    _, _, _, documented, _, lines = event
    if is_dataclass(documented):
        documented.__annotations__ = get_type_hints(documented)
    lines[:] = [line if line.startswith((">>>", "    ")) else _escape(line) for line in lines]


def _escape(text: str) -> str:
    """Escape |, * and a final _ in reStructuredText, except in `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([|*\\]|_\b)", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)
