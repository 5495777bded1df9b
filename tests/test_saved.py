"""What is polished of a run that has not ended, and under which name the record has it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import AFFINE, BEFORE, CLEAN, JUDGED, STATISTICS, a_recipe, content, weights

from largebatch import run
from largebatch.cli import DONE, USER, main
from largebatch.plan import make_plan
from largebatch.saved import _load, _stage

ALL = (CLEAN, "ema: 0.7", AFFINE, STATISTICS)


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than these runs do."""
    monkeypatch.setattr("largebatch.runner.write_report", lambda _: None)


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped before its average became the model."""
    folder = tmp_path_factory.mktemp("unfinished") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("largebatch.runner.write_report", lambda _: None)
        run(a_recipe(*ALL), out=folder, max_steps=BEFORE - 1)
    return folder


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_the_average_of_an_unfinished_run_is_polished_where_it_is_asked_for(
    unfinished: Path, tmp_path: Path
) -> None:
    average = content(unfinished)["average"]
    live = weights(unfinished)
    names = [name for name, value in live.items() if value.is_floating_point()]
    trained = [name for name in names if "running_" not in name]
    for words, expected in (
        ([], [live[name] for name in trained]),
        (["--ema"], [average[f"module.{place}"] for place in range(len(trained))]),
    ):
        out = tmp_path / f"polished{len(words)}"
        assert main(["polish", str(unfinished), *words, "--out", str(out)]) == DONE
        found = weights(out)
        torch.testing.assert_close([found[n] for n in trained], expected, rtol=0, atol=0)
        assert not found["bn1.running_mean"].equal(live["bn1.running_mean"])
        names = [stage["name"] for stage in summary(out)["stages"]]
        assert names == ["ema" if words else "clean", "statistics"]
    first, second = (summary(tmp_path / f"polished{n}")["stages"][0]["loss"] for n in (0, 1))
    assert first != second


def test_the_average_is_compared_too(unfinished: Path, tmp_path: Path) -> None:
    losses = []
    for words in ([], ["--ema"]):
        out = tmp_path / f"table{len(words)}.json"
        how = ["--samples", "96", "--epochs", "0.1", "--out", str(out)]
        assert main(["polish", "--compare", str(unfinished), *words, *how]) == DONE
        losses.append([row["loss"] for row in json.loads(out.read_text())["rows"]])
    assert all(one != other for one, other in zip(*losses, strict=True))
    polished = tmp_path / "polished"
    assert main(["polish", str(unfinished), "--ema", "--out", str(polished)]) == DONE
    assert summary(polished)["stages"][0]["loss"] == losses[1][0]


def test_without_an_average_it_is_refused(
    unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(a_recipe(CLEAN), out=tmp_path / "plain", max_steps=2)
    words = [str(tmp_path / "plain"), "--ema", "--out", str(tmp_path / "polished")]
    assert main(["polish", *words]) == USER
    assert "plain: holds no moving average: " in capsys.readouterr().err
    assert not (tmp_path / "polished").exists()


@pytest.mark.parametrize(
    ("polish", "step", "ended", "name"),
    [
        (ALL, 3, {}, "train"),
        (ALL, 6, {"train": True}, "train"),
        (ALL, 7, {"train": True}, "clean"),
        (ALL, 8, {"train": True, "clean": True, "ema": True}, "ema"),
        (ALL, 9, {"train": True, "clean": True, "ema": True}, "affine"),
        (ALL, 11, {"train": True, "clean": True, "ema": False, "affine": False}, "clean"),
        (ALL, 11, {"train": True, "clean": False, "ema": True, "statistics": True}, "ema"),
        (ALL, 11, {"clean": True, "statistics": False}, "clean"),
        ((CLEAN,), 8, {"train": True, "clean": False}, "train"),
    ],
)
def test_the_stage_of_the_weights_is_the_one_under_way_or_the_last_that_was_kept(
    polish: tuple[str, ...], step: int, ended: dict[str, bool], name: str, unfinished: Path
) -> None:
    stages: list[dict[str, Any]] = [{"name": key, "kept": kept} for key, kept in ended.items()]
    state = replace(_load(unfinished), step=step, stages=stages)
    assert _stage(state, make_plan(a_recipe(*polish), workers=1)) == name


def test_what_polish_says_of_a_run_begins_with_the_stage_that_was_kept(tmp_path: Path) -> None:
    """An average that reaches back one update is as good as the model, and so not kept."""
    run(a_recipe("ema: 1e-9", JUDGED), out=tmp_path / "run")
    assert main(["polish", str(tmp_path / "run"), "--out", str(tmp_path / "polished")]) == DONE
    assert [stage["name"] for stage in summary(tmp_path / "polished")["stages"]] == [
        *("train", "statistics"),
    ]
