"""The documents as tests read them: their blocks, the commands in these, their links.

A block that cannot run here says on the line before it what it needs: <!-- needs a cluster -->.
Neither the site nor a code host shows that line.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cyclopts import App

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]

_BLOCK = re.compile(
    r"^(?:<!-- needs (?P<needs>[^\n]*) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code of a document."""

    page: Path
    language: str
    text: str
    needs: str | None
    """What it needs that is not here; None: nothing, so it has to run."""

    @property
    def commands(self) -> list[str]:
        """Its commands, each on one line."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line and not line.startswith("#")]


def name_of(page: Path) -> str:
    """Return the page's path from the root of the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[Block]:
    """Return the blocks of a page in this language, in order."""
    found = _BLOCK.finditer(page.read_text(encoding="utf-8"))
    every = [Block(page, one["language"], one["text"], one["needs"]) for one in found]
    return [block for block in every if block.language == language]


def commands(page: Path, *, here: bool) -> list[str]:
    """Return the commands of a page, with `here` only those of ours that can run here."""
    found = [block for block in blocks(page, "sh") if block.needs is None or not here]
    every = [command for block in found for command in block.commands]
    return [command for command in every if arguments(command)] if here else every


_STARTERS = ("largebatch", "horovodrun", "torchrun", "docker run")


def arguments(command: str) -> list[list[str]]:
    """Return the arguments of each call of the program in a command, without where output goes."""
    calls = []
    for part in re.split(r" (?:&&|\|) ", command):
        if part.startswith(_STARTERS):
            words = shlex.split(part, comments=True)
            if "largebatch" not in words:  # a launcher starts one of the examples
                continue
            ours = words[words.index("largebatch") + 1 :]
            calls.append(ours[: ours.index(">")] if ">" in ours else ours)
    return calls


def options_of(app: App, name: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield every command of the program with its options."""
    if app.default_command is not None:
        arguments = app.assemble_argument_collection()
        yield name, [each.name for each in arguments if each.parse and each.name != "*"]
    for below in app:
        if not below.startswith("-"):
            yield from options_of(app[below], f"{name} {below}")
