"""The check of the words that the package's texts avoid."""

from pathlib import Path

import plain_english
import pytest
from plain_english import ANYWHERE, STARTS, Text, check, files, hits, main

# Each broken by its first text and not by the second.
PHRASES = {
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
    r"\bso many\b(?!,? (?:\S+ )?that\b)": ("after so many updates", "so many files that it fails"),
    r"(?:^|[.!?] )No more than\b": ("It is. No more than two", "no more than two"),
    r"\bas (?:\w+ )?recipes? (?:says?|tells?|asks?)\b": ("as the recipe says", "as recipes"),
}


def found(text: str, *, is_docstring: bool = False) -> list[str]:
    return [hit.words for hit in hits(Text(1, text, is_docstring))]


@pytest.mark.parametrize("rule", STARTS, ids=lambda rule: rule.pattern)
def test_a_docstring_may_not_begin_with(rule: plain_english.Rule) -> None:
    assert found(f"\n    {rule.pattern} the updates.", is_docstring=True) == [rule.pattern]
    assert not found(f"{rule.pattern} the updates.")
    assert not found(f"{rule.pattern}x the updates.", is_docstring=True)


@pytest.mark.parametrize("rule", ANYWHERE, ids=lambda rule: rule.pattern)
def test_a_phrase_is_reported_and_a_similar_valid_one_is_not(rule: plain_english.Rule) -> None:
    broken, plain = PHRASES[rule.pattern]
    assert len(found(broken)) == 1
    assert not found(plain)


def test_docstrings_comments_and_strings_are_read_and_names_are_not(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""Of a module."""\n'
        "\n"
        "# A comment: it waits for\n"
        "# ever.\n"
        "heard = 1  # for\n"
        'raise ValueError(f"{heard} signals were heard")\n'
        "class A:\n"
        "    size: int\n"
        '    """Of the\n'
        '    values drawn anew."""\n'
    )
    assert [(hit.line, hit.words) for hit in check(file)] == [
        (1, "Of"), (3, "for # ever"), (6, "heard"), (9, "Of"), (10, "anew"),
    ]  # fmt: skip


def test_the_command_prints_the_hits_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.md").write_text("Of course it is short and plain.\n")
    assert main([str(tmp_path)]) == 0
    bad = tmp_path / "bad.md"
    bad.write_text("# Title\n\nBegin anew\n")
    (tmp_path / "picture.png").write_bytes(b"\xff anew")
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{bad}:3: anew: again\n"


def test_the_clean_files_exist() -> None:
    named = [plain_english.ROOT / name for name in plain_english.CLEAN]
    assert all(path.exists() for path in named)
    assert all(file.name not in plain_english.EXEMPT for file in files(named))
