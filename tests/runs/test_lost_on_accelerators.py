"""A run whose peer is lost while the device works on what the host asked of it long ago."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import accelerator
import late_group
import pytest
import torch.distributed as dist
from late_group import LateGroup
from on_forked_workers import on_forked_workers
from short_runs import NARROW, SMALL, content

from largebatch import load_recipe, run
from largebatch.distributed import torch_distributed, watch
from largebatch.distributed.environment import ABSENT
from largebatch.errors import PeerLostError
from largebatch.training.checkpoint import load_checkpoint
from largebatch.training.step_log import StepLog

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
RECIPE = load_recipe(
    DIGITS,
    [*("duration={steps: 6}", "schedule.warmup={steps: 2}", "evaluation={}", "polish=null"),
     NARROW, *SMALL],
)  # fmt: skip
LOST_AT = 3
"""The update after which, or in whose record, another worker is lost."""


def lose() -> None:
    assert isinstance(dist.group.WORLD, LateGroup)
    dist.group.WORLD.lose()


def losing(when: str) -> Callable[..., None]:
    """Return StepLog.add, which loses another worker before or after it does its work."""
    add = StepLog.add

    def then(log: StepLog, stage: Any, update: Any) -> None:  # noqa: ANN401 -- passed on
        if update.step == LOST_AT and when == "in its record":
            lose()
        add(log, stage, update)
        if update.step == LOST_AT:
            lose()

    return then


def train(folder: Path, *, when: str | None = None, resume: bool = False) -> str:
    """Run on simulated accelerators; return how it ended."""
    device = accelerator.simulate()
    accelerator.MODULE.uuid = os.environ["RANK"]
    late_group.register()
    with mock.patch.object(torch_distributed, "pick_device", return_value=device):
        if when is None:
            return run(RECIPE, out=folder, resume=resume, report=False).status
        with (
            mock.patch.object(StepLog, "add", losing(when)),
            pytest.raises(PeerLostError) as caught,
        ):
            run(RECIPE, out=folder, resume=resume, report=False)
    return str(caught.value)


def whole_run(folder: Path) -> str:
    return train(folder)


def resumed(folder: Path) -> str:
    return train(folder, resume=True)


def records(folder: Path) -> list[int]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["event"] == "step"]


def held(folder: Path) -> None:
    """Run until the main thread waits for what a lost worker should have sent, as NCCL's does."""
    monitor = pytest.MonkeyPatch()
    monitor.setattr(late_group.LateWork, "finish", wait_for_the_lost)
    monitor.setattr(torch_distributed, "_has_failed", notice_beside(torch_distributed._has_failed))
    monitor.setattr(watch, "GRACE_SECONDS", 0.5)
    if os.environ["RANK"] == "1":  # or worker 0 would be ended with it
        monitor.setattr(watch, "leave", lambda *_, **__: time.sleep(60))
    train(folder, when="between two updates")


FINISH = late_group.LateWork.finish


def wait_for_the_lost(work: late_group.LateWork) -> None:
    if work.inner is None:
        threading.Event().wait()
    FINISH(work)


def notice_beside(has_failed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Let the watch alone learn of an error, which came when the main thread waited already."""
    return lambda work: (
        threading.current_thread() is not threading.main_thread() and has_failed(work)
    )


def test_what_was_done_is_saved_while_the_main_thread_waits_for_ever(
    tmp_path: Path, whole: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match=rf"\[{ABSENT}, "):
        on_forked_workers(held, folder, workers=2)
    (found,) = (folder / "checkpoints").iterdir()
    assert load_checkpoint(found).progress.step == LOST_AT + 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert on_forked_workers(resumed, folder, workers=2) == "finished"
    assert records(folder) == list(range(6))
    state = content(folder)
    assert all(tensor.equal(state["model"][name]) for name, tensor in whole["model"].items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert on_forked_workers(whole_run, folder, workers=2) == "finished"
    return content(folder)


WAIT, READ = "NCCL reported an error in this operation", "NCCL communicator was aborted"
"""Where the main thread finds the error: before it waits, or in what it reads later."""


def interrupted(folder: Path, when: str, found_by: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if found_by == READ:
            patch.setattr(torch_distributed, "_has_failed", lambda _: False)
        return train(folder, when=when)


@pytest.mark.parametrize(
    ("when", "found_by", "saved"),
    [
        pytest.param("between two updates", WAIT, [LOST_AT + 1], id="waiting"),
        pytest.param("between two updates", READ, [LOST_AT + 1], id="reading"),
        pytest.param("in its record", READ, [], id="reading a record"),
    ],
)
def test_a_lost_peer_is_named_and_what_was_done_is_saved(
    when: str, found_by: str, saved: list[int], tmp_path: Path, whole: dict[str, Any]
) -> None:
    """Where the last update has no record, nothing is: a run that went on would lack it."""
    folder = tmp_path / "run"
    message = on_forked_workers(interrupted, folder, when, found_by, workers=2)
    assert message.startswith("worker 0 lost contact with another worker (")
    assert found_by in message
    written = folder / "checkpoints"
    found = sorted(written.iterdir()) if written.is_dir() else []
    assert [load_checkpoint(path).progress.step for path in found] == saved
    if saved:
        assert on_forked_workers(resumed, folder, workers=2) == "finished"
        assert records(folder) == list(range(6))
        state = content(folder)
        assert all(tensor.equal(state["model"][name]) for name, tensor in whole["model"].items())
