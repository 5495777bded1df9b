"""Report words and phrases that the package's texts avoid, with plainer ones.

    python tests/support/plain_english.py [FILE_OR_FOLDER ...]

Prints `file:line: words: better` for each hit and exits with 1 if there is one.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLEAN = (
    *(".ci", "CONTRIBUTING.md", "Makefile", "README.md", "benchmarks", "docs", "largebatch"),
    *("launch", "recipes", "tests"),
)
"""Files and folders that `make lint` checks."""
SUFFIXES = {"", ".py", ".md", ".html", ".yaml", ".sh"}
"""Files that are read in a folder. A file named itself is read whatever it is."""
EXEMPT = {"plain_english.py", "test_plain_english.py"}
"""Files that list the words themselves."""

STARTS = {
    "Say": "Return, Format, Print, Describe",
    "Let": "Make, Allow, Start",
    "Tell": "Return True if, Report",
    "Ask": "Request, Return",
    "Be": "Run, Act as",
    "Put": "Write, Set, Add",
    "Hand": "Return, Yield, Pass",
    "See that": "Check, Raise ... unless",
    "Do the same": "name what is done",
    "Of": "begin with the noun",
    "Those": "begin with the noun",
    "That of": "begin with the noun",
    "Whether there": "True if",
    "What came of": "Result of",
}
"""Words that begin no docstring."""

ANYWHERE = {
    r"\banew\b": "again",
    r"\bfor ever\b": "indefinitely",
    r"\bbefell\b": "happened to",
    r"\blest\b": "so that ... not",
    r"\bheard\b": "received",
    r"\bowed\b": "pending",
    r"\bforeign\b(?! keys?\b)": "other, unknown, of another program",
    r"\bas far as (?:it goes|they go)\b": "tentative",
    r"\b(?:is|are|be) well(?=\s*(?:[.,;:!?)]|$))": "works",
    r"\bwith some to spare\b": "over-allocated by",
    r"\banswers? to the pointer\b": "interactive",
    r"\bby the clock\b": "wall-clock",
    r"\bso many\b(?!,? (?:\S+ )?that\b)": "the number, or its name",
    r"(?:^|[.!?] )No more than\b": "At most",
    r"\bas (?:\w+ )?recipes? (?:says?|tells?|asks?)\b": "as configured, a recipe's",
}
"""Words to avoid; a space stands for any white space and the mark of a comment."""

RULES = {
    **{rf'(?<="""){start}\b': better for start, better in STARTS.items()},
    **{words.replace(" ", r"[\s#]+"): better for words, better in ANYWHERE.items()},
}


def check(path: Path) -> Iterator[str]:
    """Yield a line of text for each place of a file where a rule is broken."""
    content = path.read_text(encoding="utf-8")
    for pattern, better in RULES.items():
        for found in re.finditer(pattern, content):
            line = 1 + content.count("\n", 0, found.start())
            yield f"{path}:{line}: {' '.join(found[0].split())}: {better}"


def files(path: Path) -> list[Path]:
    """Return the file itself, or the files to read in a folder."""
    if not path.is_dir():
        return [path]
    inside = (file for file in sorted(path.rglob("*")) if file.is_file())
    return [it for it in inside if it.suffix in SUFFIXES and it.name not in EXEMPT]


def main(words: list[str]) -> int:
    """Print the hits of the named files, by default of CLEAN; return 1 if there are any."""
    named = [Path(word) for word in words] or [ROOT / name for name in CLEAN]
    hits = [hit for path in named for file in files(path) for hit in check(file)]
    print("".join(f"{hit}\n" for hit in hits), end="")
    return int(bool(hits))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
