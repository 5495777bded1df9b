"""The check of the words that the package's texts avoid."""

from pathlib import Path

import plain_english
import pytest
from plain_english import ANYWHERE, STARTS, Text, check, files, hits, main, texts

STARTING = {
    "Say": "Say which gradients are sent together.",
    "Let": "Let the others wait.",
    "Tell": "Tell a mapping from a list.",
    "Ask": "Ask for the weights.",
    "Be": "Be one worker of a run.",
    "Put": "Put the gradients aside.",
    "Hand": "Hand out mini-batches.",
    "See that": "See that the disk is there.",
    "Do the same": "Do the same without a comparison.",
    "Of": "Of the updates.",
    "Those": "Those that an update takes.",
    "That of": "That of the first update.",
    "Whether there": "Whether there was one.",
    "What came of": "What came of a simulation.",
}

PLAIN_STARTS = [
    "Sayings are nouns.",
    "Letters of the names of classes.",
    "Beta of Adam.",
    "Putative losses.",
    "Offsets of the files in bytes.",
    "Return those that an update takes.",
    "Thosen is no word of the list.",
]

# Each broken by its first text and by none of the others.
STANDING = {
    r"\banew\b": ("drawn anew", "a new one"),
    r"\bfor ever\b": ("they wait\n# for ever", "for every worker"),
    r"\bbefell\b": ("what befell others", "what happened"),
    r"\blest\b": ("lest it fail", "the smallest"),
    r"\bheard\b": ("a signal was heard", "unheard-of"),
    r"\bowed\b": ("gradients owed", "allowed"),
    r"\bforeign\b(?! keys?\b)": ("foreign data", "a foreign key of a table"),
    r"\bas far as (?:it goes|they go)\b": ("as far as it goes", "as far as is known"),
    r"\b(?:is|are|be) well(?=\s*(?:[.,;:!?)]|$))": ("the disk is well.", "this is well below 1"),
    r"\bwith some to spare\b": ("with some to spare", "spare"),
    r"\banswers? to the pointer\b": ("a page answers to the pointer", "answers to questions"),
    r"\bby the clock\b": ("by the clock", "clock"),
    r"\bso many\b(?!,? (?:\S+ )?that\b)": (
        "after so many updates",
        "so many files that it fails",
    ),
    r"(?:^|[.!?] )No more than\b": ("It is. No more than two", "no more than two"),
    r"\bas (?:\w+ )?recipes? (?:says?|tells?|asks?)\b": ("as the recipe says", "as recipes"),
}


def found(text: str, *, is_docstring: bool = False) -> list[str]:
    return [hit.words for hit in hits(Text(1, text, is_docstring))]


def test_every_rule_has_an_example() -> None:
    assert [rule.pattern for rule in STARTS] == [*STARTING]
    assert [rule.pattern for rule in ANYWHERE] == [*STANDING]


@pytest.mark.parametrize("start", STARTING)
def test_a_docstring_may_not_begin_with(start: str) -> None:
    assert found(STARTING[start], is_docstring=True) == [start]
    assert found(f"\n    {STARTING[start]}", is_docstring=True) == [start]
    assert not found(STARTING[start])


@pytest.mark.parametrize("text", PLAIN_STARTS)
def test_a_docstring_may_begin_with(text: str) -> None:
    assert not found(text, is_docstring=True)


@pytest.mark.parametrize("pattern", STANDING)
def test_a_phrase_is_reported_and_a_similar_valid_one_is_not(pattern: str) -> None:
    broken, plain = STANDING[pattern]
    assert len(found(broken)) == 1
    assert not found(plain)


def test_docstrings_comments_and_strings_are_read_and_names_are_not(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""Of a module."""\n'
        "\n"
        "# A comment: it waits for\n"
        "# ever.\n"
        "heard = 1\n"
        'raise ValueError(f"{heard} signals were heard")\n'
        "class A:\n"
        "    size: int\n"
        '    """Of the\n'
        '    values drawn anew."""\n'
    )
    assert [(hit.line, hit.words) for hit in check(file)] == [
        (1, "Of"),
        (3, "for # ever"),
        (6, "heard"),
        (9, "Of"),
        (10, "anew"),
    ]


def test_separate_comments_are_separate_texts() -> None:
    assert [text.words for text in texts("x = 1  # for\n\ny = 2  # ever\n# more\n")] == [
        "# for",
        "# ever\n# more",
    ]


def test_a_page_is_read_whole(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nOf course it runs\nfor ever.\n")
    assert [(hit.line, hit.words) for hit in check(page)] == [(4, "for ever")]


def test_the_command_prints_the_hits_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.md").write_text("Short and plain.\n")
    assert main([str(tmp_path)]) == 0
    bad = tmp_path / "bad.md"
    bad.write_text("Begin anew\n")
    (tmp_path / "picture.png").write_bytes(b"\xff anew")
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{bad}:1: anew: again\n"


def test_the_clean_files_exist() -> None:
    named = [plain_english.ROOT / name for name in plain_english.CLEAN]
    assert named
    assert all(path.exists() for path in named)
    assert all(file.name not in plain_english.EXEMPT for file in files(named))
