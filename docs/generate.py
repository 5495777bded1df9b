"""Write the generated parts of docs/reference: keys, commands and functions, as Markdown.

A code host and the site show the same text. A page keeps what is written by hand, and has the rest
between two comments, of which the first one names it:

    <!-- keys largebatch.recipe.recipe.Recipe: optimizer schedule -->
    <!-- commands -->
    <!-- python largebatch.run largebatch.errors -largebatch.errors.clip -->
    <!-- end -->

    python docs/generate.py
"""

import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import griffe

from largebatch.cli.main import make_app
from largebatch.recipe.explain import meanings, sections_below
from largebatch.recipe.section import Section, chooser_of, kinds_of

REFERENCE = Path(__file__).parent / "reference"
_PART = re.compile(r"(<!-- (keys|commands|python)\b(.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
_WIDTH = 96  # characters of a signature on one line


def main() -> None:
    """Write every page of the reference."""
    for page in sorted(REFERENCE.glob("*.md")):
        page.write_text(renewed(page), encoding="utf-8")


def renewed(page: Path) -> str:
    """Return the text of a page with its generated parts as the package is now."""
    kinds = {"keys": keys, "commands": commands, "python": functions}

    def renew(part: re.Match[str]) -> str:
        text = kinds[part[2]](part[3].split())
        return f"{part[1]}\n{text.strip()}\n\n{part[4]}"

    return _PART.sub(renew, page.read_text(encoding="utf-8"))


def keys(words: list[str]) -> str:
    """Return every key below some top-level keys: values, default and meaning."""
    root: type[Section] = resolve_name(words[0].rstrip(":"))
    shown = words[1:] or list(root.model_fields)
    described = _Keys(root)
    parts = {name: described.part(name) for name in root.model_fields}
    return "\n\n".join(parts[name] for name in shown)


class _Keys:
    """Describes the keys of a file; those of a section that several keys hold, at the first one."""

    def __init__(self, root: type[Section]) -> None:
        self._root = root
        self._first: dict[type[Section], str] = {}

    def part(self, name: str) -> str:
        """Return the text of a top-level key and of all keys below it."""
        blocks = [f"## {name}"]
        for meaning in meanings(name, self._root):
            blocks += [f"*{_escape(meaning.values)}*", _escape(meaning.text)]
        below = list(self._below(name))
        blocks += [self._kinds(name), *(self._entry(key) for key in below)]
        return "\n\n".join(filter(None, blocks))

    def _below(self, key: str) -> Iterator[str]:
        sections = [it for it in sections_below(key, self._root) if it not in self._first]
        self._first |= dict.fromkeys(sections, key)
        for name in dict.fromkeys(name for section in sections for name in section.model_fields):
            yield f"{key}.{name}"
            yield from self._below(f"{key}.{name}")

    def _entry(self, key: str) -> str:
        if key.endswith(".kind"):  # the list of kinds is above
            return ""
        blocks = [f"### {key}"]
        for meaning in meanings(key, self._root):
            owner = f"{meaning.chooser}: {', '.join(meaning.kinds)}; " if meaning.kinds else ""
            blocks += [f"*{_escape(owner + meaning.values)}*", _escape(meaning.text)]
        return "\n\n".join(filter(None, [*blocks, self._kinds(key), self._earlier(key)]))

    def _kinds(self, key: str) -> str:
        """Return the kinds of a section, or the description of one without kinds."""
        lines = []
        for section in sections_below(key, self._root):
            if self._first.get(section, key) != key:
                continue
            text = _escape(re.sub(r"\s*\n\s*", " ", (section.__doc__ or "").strip()))
            kinds = "` or `".join(kinds_of(section))
            lines.append(f"- {chooser_of(section)} `{kinds}`: {text}" if kinds else text)
        return "\n".join(lines)

    def _earlier(self, key: str) -> str:
        """Return links to the keys of sections that are described earlier."""
        places = dict.fromkeys(
            self._first.get(section, key) for section in sections_below(key, self._root)
        )
        links = [
            f"Keys as those of [{place}]({_pages(self._root)[place.split('.')[0]]}#{_slug(place)})."
            for place in places
            if place != key
        ]
        return "\n\n".join(links)


@cache
def _pages(root: type[Section]) -> dict[str, str]:
    """Return the page that describes each top-level key of a file."""
    pages = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for part in _PART.finditer(page.read_text(encoding="utf-8")):
            words = part[3].split()
            if part[2] == "keys" and resolve_name(words[0].rstrip(":")) is root:
                pages |= dict.fromkeys(words[1:] or root.model_fields, page.name)
    return pages


def commands(_: list[str]) -> str:
    """Return every command with its arguments and options."""
    text = make_app().generate_docs(output_format="markdown", heading_level=2)
    contents = r"^## Table of Contents\n.*?(?=^\*\*Commands)"  # the list after it has all of them
    text = re.sub(contents, "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(largebatch [a-z ]+) -m \w+", r"\1", text, flags=re.MULTILINE)  # how this runs
    text = re.sub(r"(?<=/)\*|\*(?=\.)|<(?=\w+>)", r"\\\g<0>", text)  # of paths, not markup
    return text.replace("```console", "```text")


def functions(names: list[str]) -> str:
    """Return the signature and docstring of functions, classes with their members, and modules.

    A name after a hyphen is left out of its module.
    """
    left_out = frozenset(name[1:] for name in names if name.startswith("-"))
    shown = [name for name in names if not name.startswith("-")]
    return "\n\n".join(_described(name, left_out) for name in shown)


@cache
def _package() -> griffe.Object:
    """Read the package without importing it: Lightning and Transformers need not be installed."""
    package = griffe.load("largebatch", search_paths=[REFERENCE.parents[1]])
    assert isinstance(package, griffe.Object)
    return package


def _described(name: str, left_out: frozenset[str]) -> str:
    documented = _package()[name.removeprefix("largebatch.")]
    if documented.is_alias:
        documented = documented.final_target
    if documented.is_module:
        members = [it for it in documented.members.values() if not it.is_alias and it.is_public]
        shown = [it for it in members if it.docstring and it.path not in left_out]
        inside = [_described(it.path, left_out) for it in shown]
        return "\n\n".join([_text(documented), *inside])
    blocks = [f"### {name}", f"```text\n{_signature(documented, name)}\n```", _text(documented)]
    if documented.is_class:
        own = [it for it in documented.members.values() if it.is_public and not it.is_alias]
        blocks += [_member(member) for member in own if not member.name.startswith("__")]
    return "\n\n".join(filter(None, blocks))


def _signature(documented: griffe.Object, name: str) -> str:
    """Return the signature as written; of a function with a signature of its own, that one."""
    if documented.is_attribute:
        return f"{documented.name} = {documented.value}"
    if documented.is_class and "__init__" not in documented.all_members:
        return f"class {documented.name}"
    if name == "largebatch.run":  # its keywords are the fields of a dataclass
        written = str(inspect.signature(resolve_name(name))).replace("PosixPath", "Path")
        return _folded(documented.name + re.sub(r"\b(?:[a-z_]\w*\.)+(\w+)", r"\1", written))
    return _folded(documented.signature())


def _folded(signature: str) -> str:
    """Return a long signature with one parameter a line."""
    if len(signature) <= _WIDTH:
        return signature
    lines, depth = [""], 0
    for character in signature:
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character == ")":
            lines += [""]
        lines[-1] += character
        if depth == 1 and character in "(,":
            lines += ["    " if character == "(" else "   "]  # a comma has a space after it
    return "\n".join(line.rstrip() for line in lines)


def _member(member: griffe.Object) -> str:
    text = _text(member)
    kind = (
        f"{member.name}: {member.annotation}"
        if member.is_attribute and member.annotation
        else member.name
    )
    if member.is_function:
        kind = member.signature()
    lines = [f"- `{kind}`", *text.splitlines()]
    return "\n".join(f"  {line}".rstrip() if number else line for number, line in enumerate(lines))


def _text(documented: griffe.Object) -> str:
    """Return a docstring as Markdown: examples and formulas are blocks of code."""
    docstring = documented.docstring
    if docstring is None:
        return ""
    blocks = []
    for block in re.split(r"\n\n+", inspect.cleandoc(docstring.value)):
        if block.startswith(">>>"):
            blocks.append(f"```pycon\n{block}\n```")
        elif block.startswith("    "):
            blocks.append(f"```text\n{inspect.cleandoc(block)}\n```")
        else:
            blocks.append(_escape(block))
    return "\n\n".join(blocks)


def _escape(text: str) -> str:
    """Escape what Markdown would read as emphasis or HTML, except in `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([*<])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def _slug(heading: str) -> str:
    """Return the name that a code host and the site give to a heading."""
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


if __name__ == "__main__":
    main()
