"""The check of the words that the package's texts avoid."""

from pathlib import Path

import plain_english
import pytest
from plain_english import check, files, main


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
