"""The check of the words that the package's texts avoid."""

import re
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


def test_every_module_that_tests_share_has_a_line_in_its_readme() -> None:
    folder = Path(plain_english.__file__).parent
    text = (folder / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(?!test_)(\w+\.py)`", text))
    assert listed == {path.name for path in folder.glob("*.py")}
