"""The code and the commands of docs/own-code.md work."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from documents import DOCS, blocks
from PIL import Image
from programs import output_of

from largebatch.cli.main import USER, main


def shown(language: str) -> list[str]:
    return [block.text for block in blocks(DOCS / "own-code.md", language)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    data_set, model, script = shown("python")
    (recipe,) = shown("yaml")
    for name, text in {
        "shapes.py": data_set,
        "nets.py": model,
        "script.py": script,
        "squares.yaml": recipe,
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


MODULES = {"shapes", "nets"}


def forget_modules() -> None:
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore:Overwriting tiny_net")  # it is imported again
def test_the_command_trains_on_one_worker_and_code_runs_only_if_a_command_names_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    train = shlex.split(shown("sh")[0].splitlines()[0].replace("--workers 2", ""))
    named = dict.fromkeys(("resume", "evaluate", "polish"), ("shapes:make", "nets"))
    named |= dict.fromkeys(("predict", "export"), ("nets",))  # type: ignore[arg-type]  # shorter
    more = {"resume": ["--max-steps", "2"], "polish": ["--out", "polished"]}
    more |= {"predict": ["photo.png"], "export": ["--out", "other"]}
    Image.effect_noise((40, 32), 100).save("photo.png")
    try:
        assert main([*train[1:], "--max-steps", "2"]) == 0
        for command, names in named.items():
            forget_modules()
            capsys.readouterr()
            words = [command, "runs/squares", *more.get(command, [])]
            assert main(words) == USER, command  # the folder alone never makes code run
            message = capsys.readouterr().err
            assert all(name in message for name in names)
            assert message.count("\n") == 1
            assert not MODULES & sys.modules.keys()
            options = ["--import", "nets"]
            options += ["--dataset", "shapes:make"] * ("shapes:make" in names)
            assert main([*words, *options]) == 0, command
        assert main(["export", "runs/squares", "--import", "nets", "--out", "exported"]) == 0
        assert main(["plan", "squares.yaml", "--import", "nets"]) == 0
    finally:
        forget_modules()
    printed = capsys.readouterr().out
    assert "exported/config.json" in printed
    assert "this machine" in printed


@pytest.mark.long
def test_the_commands_train_and_evaluate_on_two_workers(place: Path) -> None:
    (commands,) = shown("sh")
    train, evaluate = map(shlex.split, commands.splitlines())
    assert train[0] == evaluate[0] == "largebatch"
    trained = output_of(sys.executable, "-m", *train, cwd=place)
    assert "report: runs/squares" in trained
    found = re.search(r"top-1 ([\d.]+)%", output_of(sys.executable, "-m", *evaluate, cwd=place))
    assert found is not None
    assert float(found[1]) > 90


@pytest.mark.long
def test_the_script_trains_on_two_workers(place: Path) -> None:
    assert float(output_of(sys.executable, "script.py", cwd=place).splitlines()[-1]) > 0.9
