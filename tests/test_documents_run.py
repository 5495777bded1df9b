"""Every command of the documents that needs only this machine runs, in the page's order."""

import re
from pathlib import Path

import pytest
from documents import DOCS, PAGES, ROOT, arguments, blocks, commands, name_of

from largebatch.cli.main import DONE, FAILED, main

QUICK = {"check", "explain", "launch", "recipes", "lab suggest"}
"""Commands that need no PyTorch, and take no time."""

ENDS_WITH = {"check --mlperf-closed resnet50_86016_fujitsu": FAILED}
"""Exit codes of those that find what they look for."""

SHORT = ["--max-steps", "60"]
"""Options added to a command that trains to its end, which takes a minute or more."""

ELSEWHERE = {
    "docs/your-own-data.md": "test_own_data.py",
    "docs/own-code.md": "test_own_code.py",
    "docs/own-package.md": "test_own_package.py",
}
"""Pages whose commands need photographs or modules: the tests that run them with these."""


def is_quick(command: str) -> bool:
    (words,) = arguments(command)
    planned = (
        words[0] == "plan"
        and "--cluster" in words
        and not any(word.endswith(".yaml") for word in words)
    )
    return bool({words[0], " ".join(words[:2])} & QUICK) or planned


def run(command: str, printed: pytest.CaptureFixture[str]) -> None:
    """Do what a shell does with a command."""
    (words,) = arguments(command)
    trains = (words[0] == "train" or words[:2] == ["lab", "noise"]) and "--max-steps" not in words
    code = main([*words, *SHORT] if trains else words)
    assert code == ENDS_WITH.get(" ".join(words), DONE), printed.readouterr()
    out = printed.readouterr().out
    if to_file := re.search(r" > (\S+)$", command):
        Path(to_file[1]).write_text(out, encoding="utf-8")
    else:
        assert out


RUN_HERE = [page for page in PAGES if commands(page, here=True) and name_of(page) not in ELSEWHERE]


@pytest.mark.parametrize("page", RUN_HERE, ids=name_of)
def test_the_quick_commands_of_a_page_run(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "docs").symlink_to(DOCS)
    monkeypatch.chdir(tmp_path)
    for command in filter(is_quick, commands(page, here=True)):
        run(command, capsys)


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    [page for page in RUN_HERE if not all(map(is_quick, commands(page, here=True)))],
    ids=name_of,
)
def test_every_command_of_a_page_runs(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    draws: None,
) -> None:
    (tmp_path / "docs").symlink_to(DOCS)
    monkeypatch.chdir(tmp_path)
    for command in commands(page, here=True):
        run(command, capsys)


@pytest.mark.long
def test_the_python_of_the_reference_trains_on_two_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draws: None
) -> None:
    """Other blocks are run by test_parts, test_own_code, test_examples and test_auditing."""
    (block,) = blocks(DOCS / "reference" / "python.md", "python")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    short = block.text.replace('["', '["duration={steps: 90}", "')  # 75 of these are clean
    assert short != block.text
    exec(compile(short, str(block.page), "exec"), names)
    assert (tmp_path / "runs/eta/report.html").exists()
