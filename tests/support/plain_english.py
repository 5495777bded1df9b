"""Report words and phrases that the package's texts avoid, with plainer ones.

    python tests/support/plain_english.py [FILE_OR_FOLDER ...]

In Python files the docstrings, comments and string literals are read; other files are read whole.
Prints `file:line: words: better` for each hit and exits with 1 if there is one.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

CLEAN = (
    ".ci",
    "CONTRIBUTING.md",
    "Makefile",
    "README.md",
    "benchmarks",
    "docs",
    "largebatch",
    "launch",
    "recipes",
    "tests",
)
"""Files and folders that `make lint` checks."""

SUFFIXES = {"", ".py", ".md", ".html", ".yaml", ".sh"}
"""Files that are read in a folder. A file named itself is read whatever it is."""

EXEMPT = {"plain_english.py", "test_plain_english.py"}
"""Files that list the words themselves."""


class Rule(NamedTuple):
    """A pattern to avoid. A space in it stands for any white space and the mark of a comment."""

    pattern: str
    better: str


STARTS = (
    Rule("Say", "Return, Format, Print, Describe"),
    Rule("Let", "Make, Allow, Start"),
    Rule("Tell", "Return True if, Report"),
    Rule("Ask", "Request, Return"),
    Rule("Be", "Run, Act as"),
    Rule("Put", "Write, Set, Add"),
    Rule("Hand", "Return, Yield, Pass"),
    Rule("See that", "Check, Raise ... unless"),
    Rule("Do the same", "name what is done"),
    Rule("Of", "begin with the noun"),
    Rule("Those", "begin with the noun"),
    Rule("That of", "begin with the noun"),
    Rule("Whether there", "True if"),
    Rule("What came of", "Result of"),
)
"""Words that begin no docstring."""

# Lookarounds leave out a name and two messages of files that benchmarks measure (see
# benchmarks/speed/sources.py): they change when these are measured again.
ANYWHERE = (
    Rule(r"\banew\b", "again"),
    Rule(r"\bfor ever\b", "indefinitely"),
    Rule(r"\bbefell\b", "happened to"),
    Rule(r"\blest\b", "so that ... not"),
    Rule(r"\bheard\b", "received"),
    Rule(r"\bowed\b", "pending"),
    Rule(r"\bforeign\b(?! keys?\b)", "other, unknown, of another program"),
    Rule(r"\bas far as (?:it goes|they go)\b", "tentative"),
    Rule(r"\b(?:is|are|be) well(?=\s*(?:[.,;:!?)]|$))", "works"),
    Rule(r"\bwith some to spare\b", "over-allocated by"),
    Rule(r"\banswers? to the pointer\b", "interactive"),
    Rule(r"\bby the clock\b", "wall-clock"),
    Rule(r"\bso many\b(?!,? (?:\S+ )?that\b)", "the number, or its name"),
    Rule(r"(?:^|[.!?] )No more than\b", "At most"),
    Rule(r"\bas (?:\w+ )?recipes? (?:says?|tells?|asks?)\b", "as configured, a recipe's"),
)
"""Words that stand nowhere."""


class Text(NamedTuple):
    """A docstring, a comment or a string of a file, or a whole file."""

    line: int
    words: str
    is_docstring: bool = False


class Hit(NamedTuple):
    """A place where a rule is broken."""

    line: int
    words: str
    better: str


def texts(source: str) -> Iterator[Text]:
    """Yield the docstrings, strings and blocks of comments of Python source."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str(words)) as constant):
                docstrings.add(constant)
                yield Text(constant.lineno, words, is_docstring=True)
            case ast.Constant(str(words)) if node not in docstrings:
                yield Text(node.lineno, words)
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row = token.start[0]
            if block and row > last + 1:
                yield Text(last - len(block) + 1, "\n".join(block))
                block = []
            block.append(token.string)
            last = row
    if block:
        yield Text(last - len(block) + 1, "\n".join(block))


def hits(text: Text) -> Iterator[Hit]:
    """Yield every place of a text where a rule is broken."""
    rules = list(ANYWHERE)
    if text.is_docstring:
        rules += [Rule(rf"\A\s*{start.pattern}\b", start.better) for start in STARTS]
    for rule in rules:
        for found in re.finditer(rule.pattern.replace(" ", r"[\s#]+"), text.words):
            line = text.line + text.words.count("\n", 0, found.start())
            yield Hit(line, " ".join(found[0].split()), rule.better)


def check(path: Path) -> list[Hit]:
    """Return the hits of one file, in the order of its lines."""
    content = path.read_text(encoding="utf-8")
    parts = texts(content) if path.suffix == ".py" else [Text(1, content)]
    return sorted({hit for text in parts for hit in hits(text)})


def files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files to read among these files and folders."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        yield from (
            file
            for file in sorted(path.rglob("*"))
            if file.is_file() and file.suffix in SUFFIXES and file.name not in EXEMPT
        )


def main(words: list[str]) -> int:
    """Print the hits of the named files, by default of CLEAN; return 1 if there are any."""
    named = [Path(word) for word in words] or [ROOT / name for name in CLEAN]
    found = False
    for path in files(named):
        for hit in check(path):
            found = True
            print(f"{path}:{hit.line}: {hit.words}: {hit.better}")
    return int(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
