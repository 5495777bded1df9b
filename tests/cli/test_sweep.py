"""A sweeps file is what W&B's own schema allows, and its agent's command trains."""

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fake_wandb import FakeWandb
from short_runs import DIGITS, SMALL

from largebatch.cli.main import DONE, USER, main
from largebatch.recipe.loading import load_recipe, parse_yaml
from largebatch.recipe.writing import dump_yaml
from largebatch.tracking.scalars import read_id

SCHEMA = json.loads((Path(__file__).parents[1] / "support/sweeps_schema.json").read_text())
RATE = "schedule.peak_lr=0.25..4"


def sweep_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["lab", "sweep", *words]) == DONE
    found: dict[str, Any] = parse_yaml(capsys.readouterr().out, source="sweep")
    jsonschema.Draft7Validator(SCHEMA).validate(found)
    return found


def test_the_schema_is_one_that_refuses() -> None:
    validator = jsonschema.Draft7Validator(SCHEMA)
    assert not validator.is_valid({"method": "bayes", "parameters": {"a": {"min": 1}}})
    assert not validator.is_valid({"parameters": {"a": {"value": 1}}})


def test_a_sweep_varies_rates_logarithmically_and_integers_and_choices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = (RATE, "optimizer.eta=1e-3,2e-3", "seed=1..9", "optimizer.convention=outside,fujitsu")
    words = [word for key in keys for word in ("--key", key)]
    found = sweep_of(capsys, str(DIGITS), *words, "--method", "random", "--set", "precision=bf16")
    assert found["method"] == "random"
    assert found["metric"] == {"name": "val/top1", "goal": "maximize"}
    assert found["parameters"] == {
        "schedule.peak_lr": {"distribution": "log_uniform_values", "min": 0.25, "max": 4},
        "optimizer.eta": {"values": [0.001, 0.002]},
        "seed": {"distribution": "int_uniform", "min": 1, "max": 9},
        "optimizer.convention": {"values": ["outside", "fujitsu"]},
    }
    assert found["command"] == [
        *("${env}", "largebatch", "train", str(DIGITS), "--set", "precision=bf16"),
        *("--set", "tracking=[wandb]", "--set", "${args_json}"),
    ]


@pytest.mark.parametrize(
    ("key", "distribution"),
    [
        pytest.param("optimizer.momentum=0.9..0.99", "log_uniform_values", id="below a limit"),
        pytest.param("optimizer.eta=1..2", "log_uniform_values", id="whole ends"),
        pytest.param("seed=1..2", "int_uniform", id="whole numbers"),
    ],
)
def test_a_range_is_of_whole_numbers_where_its_key_is(
    key: str, distribution: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _, _ = key.partition("=")
    found = sweep_of(capsys, str(DIGITS), "--key", key)
    assert found["parameters"][name]["distribution"] == distribution


@pytest.mark.long
def test_the_command_of_wandbs_agent_trains_what_it_has_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real agent puts the values into the command, and a name for the run beside it."""
    wandb_agent = pytest.importorskip("wandb.wandb_agent", reason="wandb is not installed")
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):  # which the agent sets
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("largebatch.tracking.wandb.require_wandb", FakeWandb)
    short = ("duration={steps: 1}", "schedule.warmup=null", "polish=null", "evaluation={}", *SMALL)
    Path("short.yaml").write_text(dump_yaml(load_recipe(DIGITS, [*short, "tracking=[]"])))
    found = sweep_of(capsys, "short.yaml", "--key", RATE, "--key", "optimizer.eta=1e-3,2e-3")
    started: list[list[str]] = []

    class Process:
        def __init__(self, *, command: list[str], **_: object) -> None:
            started.append(command)

    monkeypatch.setattr(wandb_agent, "AgentProcess", Process)
    agent = wandb_agent.Agent(api=None, queue=None, sweep_id="s1")
    agent._sweep_command = found["command"]
    drawn = {"schedule.peak_lr": {"value": 1.25e-1 * 8}, "optimizer.eta": {"value": 2e-3}}
    agent._command_run({"run_id": "run7", "program": found["program"], "args": drawn})
    ((env, program, *words),) = started
    assert (env, program) == ("/usr/bin/env", "largebatch")
    assert os.environ["WANDB_RUN_ID"] == "run7"
    assert main([*words, "--out", "out"]) == DONE
    recipe = load_recipe("out/recipe.yaml")
    assert recipe.schedule.peak_lr == 1.0
    assert getattr(recipe.optimizer, "eta") == 2e-3  # noqa: B009 -- not every optimizer has it
    assert recipe.tracking == ("wandb",)
    assert read_id(Path("out"), "wandb") == "run7"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--key", "schedule.peak=1..2"], "schedule.peak: unknown key; did you mean 'peak_lr'?"),
        (["--key", "optimizer.momentum=0.5..1.5"], "optimizer.momentum: input should be less than"),
        (["--key", "optimizer.convention=outside,inside"], "optimizer.convention: input should be"),
        (["--key", "seed=9..1"], "--key seed=9..1: a range is LOW..HIGH with numbers above 0"),
        (
            ["--key", "seed=1,2", "--key", "seed=3"],
            "--key seed: given twice; give all of its values",
        ),
        (["--key", "seed"], "--key seed: expected KEY=LOW..HIGH or KEY=VALUE,VALUE"),
        (["--key", RATE, "--method", "grid"], "--method grid goes through values, and schedule.pe"),
    ],
)
def test_what_cannot_be_swept_is_said_in_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "sweep", str(DIGITS), *words]) == USER
    out, err = capsys.readouterr()
    assert message in err
    assert not out
    assert "Traceback" not in err
