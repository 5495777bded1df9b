"""mlperf.log: MLPerf's own compliance checker passes it, and its clock tells the truth."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlperf_logs import (
    MISSED,
    POINTS,
    REACHED,
    evaluation,
    finish,
    lines,
    recipe,
    start,
    update,
    whole_run,
    write,
)
from short_runs import AFFINE, CLEAN, STATISTICS, a_recipe, log

from largebatch import run
from largebatch.cli.main import main
from largebatch.data.datasets import digits
from largebatch.errors import CheckpointError, DataError, LargebatchError, MissingPackageError
from largebatch.lab.mlperf.logger import MLPerf, hyperparameters
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.tracking.events import Event, Tracker
from largebatch.tracking.log import record

LEARNS = (
    *("tracking=[mlperf]", "polish=null", "model.arguments.channels=[16, 16, 32, 64]"),
    *("model.arguments.drop_rate=0", "duration={epochs: 4}", "schedule.warmup={epochs: 1}"),
    *("schedule.decay.end_lr=1e-4", "schedule.first_step=1", "optimizer.eta=0.05"),
    *("evaluation.every_epochs=2", "data.crop_area=null"),
)
"""The digits by the rules for LARS, to more than 75.9 % in four epochs."""


def checker(path: Path) -> tuple[int, str]:
    """Run MLPerf's compliance checker as its users do; return its exit code and what it prints."""
    words = ["--usage", "training", "--ruleset", "4.0.0", "--log_output", f"{path}.checked"]
    done = subprocess.run(
        [sys.executable, "-m", "mlperf_logging.compliance_checker", *words, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_whole_run_by_the_closed_rules_passes_the_real_checker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digits stand in for ImageNet, which the checker cannot tell."""
    monkeypatch.setenv("MLPERF_SUBMISSION_DIVISION", "closed")
    summary = run(a_recipe(STATISTICS, changes=LEARNS), out=tmp_path / "run")
    assert summary.top1 is not None
    assert summary.top1 > 0.8
    path = tmp_path / "run" / "mlperf.log"
    code, printed = checker(path)
    assert code == 0, printed
    for rules in ("closed_common", "closed_resnet", "closed_resnet_lars"):
        assert f"/{rules}.yaml" in printed
    reached = [each for each in log(tmp_path / "run", "evaluation") if each["top1"] >= 0.759]
    last = lines(path)[-1]
    assert (last["key"], last["metadata"]["status"]) == ("run_stop", "success")
    accuracy = lines(path, "eval_accuracy")[-1]
    assert accuracy["value"] == reached[0]["top1"]
    assert accuracy["metadata"]["epoch_num"] == pytest.approx(reached[0]["epoch"], abs=1e-6)


def test_a_run_with_polishing_that_is_stopped_and_resumed_passes_the_open_rules(
    tmp_path: Path,
) -> None:
    polished = a_recipe(CLEAN, AFFINE, STATISTICS, changes=("tracking=[mlperf]",))
    path = tmp_path / "run" / "mlperf.log"
    run(polished, out=tmp_path / "run", max_steps=4)
    before = path.read_text()
    assert "run_stop" not in before
    run(polished, out=tmp_path / "run", resume=True)
    assert path.read_text().startswith(before)
    code, printed = checker(path)
    assert code == 0, printed
    assert "/open_resnet.yaml" in printed
    stages = log(tmp_path / "run", "evaluation")
    assert [each["value"] for each in lines(path, "eval_accuracy")] == [
        each["top1"] for each in stages
    ]
    assert lines(path)[-1]["metadata"]["status"] == "aborted"
    times = [each["time_ms"] for each in lines(path)]
    assert times == sorted(times)


@pytest.mark.parametrize("name", ["32768_mlperf", "57344_nvidia", "65536_google"])
def test_the_log_of_a_recipe_that_keeps_the_closed_rules_passes_them(
    name: str, tmp_path: Path
) -> None:
    """Without a word in the environment it says closed; the log holds the recipe's numbers."""
    of = recipe(name)
    path = write(tmp_path, of, whole_run(of, reached_at=71.0 if name != "32768_mlperf" else 55.0))
    code, printed = checker(path)
    assert code == 0, printed
    assert "/closed_resnet_lars.yaml" in printed
    found = {each["key"]: each["value"] for each in lines(path)}
    assert found["global_batch_size"] == of.batch.global_batch
    assert (found["train_samples"], found["eval_samples"]) == (1_281_167, 50_000)
    assert found["seed"] == of.seed
    assert found["model_bn_span"] == of.batch.bn_span


def test_fujitsus_recipe_passes_the_open_rules_and_fails_the_closed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = recipe("86016_fujitsu")
    events = whole_run(of, reached_at=85.0)
    code, printed = checker(write(tmp_path / "open", of, events))
    assert code == 0, printed
    assert "/open_resnet.yaml" in printed
    monkeypatch.setenv("MLPERF_SUBMISSION_DIVISION", "closed")
    code, printed = checker(write(tmp_path / "closed", of, events))
    assert code == 1
    for key in ("lars_epsilon", "lars_opt_end_learning_rate", "decay_poly_power"):
        assert f"{key}' failed" in printed


def test_the_hyper_parameters_are_those_of_the_references_own_log() -> None:
    """The reference is the point for 49,152, which mlperf-logging lists with all parameters."""
    theirs = dict(POINTS["resnet_ref_49152"]["Hyperparams"])
    of = recipe("49152_mlperf")
    ours = hyperparameters(of, make_plan(of.mathematics, workers=1))
    steps = "opt_learning_rate_decay_steps"
    assert ours.pop(f"lars_{steps}") == pytest.approx(theirs.pop(steps), rel=0.005)
    assert ours["opt_name"] == theirs.pop("optimizer")
    assert ours["lars_epsilon"] == theirs.pop("epsilon")
    assert ours["model_bn_span"] == theirs.pop("model_bn_span")
    assert {key: ours[f"lars_{key}"] for key in theirs} == theirs


def test_the_clock_stops_at_the_target_and_what_comes_later_is_not_in_the_log(
    tmp_path: Path,
) -> None:
    of = recipe("32768_mlperf")
    events: list[Event] = [
        start(of),
        update(0),
        evaluation(55.0, REACHED),
        update(2),
        evaluation(56, 0.77),
    ]
    path = write(tmp_path, of, [*events, finish()])
    assert [each["value"] for each in lines(path, "eval_accuracy")] == [REACHED]
    begun, stopped = lines(path, "eval_start", "run_stop")
    assert stopped["time_ms"] - begun["time_ms"] == 250
    assert len(lines(path, "run_stop")) == 1


class Slow:
    """A Tracker whose work blocks; it notes when it began and ended that, in milliseconds."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def record(self, _: Event) -> None:
        begun = 1000 * time.time()
        time.sleep(0.05)
        self.times.append((begun, 1000 * time.time()))


def test_no_other_trackers_work_is_on_the_clock(tmp_path: Path) -> None:
    of = recipe("32768_mlperf")
    before, after = Slow(), Slow()
    trackers: list[Tracker] = [before, MLPerf(tmp_path, of, began=time.time()), after]
    for event in (start(of), update(0), evaluation(55.0, REACHED), finish()):
        record(trackers, event)
    (run_start,) = lines(tmp_path / "mlperf.log", "run_start")
    (run_stop,) = lines(tmp_path / "mlperf.log", "run_stop")
    for other in (before, after):
        assert other.times[0][1] <= run_start["time_ms"] + 1  # which is rounded
        assert run_stop["time_ms"] <= other.times[2][0] + 1


def test_blocks_last_from_one_evaluation_to_the_next(tmp_path: Path) -> None:
    of = recipe("32768_mlperf")
    path = write(tmp_path, of, whole_run(of, reached_at=11.0))
    plan = make_plan(of.mathematics, workers=1)
    bounds = [0.0, *(round(plan.epoch(step), 6) for step in plan.evaluate_after[:3])]
    blocks = [each["metadata"] for each in lines(path, "block_start")]
    firsts = [block["first_epoch_num"] for block in blocks]
    assert firsts[0] == 1  # "epochs should always be numbered from 1": training_rules.adoc
    assert firsts == pytest.approx([1 + bound for bound in bounds[:3]], abs=2e-6)
    assert [block["epoch_count"] for block in blocks] == pytest.approx(
        [bounds[place + 1] - bounds[place] for place in range(3)], abs=2e-6
    )
    order = [each["key"] for each in lines(path) if each["key"].startswith(("block", "eval_"))]
    one = ["block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop"]
    assert [key for key in order if key != "eval_samples"] == 3 * one


@pytest.mark.parametrize("status", ["paused", "interrupted", "stopped", "failed"])
def test_a_resumable_run_has_no_run_stop(status: str, tmp_path: Path) -> None:
    of = recipe("32768_mlperf")
    path = write(tmp_path, of, [start(of), update(0), finish(status)])  # type: ignore[arg-type]
    assert not lines(path, "run_stop")
    write(tmp_path, of, [start(of, step=1), update(1), evaluation(58, MISSED), finish()])
    assert len(lines(path, "run_start")) == len(lines(path, "run_stop")) == 1
    assert len(lines(path, "block_start")) == len(lines(path, "block_stop")) == 1
    assert checker(path)[0] == 1  # for it is of the closed division and below the target


def test_a_finished_log_stays_as_it_is(tmp_path: Path) -> None:
    of = recipe("32768_mlperf")
    path = write(tmp_path, of, whole_run(of, reached_at=55.0))
    before = path.read_bytes()
    write(tmp_path, of, [start(of, step=1), update(1), evaluation(58, MISSED), finish()])
    assert path.read_bytes() == before


def test_a_log_without_its_start_or_with_a_damaged_line_is_not_continued(
    tmp_path: Path,
) -> None:
    of = recipe("32768_mlperf")
    with pytest.raises(CheckpointError, match="run_start.*step 7"):
        write(tmp_path, of, [start(of, step=7)])
    path = write(tmp_path, of, [start(of), finish("paused")])
    path.write_text(path.read_text().replace('"key": "seed"', '"key": seed', 1))
    with pytest.raises(CheckpointError, match=r"mlperf\.log: is damaged"):
        write(tmp_path, of, [start(of, step=7)])


def test_a_folder_is_indexed_before_the_run_for_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The index is made from every image's header, which would be before the clock starts."""
    data, out = tmp_path / "data", tmp_path / "run"
    for split in ("train", "val"):
        shutil.copytree(digits.write_digits() / split, data / split)
    of_folder = a_recipe(STATISTICS, changes=("data.source=folder", "tracking=[mlperf]"))
    with pytest.raises(DataError, match=r"tracking: \[mlperf\].*data") as found:
        run(of_folder, data=data, out=out)
    assert f"largebatch data index {data}" in str(found.value)
    assert not out.exists()
    assert main(["data", "index", str(data)]) == 0
    assert "images" in capsys.readouterr().out
    run(of_folder, data=data, out=out, max_steps=1)
    assert lines(out / "mlperf.log", "run_start")


def test_the_environment_names_the_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = recipe("32768_mlperf")
    path = write(tmp_path / "without", of, [start(of), finish("paused")])
    found = {each["key"]: each["value"] for each in lines(path)}
    assert found["submission_org"] == "unnamed: MLPERF_SUBMISSION_ORG"
    assert (found["submission_status"], found["cache_clear"]) == ("research", False)
    for key, value in {"ORG": "Us", "PLATFORM": "8xH100", "STATUS": "onprem"}.items():
        monkeypatch.setenv(f"MLPERF_SUBMISSION_{key}", value)
    monkeypatch.setenv("MLPERF_CACHE_CLEARED", "1")
    path = write(tmp_path / "with", of, [start(of), finish("paused")])
    found = {each["key"]: each["value"] for each in lines(path)}
    assert (found["submission_org"], found["submission_platform"]) == ("Us", "8xH100")
    assert (found["submission_status"], found["cache_clear"]) == ("onprem", True)
    monkeypatch.setenv("MLPERF_SUBMISSION_DIVISION", "ajar")
    with pytest.raises(LargebatchError, match="'ajar'"):
        MLPerf(tmp_path, of, began=0.0)


def test_a_missing_package_is_an_error_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlperf_logging.mllog.mllog", None)
    with pytest.raises(MissingPackageError, match="mlperf-logging"):
        MLPerf(tmp_path, recipe("32768_mlperf"), began=0.0)
    with pytest.raises(MissingPackageError, match="tracking: "):
        run(a_recipe(STATISTICS, changes=("tracking=[mlperf]",)), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
