"""The commands `lab recommend` and `suggest`, from the databases that they find."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from policy_databases import Policy, fill

from largebatch.cli.main import DONE, USER, main
from largebatch.recipe.loading import load_recipe

QUICK = Policy(reached=[4, 5, 6], top1=[0.91, 0.92, 0.93])
SLOW = Policy(reached=[9, 10, 11], top1=[0.95, 0.96, 0.96])
SUGGEST = ["suggest", "--batch", "96", "--samples", "1437", "--val-samples", "360"]
SUGGEST += ["--classes", "10", "--image-size", "16", "--model", "lenet5", "--epochs", "4"]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "runs" / "tiny").mkdir(parents=True)
    fill(folder / "runs" / "tiny", {"quick": QUICK, "slow": SLOW})
    return folder


def test_the_database_in_runs_answers(
    filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(filled)
    question = ["lab", "recommend", "--dataset", "digits", "--model", "lenet5", "--target", "0.90"]
    assert main(question) == DONE
    text = capsys.readouterr().out
    assert "\nrecommended: quick, peak_lr 0.5;" in text
    assert "\nschedule:\n  peak_lr: 0.5\n" in text
    assert text.endswith("/runs/seed-3\n")
    url = f"sqlite:///{filled}/runs/tiny/study.db"
    assert main(["lab", "recommend", "--by", "accuracy", "--storage", url, "--json"]) == DONE
    (content,) = json.loads(capsys.readouterr().out)
    assert (content["recommended"], content["storage"]) == ("slow", url)


def test_a_damaged_database_that_was_not_named_is_passed_over(
    filled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "runs" / "damaged").mkdir(parents=True)
    (tmp_path / "runs" / "damaged" / "study.db").write_bytes(b"not a database " * 100)
    (tmp_path / "runs" / "tiny").symlink_to(filled / "runs" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert main(["lab", "recommend", "--by", "accuracy", "--json"]) == DONE
    out, errors = capsys.readouterr()
    assert json.loads(out)[0]["recommended"] == "slow"
    assert " ".join(errors.split()).startswith("passed over: sqlite:")


def test_a_recommendation_takes_no_torch(filled: Path) -> None:
    program = (
        "import sys; from largebatch.cli.main import main; "
        "main(['lr', 'recommend', '--by', 'accuracy']); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=filled,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.endswith("\nFalse\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--by", "accuracy"], "no runs/*/study.db below this folder; fill one with"),
        ([], "--by cost is the cost to a top-1 accuracy: give --target"),
        (["--target", "0.9", "--storage", "sqlite:///no.db"], "no.db: no such file; `largebatch"),
        (["--target", "0.9", "--storage", "no.journal"], "no.journal: no such file"),
        (["--target", "0.9", "--storage", "sqlite:///broken.db"], "cannot be used: file is not a"),
        (["--target", "0.9", "--storage", "no url"], "no url: cannot be used"),
    ],
)
def test_a_database_that_is_none_is_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.db").write_bytes(b"not a database " * 100)
    assert main(["lab", "recommend", *words]) == USER
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["broken.db"]


def test_suggest_takes_the_shape_that_was_measured(
    filled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SUGGEST, "--out", "points.yaml"]) == DONE
    points = capsys.readouterr().out
    assert "warm-up, share of the run" in points
    assert "measured polic" not in points
    monkeypatch.chdir(filled)
    assert main([*SUGGEST, "--out", str(tmp_path / "measured.yaml")]) == DONE
    text = " ".join(capsys.readouterr().out.split())
    assert "policy: the shape of slow, which has the highest top-1 of 2 policies" in text
    assert "warm-up, share of the run" not in text
    assert "and polishing as a share of the run" in text
    without, taken = (load_recipe(tmp_path / f"{name}.yaml") for name in ("points", "measured"))
    assert (without.schedule.decay.kind, taken.schedule.decay.kind) == ("polynomial", "constant")
    assert taken.model_copy(update={"schedule": without.schedule}) == without


def test_suggest_skips_an_unreadable_database_that_was_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/one").mkdir(parents=True)
    Path("runs/one/study.db").write_bytes(b"not a database " * 100)
    assert main(SUGGEST) == DONE
    out, errors = (" ".join(text.split()) for text in capsys.readouterr())
    assert "no measured policies: no study of lr bench is in sqlite:" in out
    assert "passed over: sqlite:" in errors
    assert "cannot be used: file is not a database" in errors
    assert main([*SUGGEST, "--storage", "sqlite:///runs/one/study.db"]) == USER
