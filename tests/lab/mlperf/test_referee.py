"""The referee's verdicts are those of MLPerf's checkers, and its numbers those of the rules."""

import logging
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from mlperf_logs import (
    POINTS,
    evaluation,
    finish,
    recipe,
    rewrite,
    run_folders,
    seeds,
    start,
    write,
)
from scipy import stats

from largebatch.cli.main import USER, main
from largebatch.errors import CheckpointError
from largebatch.lab.mlperf.referee import check

BOUNDS = (1632, 3264, 32768, 49152, 67840)
"""Batches of the points that are left when those slower than the line between others are pruned."""


def fewest(batch: int) -> tuple[float, float]:
    """Return the reference's mean and the fewest epochs that a mean may have, by the written rules.

    A one-sided t-test of two samples at 5 %: the reference's runs and ours, five, each less its
    fastest and slowest. Between two points mean and deviation are interpolated, as of twice five
    runs.
    """
    runs = {point["BS"]: sorted(point["Epochs to converge"]) for point in POINTS.values()}
    olympic = {at: float(np.mean(runs[at][1:-1])) for at in BOUNDS}
    std = {at: float(np.std(runs[at])) for at in BOUNDS}
    number = len(runs[batch]) - 2 if batch in BOUNDS else 10
    mean = float(np.interp(batch, BOUNDS, [olympic[at] for at in BOUNDS]))
    deviation = float(np.interp(batch, BOUNDS, [std[at] for at in BOUNDS]))
    quantile = stats.t.ppf(0.95, number + 3 - 2)
    return mean, mean - quantile * deviation * math.sqrt(1 / number + 1 / 3)


def changes_to(batch: int) -> Sequence[str]:
    """Return what makes the recipe for 32,768 one for another batch, by the closed rules."""
    momentum = 0.94 if batch >= 32_768 else 0.9
    return (f"batch.global_batch={batch}", f"optimizer.momentum={momentum}", "batch.bn_span=null")


long = pytest.mark.long


@pytest.mark.parametrize(
    "batch",
    [32_768, 40_960, *(pytest.param(at, marks=long) for at in (3_264, 20_000, 49_152, 67_840))],
)
def test_the_fewest_epochs_accepted_are_those_of_the_t_test(batch: int, tmp_path: Path) -> None:
    """A mean just above passes, one just below fails; points between others are interpolated."""
    mean, least = fewest(batch)
    for offset, passed in ((0.01, True), (-0.01, False)):
        folders = run_folders(
            tmp_path / str(passed), seeds("32768_mlperf", *changes_to(batch)), 5 * [least + offset]
        )
        found = check(folders)
        assert found["compliance"].passed
        assert found["convergence"].passed is passed
        assert f"RCP Mean {mean:.6g}, " in "\n".join(found["convergence"].lines)


def test_a_mean_that_is_faster_by_chance_scales_the_times(tmp_path: Path) -> None:
    folders = run_folders(tmp_path, seeds("32768_mlperf"), [54, 55.5, 55.6, 55.7, 58])
    assert str(56 / 55.6)[:9] in "\n".join(check(folders)["convergence"].lines)


@pytest.mark.parametrize(
    ("batch", "epochs", "passed", "words"),
    [
        pytest.param(1_024, 5 * [35.5], True, "BS 1632, ", id="small and slow"),
        pytest.param(1_024, 5 * [30.0], False, "BS 1632, ", id="small, fast"),
        pytest.param(98_304, 5 * [99.0], False, "Missing RCP", id="beyond all points"),
        pytest.param(32_768, [56.0, 56, 56, 56, None], True, "56.0000", id="one failed"),
        pytest.param(
            32_768, [56.0, 56, 56, None, None], False, "Insufficient convergence", id="two failed"
        ),
        pytest.param(32_768, 4 * [56.0], None, "5 runs, 4 given", id="too few"),
        pytest.param(32_768, 6 * [56.0], None, "5 runs, 6 given", id="too many"),
    ],
)  # fmt: skip
def test_what_the_points_do_not_cover_has_an_answer(
    batch: int, epochs: list[float | None], passed: bool | None, words: str, tmp_path: Path
) -> None:
    folders = run_folders(tmp_path, seeds("32768_mlperf", *changes_to(batch)), epochs)
    found = check(folders)["convergence"]
    assert found.passed is passed
    assert words in "\n".join(found.lines)


@pytest.mark.parametrize(("epochs", "code"), [(55.0, 1), pytest.param(56.0, 0, marks=long)])
def test_the_packages_own_command_agrees_on_the_same_logs(
    epochs: float, code: int, tmp_path: Path
) -> None:
    """A folder of result_*.txt, as submissions have them."""
    there = tmp_path / "results"
    there.mkdir()
    for number, folder in enumerate(
        run_folders(tmp_path / "runs", seeds("32768_mlperf"), 5 * [epochs])
    ):
        (folder / "mlperf.log").rename(there / f"result_{number}.txt")
    words = ["--rcp_version", "4.0.0", "--log_output", str(tmp_path / "log"), str(there)]
    done = subprocess.run(
        [sys.executable, "-m", "mlperf_logging.rcp_checker", *words],
        capture_output=True,
        check=False,
    )
    assert done.returncode == code
    found = check([there])
    assert found["convergence"].passed is (code == 0)


def test_the_open_division_is_not_held_to_the_reference(tmp_path: Path) -> None:
    """Fujitsu's five runs, by the epochs that a published entry of that batch could have."""
    of = seeds("86016_fujitsu")
    found = check(run_folders(tmp_path / "beyond", of, 5 * [86.0]))
    assert found["compliance"].passed
    assert found["convergence"].passed is None
    assert "Missing RCP" in found["convergence"].lines[1]
    of = seeds("32768_nus")
    convergence = check(run_folders(tmp_path / "within", of, 5 * [40.0]))["convergence"]
    assert convergence.passed is None
    assert "Min Epochs 55.44" in "\n".join(convergence.lines)


@pytest.mark.parametrize(
    ("key", "changes", "reason"),
    [
        ("lars_epsilon", {"value": 1e-9}, "CHECK for 'lars_epsilon' failed"),
        ("run_start", {"drop": True}, "Required EXACTLY_ONE occurrence of 'run_start' but found 0"),
        ("eval_accuracy", {"value": 0.7}, "Failed checks for eval_accuracy"),
        ("eval_accuracy", {"value": None}, "the checker stopped: TypeError"),
        ("eval_start", {"metadata": {}}, "CHECK for 'eval_start' failed"),
        ("opt_name", {"value": "adam"}, "CHECK for 'opt_name' failed"),
    ],
)
def test_a_log_that_breaks_a_rule_has_the_reason(
    key: str, changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    (folder,) = run_folders(tmp_path, seeds("32768_mlperf", number=1), [56.0])
    rewrite(folder / "mlperf.log", key, **changes)
    found = check([folder])["compliance"]
    assert found.passed is False
    assert any(f"mlperf.log: {reason}" in each for each in found.lines), found.lines


@pytest.mark.parametrize(
    ("number", "broken", "passed"), [(5, 1, True), (5, 2, False), (4, 1, False)]
)
def test_one_log_of_five_may_break_a_rule(
    number: int, broken: int, passed: bool, tmp_path: Path
) -> None:
    """As in package_checker, where one file in five is accepted under olympic scoring."""
    folders = run_folders(tmp_path, seeds("32768_mlperf", number=number), number * [56.0])
    for folder in folders[:broken]:
        rewrite(folder / "mlperf.log", "lars_epsilon", value=1e-9)
    found = check(folders)["compliance"]
    assert found.passed is passed
    assert len(found.lines) == broken


def test_a_log_without_an_epoch_is_not_compared_with_the_reference(tmp_path: Path) -> None:
    folders = run_folders(tmp_path, seeds("32768_mlperf"), 5 * [56.0])
    rewrite(folders[0] / "mlperf.log", "eval_accuracy", metadata={})
    found = check(folders)
    assert "eval_accuracy" in found["compliance"].lines[0]
    assert found["convergence"].passed is False


def test_two_runs_of_one_seed_and_a_run_without_one_are_refused(tmp_path: Path) -> None:
    folders = run_folders(tmp_path, [recipe("32768_mlperf")], [56.0, 56.0, 56.0])
    found = check(folders[:1])["seeds"]
    assert found.passed
    rewrite(folders[2] / "mlperf.log", "seed", drop=True)
    found = check(folders)["seeds"]
    assert found.passed is False
    assert len(found.lines) == 2
    assert "run-1/mlperf.log logs seed 1 on lab/mlperf/logger.py" in found.lines[0]
    assert "run-2/mlperf.log logs no seed" in found.lines[1]
    twice = run_folders(tmp_path / "open", [recipe("32768_nus")], 2 * [56.0])
    found = check(twice)["seeds"]
    assert found.passed is None
    assert len(found.lines) == 2


def test_the_checkers_leave_logging_as_it_was_and_print_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before = list(root.handlers), root.level
    folders = run_folders(tmp_path, [recipe("32768_mlperf")], 5 * [50.0])
    assert check(folders)["convergence"].passed is False
    assert (list(root.handlers), root.level) == before
    assert capfd.readouterr() == ("", "")


def test_logs_of_several_batches_or_divisions_do_not_pass(tmp_path: Path) -> None:
    mixed = [recipe("32768_mlperf"), recipe("49152_mlperf")]
    found = check(run_folders(tmp_path / "batch", mixed, 5 * [56.0]))
    assert found["convergence"].passed is False
    assert "Batch sizes" in "\n".join(found["convergence"].lines)
    mixed = [recipe("32768_mlperf"), recipe("32768_nus")]
    with pytest.raises(CheckpointError, match="divisions"):
        check(run_folders(tmp_path / "division", mixed, 2 * [56.0]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "submission_benchmark"),
        (':::MLLOG {"key": "run_start"\n', "damaged.*':::MLLOG"),
        (':::MLLOG {"key": "run_start"}\n', "damaged.*'time_ms'"),
        (
            ':::MLLOG {"time_ms": 1, "key": "run_stop", "value": 1, "metadata": {}}\n',
            "submission_benchmark.*'resnet'",
        ),
    ],
)
def test_a_damaged_log_is_an_error(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mlperf.log").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        check([tmp_path])


def test_an_unfinished_run_does_not_pass(tmp_path: Path) -> None:
    of = recipe("32768_mlperf")
    write(tmp_path, of, [start(of), evaluation(3.0, 0.4), finish("interrupted")])
    found = check([tmp_path])["compliance"]
    assert found.passed is False
    assert any("run_stop" in line for line in found.lines)


def test_five_good_runs_pass_without_torch(tmp_path: Path) -> None:
    folders = run_folders(tmp_path, seeds("32768_mlperf"), [55.5, 56, 56, 57, 57])
    words = ["report", "mlperf", *map(str, folders)]
    program = (
        "import sys; from largebatch.cli.main import main; "
        f"code = main({words!r}); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert [line.split()[:2] for line in done.stdout.splitlines()[:3]] == [
        ["compliance", "passed"],
        ["seeds", "passed"],
        ["convergence", "passed"],
    ]


def test_what_cannot_be_checked_is_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path, tmp_path / "none"):
        assert main(["report", "mlperf", str(path)]) == USER
        error = capsys.readouterr().err
        assert str(path) in error
        assert error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "mlperf_logging.compliance_checker.mlp_parser", None)
    monkeypatch.delitem(sys.modules, "mlperf_logging.compliance_checker", raising=False)
    folders = run_folders(tmp_path, seeds("32768_mlperf"), 5 * [56.0])
    assert main(["report", "mlperf", *map(str, folders)]) == USER
    assert "mlperf-logging" in capsys.readouterr().err
