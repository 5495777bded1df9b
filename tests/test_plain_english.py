"""The check of the words that the package's texts avoid."""

from pathlib import Path

import plain_english
import pytest
from plain_english import main


def test_words_are_found_in_docstrings_comments_and_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.md").write_text("Short and plain, for every worker.\n")
    assert main([str(tmp_path)]) == 0
    bad = tmp_path / "bad.py"
    bad.write_text('"""Of a module."""\n\n# It waits for\n# ever, as so many do.\n')
    (tmp_path / "picture.png").write_bytes(b"\xff anew")
    assert main([str(tmp_path)]) == 1
    found = [line.split(":")[1:3] for line in capsys.readouterr().out.splitlines()]
    assert found == [["1", " Of"], ["3", " for # ever"], ["4", " so many"]]


def test_the_clean_files_exist() -> None:
    assert all((plain_english.ROOT / name).exists() for name in plain_english.CLEAN)
