"""Every way a command can go wrong: exit code, message, and nothing half-written."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from PIL import Image

from largebatch.cli.main import DONE, FAILED, USER, main
from largebatch.errors import DataError, PeerLostError, WorkerFailedError
from largebatch.lab.studies.namespaces import lacking
from largebatch.recipe.loading import load_recipe
from largebatch.training.checkpoint import load_checkpoint, write_checkpoint

RECIPES = Path(__file__).parents[2] / "recipes"
DIGITS = str(RECIPES / "quickstart" / "digits_96.yaml")
FUJITSU = str(RECIPES / "imagenet" / "resnet50_86016_fujitsu.yaml")


def images(root: Path) -> Path:
    """Write a folder of two classes, two training images and one validation image each."""
    for split, number in (("train", 2), ("val", 1)):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for one in range(number):
                Image.new("RGB", (12, 10), (one, 0, 0)).save(root / split / name / f"{one}.png")
    return root


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            [DIGITS, "--set", "sed=2"], "sed: unknown key; did you mean 'seed'?", id="key"
        ),
        pytest.param(["no.yaml"], "no.yaml: cannot read the recipe: No such file", id="recipe"),
        pytest.param([DIGITS, "--workers", "5"], "cannot be divided over 5 workers", id="workers"),
        pytest.param([DIGITS, "--device-batch", "7"], "a device batch of 7 does not", id="batch"),
        pytest.param([DIGITS, "--set", "model.name=resnt18"], "did you mean 'resnet18", id="model"),
        pytest.param(
            [DIGITS, "--set", "data.classes=9"], "add --set data.classes=10", id="classes"
        ),
        pytest.param([FUJITSU], "pass --data DIR", id="no data"),
        pytest.param([FUJITSU, "--data", "nowhere"], "nowhere", id="missing data folder"),
        pytest.param([DIGITS, "--resume"], "there is no run to resume", id="nothing to resume"),
        pytest.param([DIGITS, "--data", "x"], "--data x would not be read", id="unused data"),
        pytest.param([DIGITS, "--backend", "torch"], "--workers N or with torchrun", id="alone"),
    ],
)
def test_a_mistake_is_one_message_and_no_run_folder(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", *words, "--out", str(out)]) == USER
    shown = capsys.readouterr().err
    assert shown.startswith("largebatch: ")
    assert message in shown
    assert "Traceback" not in shown
    assert not out.exists()


def test_a_folder_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["train", DIGITS, "--out", str(tmp_path)]) == USER
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert "--resume" not in capsys.readouterr().err
    (tmp_path / "recipe.yaml").touch()  # as in a run
    for words, resumes in ((["train", DIGITS], True), (["polish", "run"], False)):
        assert main([*words, "--out", str(tmp_path)]) == USER
        assert ("--resume" in capsys.readouterr().err) == resumes


def test_a_run_is_not_resumed_with_another_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", DIGITS, "--out", str(tmp_path / "run"), "--max-steps", "1"]
    assert main(words) == DONE
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    assert main([*words, "--resume", "--set", "optimizer.eta=0.5"]) == USER
    assert "optimizer.eta is 0.02" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before


def test_a_checkpoint_is_measured_without_what_its_machine_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was trained by apex's kernels; here is a machine without apex."""
    assert main(["train", DIGITS, "--out", str(tmp_path / "run"), "--max-steps", "1"]) == DONE
    state = load_checkpoint(max((tmp_path / "run" / "checkpoints").iterdir()))
    elsewhere = ["execution.kernels=apex", "reduction.dtype=bf16"]
    path = write_checkpoint(
        tmp_path / "theirs", replace(state, recipe=load_recipe(DIGITS, elsewhere))
    )
    assert main(["evaluate", str(path), "--training"]) == DONE
    first, training, gap = capsys.readouterr().out.splitlines()[-3:]
    assert "top-1" in first
    assert "(1,437 images)" in training
    losses = [float(line.partition("loss ")[2].split()[0]) for line in (first, training)]
    assert float(gap.split()[-1]) == pytest.approx(losses[0] - losses[1], abs=2e-4)
    assert main(["evaluate", str(path), "--training", "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert [found["loss"], found["training"]["loss"]] == pytest.approx(losses, abs=1e-4)
    assert (found["checkpoint"], found["step"], found["samples"]) == (str(path), 1, 360)


@pytest.mark.parametrize("command", [["evaluate"], ["polish", "--out", "polished"]])
def test_a_wrong_checkpoint_is_refused(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"epoch": 3}, "theirs.pt")
    Path("broken.pt").write_bytes(b"PK")
    Path("empty").mkdir()
    for path, message in {
        "theirs.pt": "theirs.pt: not a checkpoint of largebatch",
        "broken.pt": "broken.pt: not a checkpoint of largebatch",
        "absent.pt": "absent.pt: there is no such checkpoint",
        "empty": "empty: this folder holds no checkpoints/step-*.safetensors",
    }.items():
        assert main([command[0], path, *command[1:]]) == USER
        assert message in capsys.readouterr().err
    assert not Path("polished").exists()


def test_polishing_a_model_without_batchnorm_or_too_many_samples_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ["--set", "model={name: lenet5}", "--set", "batch.bn_span=null", "--set", "polish=null"]
    for name, extra in (("lenet", plain), ("resnet", [])):
        words = ["train", DIGITS, *extra, "--max-steps", "1", "--out", str(tmp_path / name)]
        assert main(words) == DONE
    polish = ["--out", str(tmp_path / "polished")]
    assert main(["polish", str(tmp_path / "lenet"), *polish]) == USER
    assert "lenet5 has no BatchNorm" in capsys.readouterr().err
    assert main(["polish", str(tmp_path / "resnet"), *polish, "--samples", "9999"]) == USER
    assert "9999 of 1437" in capsys.readouterr().err
    assert not (tmp_path / "polished").exists()


@pytest.mark.parametrize(
    ("error", "rank", "code", "said"),
    [
        (WorkerFailedError("worker 1 failed:"), "", FAILED, "worker 1 failed:"),
        (PeerLostError("gone"), "", FAILED, "gone"),
        (DataError("the disk is gone"), "1", USER, "worker 1: the disk is gone"),
    ],
)
def test_an_error_of_a_run_has_its_exit_code_and_the_one_worker_that_found_it(
    error: Exception,
    rank: str,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("largebatch.runs.run.start", mock.Mock(side_effect=error))
    assert main(["train", DIGITS]) == code
    assert capsys.readouterr().err == f"largebatch: {said}\n"


def test_check_reports_every_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", DIGITS, FUJITSU]) == DONE
    assert capsys.readouterr().out == f"{DIGITS}: ok\n{FUJITSU}: ok\n"
    (tmp_path / "one.yaml").write_text("seed: x\n")
    assert main(["check", str(tmp_path / "one.yaml"), "no.yaml", DIGITS]) == USER
    captured = capsys.readouterr()
    assert captured.out == f"{DIGITS}: ok\n"
    assert "seed: " in captured.err
    assert "no.yaml: " in captured.err


@pytest.mark.usefixtures("unmeasured")
def test_plan_prints_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", FUJITSU, "--workers", "1024"]) == DONE
    lines = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    shown = " | ".join(" ".join(line) for line in lines)
    for part in (
        "86,016 = 1,024 workers x 84",
        "42 samples, 2 in a device batch",
        "1,350 steps, 116,121,600 samples, 90.64 epochs",
        "13 at step 539 (epoch 36.19)",
        "at step 1,275 (epoch 85.60)",
    ):
        assert part in shown


def test_light_commands_never_import_torch(tmp_path: Path) -> None:
    program = """
import sys
from largebatch.cli.main import main

def done(*commands):
    return all(main(each.split()) == 0 for each in commands)

light = done("check digits_96", "explain optimizer", "launch slurm digits_96 --nodes 2")
assert light and "numpy" not in sys.modules
assert done(
    "lab suggest --batch 4096 --out mine.yaml",
    "explain --schedule digits_96 --out rates.png",
    "plan resnet50_86016_fujitsu --cluster abci-v100 --workers 2048 --json",
)
sys.exit("torch" in sys.modules)
"""
    command = [sys.executable, "-c", program]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)


def test_doctor_prints_what_works_and_how_to_install_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("largebatch.models.build", lambda *_, **__: 1 / 0)
    assert main(["doctor"]) == DONE
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert torch.__version__ in lines["torch"]
    assert lines["torchvision"].split()[1] == "works"
    assert "BROKEN  ZeroDivisionError" in lines["timm"]
    assert "absent" in lines["W&B"]
    assert "pip install wandb" in lines["W&B"]
    assert lines["hosts"].split()[1] == ("absent" if lacking() else "works")
