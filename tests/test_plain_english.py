"""The check of the words that the package's texts avoid."""

from pathlib import Path

import plain_english
import pytest
from plain_english import STARTS, Text, check, files, hits, main, texts


def found(text: str, *, is_docstring: bool = False) -> list[str]:
    return [hit.words for hit in hits(Text(1, text, is_docstring))]


@pytest.mark.parametrize("rule", STARTS, ids=lambda rule: rule.pattern)
def test_a_docstring_may_not_begin_with(rule: plain_english.Rule) -> None:
    start = rule.pattern
    assert found(f"{start} the others.", is_docstring=True) == [start]
    assert found(f"\n    {start} the others.", is_docstring=True) == [start]
    assert not found(f"{start} the others.")
    assert not found(f"{start}x are other words.", is_docstring=True)


@pytest.mark.parametrize(
    ("broken", "plain"),
    [
        ("drawn anew", "a new one"),
        ("they wait\n# for ever", "for every worker"),
        ("foreign data", "a foreign key of a table"),
        ("the disk is well.", "this is well below 1"),
        ("after so many updates", "so many files that it fails"),
        ("It is. No more than two", "no more than two"),
    ],
)
def test_a_phrase_is_reported_and_a_similar_valid_one_is_not(broken: str, plain: str) -> None:
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
