"""Whole runs by a protocol in real processes: what they leave, and going on from it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_forked_workers import on_forked_workers
from short_runs import DIGITS, content, log, summary, weights

from largebatch import load_recipe, run
from largebatch.errors import CheckpointError, RecipeError
from largebatch.lab.protocols.exchange import ExchangeRecord
from largebatch.lab.protocols.stage import _ProtocolSegment, require_tensors
from largebatch.models import affine_parameters
from largebatch.models.of_recipe import build_model
from largebatch.recipe.recipe import Recipe
from largebatch.tracking.events import StepEvent
from largebatch.training.step_log import StepLog

STEPS = 7
HARDSYNC = "{kind: hardsync, learners: 2, servers: {centralised: 1}}"
SOFTSYNC = "{kind: softsync, learners: 3, n: 1, modulation: staleness}"


def recipe(protocol: str = "null", *changes: str) -> Recipe:
    """Return a small network with BatchNorm and few updates; one evaluation on the way."""
    return load_recipe(
        DIGITS,
        [
            f"protocol={protocol}",
            *(f"duration={{steps: {STEPS}}}", "schedule.warmup={steps: 2}"),
            *("batch={global_batch: 96, bn_span: 16}", "evaluation.every_epochs=0.26"),
            *("data.image_size=16", "execution.cache=memory"),
            "model.arguments={layers: [1, 1, 1, 1], channels: [8, 8, 16, 16]}",
            "polish={clean: {steps: 1}, statistics: {samples: 480}}",
            *changes,
        ],
    )


def train_all(folder: Path) -> None:
    """Train by every protocol, on each of 3 workers; one is stopped on its way, and resumed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")  # once for all runs
    run(recipe(HARDSYNC), out=folder / "hardsync")
    run(recipe(SOFTSYNC), out=folder / "softsync", max_steps=5)
    run(recipe(SOFTSYNC), out=folder / "softsync", resume=True)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("protocols")
    on_forked_workers(train_all, folder, workers=3)
    return folder


def arrivals(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "arrivals.jsonl").read_text().splitlines()]


def test_hardsync_over_a_server_is_the_synchronous_core(runs: Path, tmp_path: Path) -> None:
    run(recipe(), out=tmp_path / "core")
    folders = runs / "hardsync", tmp_path / "core"
    ours, core = map(content, folders)
    torch.testing.assert_close(ours["model"], core["model"], rtol=1e-3, atol=1e-5)
    momentum = [state["optimizer"]["state"] for state in (ours, core)]
    torch.testing.assert_close(*momentum, rtol=1e-2, atol=1e-5)
    logs = [log(folder, "step") for folder in folders]
    for one, other in zip(*logs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        for key in ("stage", "step", "epoch", "lr"):
            assert one[key] == other[key]
    stages = [[each["name"] for each in summary(folder)["stages"]] for folder in folders]
    assert stages == [["train", "clean", "statistics"]] * 2
    at = [[each["step"] for each in log(folder, "evaluation")] for folder in folders]
    assert at[0] == at[1]
    assert {one["staleness"] for one in arrivals(runs / "hardsync")} == {0}


def test_a_run_goes_on_with_its_clock_and_its_next_mini_batch(runs: Path) -> None:
    folder = runs / "softsync"
    found = arrivals(folder)
    assert {one["server"] for one in found} == {0, 1, 2}
    for server in range(3):
        own = [one for one in found if one["server"] == server]
        assert sorted(one["mini_batch"] for one in own) == list(range(3 * STEPS))
        assert [one["update"] for one in own] == [update for update in range(STEPS) for _ in "123"]
        assert all(one["staleness"] == one["update"] - one["clock_read"] for one in own)
        assert own[3 * 5]["clock_read"] == 5  # the first after it went on
    assert [each["step"] for each in log(folder, "step")] == list(range(STEPS))
    assert summary(folder)["status"] == "finished"
    assert summary(folder)["steps"] == STEPS
    assert summary(folder)["samples"] == 96 * STEPS
    assert {each["name"] for each in summary(folder)["stages"]} == {"train", "clean", "statistics"}


def test_one_learner_is_plain_training(tmp_path: Path) -> None:
    """In one process, without a library that connects workers."""
    single = "{kind: asynchronous, learners: 1, modulation: staleness}"
    short = ("duration={steps: 3}", "polish=null", "evaluation={}")
    for name, protocol in {"core": "null", "single": single}.items():
        run(recipe(protocol, *short), out=tmp_path / name)
    ours, core = weights(tmp_path / "single"), weights(tmp_path / "core")
    torch.testing.assert_close(ours, core, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fails", ["arrivals.jsonl", "log.jsonl"])
def test_updates_that_cannot_be_recorded_are_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """What is saved then is the last rest, so that going on has the weights of a whole run."""
    single = "{kind: asynchronous, learners: 1, modulation: staleness}"
    every = "execution.checkpoints.every_steps=2"
    short = ("duration={steps: 4}", "polish=null", "evaluation={}", every)
    run(recipe(single, *short), out=tmp_path / "whole")
    cannot = CheckpointError(f"{fails}: cannot be written: No space left on device")
    with monkeypatch.context() as patch:
        if fails == "log.jsonl":
            add_record = StepLog.add_record

            def adding(log: StepLog, step: StepEvent) -> None:
                add_record(log, step)
                if step.step == 2:
                    raise cannot

            patch.setattr(StepLog, "add_record", adding)
        else:
            write = _ProtocolSegment._write

            def writing(segment: _ProtocolSegment, record: ExchangeRecord) -> None:
                if record.updates[-1][0] == 3:
                    raise cannot
                write(segment, record)

            patch.setattr(_ProtocolSegment, "_write", writing)
        with pytest.raises(CheckpointError, match="No space left"):
            run(recipe(single, *short), out=tmp_path / "run")
    assert content(tmp_path / "run")["progress"]["step"] == 2
    run(recipe(single, *short), out=tmp_path / "run", resume=True)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    assert [each["step"] for each in log(tmp_path / "run", "step")][-2:] == [2, 3]
    assert [one["update"] for one in arrivals(tmp_path / "run")] == [0, 1, 2, 3]


def test_more_servers_than_tensors_are_refused() -> None:
    model = build_model(recipe(), torch.device("cpu"))
    require_tensors(model, servers=14, affine=False)
    tensors = len(affine_parameters(model))
    with pytest.raises(RecipeError, match=f"protocol.servers: 30 .* {tensors}"):
        require_tensors(model, servers=30, affine=True)
