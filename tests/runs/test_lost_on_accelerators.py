"""A run whose peer is lost while the device works on what the host asked of it long ago."""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
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
from largebatch.training import step_log
from largebatch.training.checkpoint import load_checkpoint
from largebatch.training.step_log import StepLog

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
CHANGES = ("duration={steps: 6}", "schedule.warmup={steps: 2}", "evaluation={}", NARROW, *SMALL)
PLAIN = ("polish=null",)
AVERAGED = ("precision=fp16", "polish={ema: 0.5}", "monitor=[gradient_norm]")
LOGS: list[StepLog] = []
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
        LOGS.append(log)
        add(log, stage, update)
        if update.step == LOST_AT:
            lose()

    return then


def train(
    folder: Path, changes: Sequence[str], *, when: str | None = None, resume: bool = False
) -> str:
    """Run on simulated accelerators; return how it ended."""
    recipe = load_recipe(DIGITS, [*CHANGES, *changes])
    device = accelerator.simulate()
    accelerator.MODULE.uuid = os.environ["RANK"]
    late_group.register()
    with mock.patch.object(torch_distributed, "pick_device", return_value=device):
        if when is None:
            return run(recipe, out=folder, resume=resume, report=False).status
        with (
            mock.patch.object(StepLog, "add", losing(when)),
            pytest.raises(PeerLostError) as caught,
        ):
            run(recipe, out=folder, resume=resume, report=False)
    return str(caught.value)


def whole_run(folder: Path, changes: Sequence[str] = PLAIN) -> str:
    return train(folder, changes)


def resumed(folder: Path, changes: Sequence[str] = PLAIN) -> str:
    return train(folder, changes, resume=True)


def records(folder: Path) -> list[int]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["event"] == "step"]


def require_the_same_end(folder: Path, whole: dict[str, Any]) -> None:
    """Compare all records, and weights and averages bit for bit."""
    assert records(folder) == list(range(6))
    state = content(folder)
    for part in ("model", "ema"):
        for name, tensor in whole[part].items():
            assert tensor.equal(state[part][name]), name


def held(folder: Path, changes: Sequence[str]) -> None:
    """Run until the host reads what the device never computes, as on NCCL."""
    monitor = pytest.MonkeyPatch()
    monitor.setattr(late_group.LateWork, "finish", hang_at_the_lost)
    monitor.setattr(torch_distributed, "_has_failed", notice_beside(torch_distributed._has_failed))
    for module in (watch, step_log):
        monitor.setattr(module, "GRACE_SECONDS", 0.5)
    leave = watch.leave

    def leaving(message: str, *, print_it: bool) -> None:
        if os.environ["RANK"] == "1":  # or worker 0 would be ended with it
            time.sleep(60)
        if not LOGS[-1].lock.acquire(blocking=False):
            (folder / "the main thread is stopped").touch()
        leave(message, print_it=print_it)

    monitor.setattr(watch, "leave", leaving)
    train(folder, changes, when="between two updates")


FINISH = late_group.LateWork.finish


def hang_at_the_lost(work: late_group.LateWork) -> None:
    if work.inner is not None:
        FINISH(work)
        return
    accelerator.hang()
    for target, _ in work.results:
        accelerator.mark_idle(target, work)  # type: ignore[arg-type]  # on the device


def notice_beside(has_failed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Report an error only to the watchdog, as if the main thread already waited."""
    return lambda work: (
        threading.current_thread() is not threading.main_thread() and has_failed(work)
    )


@pytest.mark.parametrize("changes", [PLAIN, AVERAGED], ids=["fp32", "fp16, an EMA, a monitor"])
def test_progress_is_saved_while_the_main_thread_waits_indefinitely(
    changes: Sequence[str], tmp_path: Path
) -> None:
    """Though the host has counted, and asked the device for, an update that is never made."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    with pytest.raises(RuntimeError, match=rf"\[{ABSENT}, "):
        on_forked_workers(held, folder, changes, workers=2)
    (found,) = (folder / "checkpoints").iterdir()
    assert load_checkpoint(found).progress.step == LOST_AT + 1
    summary = json.loads((folder / "summary.json").read_text())
    assert (folder / "the main thread is stopped").exists()
    assert (summary["status"], summary["steps"]) == ("failed", LOST_AT + 1)
    assert on_forked_workers(resumed, folder, changes, workers=2) == "finished"
    assert on_forked_workers(whole_run, whole, changes, workers=2) == "finished"
    require_the_same_end(folder, content(whole))


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
        return train(folder, PLAIN, when=when)


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
        require_the_same_end(folder, whole)
