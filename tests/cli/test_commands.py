"""The commands' declarations: the options of a run are declared once, and every word has help."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from inspect import Signature, signature
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cyclopts import App, Parameter
from cyclopts.help.help import docstring_parse
from on_forked_workers import on_forked_workers

from largebatch import load_recipe, run
from largebatch.cli.main import COMMANDS, DONE, EXAMPLES, USER, main, make_app, parse
from largebatch.cli.recipe import BREAKS_RULES
from largebatch.lab.measure.executions import Comparison, Row
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.writing import dump_yaml
from largebatch.runs.folder import remember
from largebatch.runs.options import Options
from largebatch.runs.run import JOB
from largebatch.tracking.events import RECIPE

PASSED_ON = {"lab study"}


def every(app: App, name: str = "") -> Iterator[tuple[str, App]]:
    for below in app:
        if not below.startswith("-"):
            own = f"{name} {below}".strip()
            yield own, app[below]
            yield from every(app[below], own)


EVERY = dict(every(make_app()))


def test_the_tree_of_commands() -> None:
    assert [name for name in EVERY if " " not in name] == list(COMMANDS)
    below = {name for name in EVERY if " " in name}
    assert below == {
        "audit resume", "recipes copy", "report diagnose", "report mlperf",
        *(f"data {name}" for name in ("index", "import", "show")),
        *(f"lab {name}" for name in (
            "clusters", "study", "range", "noise", "suggest", "rehearse")),
    }  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_every_command_and_each_of_its_arguments_has_help(name: str) -> None:
    app = EVERY[name]
    assert docstring_parse(app.help, "plaintext").short_description
    if app.default_command is None or name in PASSED_ON:
        return
    negative = Parameter(negative=())
    for each in app.assemble_argument_collection(default_parameter=negative, parse_docstring=True):
        assert not each.parse or each.name == "*" or each.parameter.help, each.name


@pytest.mark.parametrize("name", EVERY)
def test_help_of_a_command_has_examples_that_are_commands(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fit a terminal of 80 columns, so they can be copied."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*name.split(), "--help"]) == DONE
    shown = capsys.readouterr().out
    assert f"Usage: largebatch {name}" in shown
    for call in EXAMPLES[name]:
        assert f"  largebatch {call}\n" in shown
        assert f"{call} ".startswith(f"{name} ") or name in {"data", "lab"}
        parse(shlex.split(call.partition(" >")[0]))


def test_options_are_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--help"]) == DONE
    panels = re.split(r"\n╭─ (.*?) ─+╮", capsys.readouterr().out)
    found = dict(zip(panels[1::2], panels[2::2], strict=True))
    assert list(found) == ["Arguments", "Options", "Recipe", "Data", "Workers"]
    assert "--json" in found["Options"]
    assert ("--set" in found["Recipe"], "--timeout" in found["Workers"]) == (True, True)
    assert "[default: 1]" in found["Workers"]
    assert main(["resume", "--help"]) == DONE  # the options of the run are its defaults
    assert "default:" not in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == DONE
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_names_and_files_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the script calls largebatch after Tab; the shell drops what has another beginning."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("mine.yaml", "runs/b.yaml"):
        (tmp_path / name).touch()
    for words, found in (
        ("train m", {"digits_96", "mine.yaml", "runs/"}),
        ("check mine.yaml runs/m", {"runs/b.yaml"}),
        ("plan digits_96 --cluster d", {"dgx-a100", "mine.yaml"}),
        ("recipes copy d", {"digits_96"}),
    ):
        assert main(["__complete", *words.split()]) == DONE
        assert found <= set(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("command", "code", "keys"),
    [
        pytest.param("recipes", DONE, {"name", "data_set", "global_batch", "epochs"}, id="recipes"),
        pytest.param("check digits_96 nowhere", USER, {"recipe", "ok", "problems"}, id="check"),
        pytest.param("check digits_96 --set tracking.tags=a", DONE, {"remark"}, id="remark"),
        pytest.param(
            "check --mlperf-closed digits_96", BREAKS_RULES, {"mlperf_closed"}, id="rules"
        ),
    ],
)
def test_json_is_all_that_a_command_prints(
    command: str, code: int, keys: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--json"]) == code
    rows = json.loads(capsys.readouterr().out)
    assert all(keys <= row.keys() for row in rows)
    if "nowhere" in command:
        assert [(row["recipe"], row["ok"]) for row in rows] == [
            ("digits_96", True), ("nowhere", False),
        ]  # fmt: skip
        assert "nowhere" in rows[1]["problems"][0]


def test_doctor_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"torch": "works  2.1, no GPU", "DALI": "absent  pip install x", "cores": "2; more"}
    monkeypatch.setattr("largebatch.cli.doctor.examine", lambda: iter(found.items()))
    assert main(["doctor", "--json"]) == DONE
    shown = json.loads(capsys.readouterr().out)
    assert {name: each["status"] for name, each in shown.items()} == {
        "torch": "works", "DALI": "absent", "cores": None,
    }  # fmt: skip
    assert shown["torch"]["finding"] == "2.1, no GPU"


def test_the_clusters_that_the_planner_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "clusters"]) == DONE
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["abci-v100", "1,088", "4", "V100-SXM2-16GB", "25.0", "40"] in rows


def test_threads_sleep_while_they_wait_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for before, after in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if before:
            monkeypatch.setenv("OMP_WAIT_POLICY", before)
        assert main(["recipes"]) == DONE
        assert os.environ["OMP_WAIT_POLICY"] == after


def given(*words: str) -> Options:
    call, _ = parse(["train", "digits_96", *words])
    assert isinstance(call, partial)
    options: Options = call.keywords.get("options", Options())
    return options


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        ([], False),
        (["--resume"], True),
        (["--resume", "yes"], True),
        (["--resume=yes"], True),
        (["--resume", "no"], False),
        (["--resume", "auto"], "auto"),
        (["--resume", "--workers", "2"], True),
    ],
)
def test_resume_works_with_and_without_a_word(words: list[str], resume: object) -> None:
    assert given(*words).resume == resume


def test_a_flag_works_with_and_without_a_word_and_leaves_a_path_alone() -> None:
    for words, training in (
        (["--training", "run"], True),
        (["--training", "no", "run"], False),
        (["run", "--training", "yes"], True),
        (["run"], False),
    ):
        call, _ = parse(["evaluate", *words])
        assert isinstance(call, partial)
        assert call.args == (Path("run"),)
        assert call.keywords.get("training", False) is training


def test_the_command_line_run_and_the_workers_share_one_declaration() -> None:
    # A restart sets whole_limit, and no user does.
    defaults = {field.name: field.default for field in fields(Options)}
    del defaults["whole_limit"]
    keywords = {name: it.default for name, it in signature(run).parameters.items()}
    assert keywords == {"recipe": Signature.empty, **defaults}
    arguments = make_app()["train"].assemble_argument_collection()
    of_command = {it.keys[0] for it in arguments if it.keys and it.parse}
    assert of_command == {*defaults} - {"report"}  # the command always draws it
    call, _ = parse(["train", "digits_96"])
    assert isinstance(call, partial)
    assert call.keywords == {}  # so its defaults are those of Options
    options = Options(
        out=Path("runs/x"), data=Path("images"), imports=("mine",), allow=("data.index",),
        resume="auto", max_steps=7, timeout=300.0, time_limit=5400.0, profile=(3, 5),
        overrides=("seed=2",),
        device_batch=48, workers=4, restarts=2,
    )  # fmt: skip
    assert given(
        "--out", "runs/x", "--data", "images", "--import", "mine", "--allow", "data.index",
        "--resume", "auto", "--max-steps", "7", "--timeout", "5m", "--time-limit", "1.5h",
        "--profile", "3:5", "--set", "seed=2", "--device-batch", "48", "--workers", "4",
        "--restarts", "2",
    ) == options  # fmt: skip
    recipe = load_recipe("digits_96")
    assert JOB.validate_json(JOB.dump_json((recipe, options))) == (recipe, options)
    assert options.changes == ["seed=2", "execution.device_batch=48"]


def test_run_applies_overrides_to_a_name_and_refuses_them_for_a_recipe(tmp_path: Path) -> None:
    assert run("digits_96", overrides=["seed=5"], max_steps=1, out=tmp_path / "run").steps == 1
    assert load_recipe(tmp_path / "run" / "recipe.yaml").seed == 5
    with pytest.raises(ValueError, match="seed=5"):
        run(load_recipe("digits_96"), overrides=["seed=5"], out=tmp_path / "other")
    unknown: dict[str, Any] = {"worker": 2}
    with pytest.raises(TypeError, match="worker"):
        run("digits_96", **unknown)


MINE = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def batches():
    rank = torch.distributed.get_rank()
    noise = torch.Generator().manual_seed(rank)
    return [(torch.randn(8, 3, generator=noise), torch.arange(8) % 2) for _ in range(4)]

def parts(wrap):
    torch.manual_seed(0)
    model = wrap(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, batches(), nn.functional.cross_entropy, optimizer

def right():
    return (*parts(DistributedDataParallel), {"steps": 2})

def never_sums():
    return parts(lambda model: model)

def unknown_key():
    return (*parts(DistributedDataParallel), {"step_number": 2})
"""


@pytest.mark.parametrize(
    ("function", "code", "shown"),
    [
        pytest.param("mine.py:right", DONE, "no fault", id="right"),
        pytest.param("mine:never_sums", USER, "fault", id="wrong"),
    ],
)
def test_audit_checks_a_users_own_training(
    function: str, code: int, shown: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    found, printed = on_forked_workers(audit_on_worker, tmp_path, function, workers=2)
    assert found == code
    assert shown in printed
    assert (f"largebatch: {function}" in printed) == (code == USER)


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "code", "shown"),
    [("mine.py:right", DONE, "no fault"), ("mine:never_sums", USER, "fault")],
)
def test_audit_checks_a_users_own_training_on_workers_that_it_starts(
    function: str,
    code: int,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    assert main(["audit", function, "--workers", "2"]) == code
    captured = capfd.readouterr()
    assert shown in captured.out + captured.err
    assert "Traceback" not in captured.err
    assert (f"largebatch: {function}" in captured.err) == (code == USER)


def audit_on_worker(folder: Path, function: str) -> tuple[int, str]:
    """Return the exit code, and what is printed by either stream."""
    os.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        code = main(["audit", function])
    return code, printed.getvalue()


def test_an_audit_names_the_arguments_that_it_takes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    code, printed = on_forked_workers(audit_on_worker, tmp_path, "mine:unknown_key", workers=2)
    assert code == USER
    assert printed.startswith("largebatch: mine:unknown_key")
    assert "set_epoch" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(("target", "shown"), [("mine", "mine:build"), ("other.py", "other.py")])
def test_an_audit_of_what_is_not_there_is_refused(
    target: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    assert main(["audit", target, "--workers", "1"]) == USER
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"largebatch: {target}")
    assert shown in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("digits_69",), "digits_96"),
        (("cifar10_resnet8_128",), "--data"),
        (("digits_96_softsync",), "protocol"),
        (("digits_96", "lr=2"), "--set"),
        (("train.py:parts", "--set", "seed=2"), "--set"),
        (("--steps", "4", "train.py"), "--steps"),
    ],
)
def test_an_audit_of_a_recipe_that_cannot_be_made_is_one_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *words]) == USER
    printed = capsys.readouterr().err
    assert said in printed
    assert len(printed.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("--replay", "--json"),
        ("--replay", "--network"),
        ("--minutes", "1"),
        ("digits_96",),
        ("--replay", "digits_69"),
        ("--replay", "digits_96_softsync"),
    ],
)
def test_a_check_of_devices_that_cannot_be_made_is_one_line(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == USER
    assert len(capsys.readouterr().err.splitlines()) <= 2


@pytest.mark.long
def test_a_check_of_devices_prints_a_row_for_each_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--replay", "--minutes", "0.01"]) == DONE
    header, row, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["worker", "host"]
    assert row.split()[0] == "0"


def test_an_audit_of_a_recipe_prints_a_table_and_ends_with_2_after_a_fault(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = make_plan(load_recipe("digits_96"))
    rows = {
        "fine": Row(setting="compile"),
        "wrong": Row(
            setting="compile", first=1, differences=(0.1,), roundings=(99.0,), wrong_after=1
        ),
    }
    for name, code in (("fine", DONE), ("wrong", USER)):
        comparison = Comparison(
            recipe="digits-96",
            plan=plan,
            precision="fp32",
            device="cpu",
            rounding=(1e-6,),
            rows=(rows[name],),
        )
        with mock.patch(
            "largebatch.lab.measure.executions.compare_executions", return_value=comparison
        ):
            assert main(["audit", "digits_96"]) == code
        assert "compile" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        pytest.param("", {}, id="nothing"),
        pytest.param("--workers 1", {"workers": 1}, id="the default"),
        pytest.param("--workers 3", {"workers": 3}, id="another value"),
        pytest.param("--timeout 5m --restarts 0", {"timeout": 300.0, "restarts": 0}, id="several"),
        pytest.param("--set seed=3", {"overrides": ("seed=3",)}, id="a change"),
        pytest.param("--resume auto", {"resume": "auto"}, id="whether there is a checkpoint"),
    ],
)
def test_a_run_is_resumed_with_what_is_given_and_else_as_it_was_started(
    words: str, changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Options(workers=2, timeout=77, restarts=1, out=tmp_path)
    remember(tmp_path, started)
    (tmp_path / RECIPE).write_text(dump_yaml(load_recipe("digits_96")))
    resumed: list[Options] = []
    monkeypatch.setattr("largebatch.cli.train._train", lambda _, options: resumed.append(options))
    assert main(["resume", str(tmp_path), *words.split()]) == DONE
    assert resumed == [replace(started, **{"resume": True, **changed})]
