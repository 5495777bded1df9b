"""Disks that fill, folders that vanish, two owners, other data, bad numbers: nothing is lost."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from on_forked_workers import on_forked_workers
from short_runs import a_recipe, content, log, summary, weights
from torch import Tensor, nn

from largebatch import run
from largebatch.data.datasets import digits
from largebatch.distributed.agreement import require_same_bits
from largebatch.distributed.connection import connect
from largebatch.errors import CheckpointError, DesynchronizedError, DivergedError
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import open_session
from largebatch.runs.options import Options
from largebatch.runs.state import build_criterion
from largebatch.training.checkpoint import Checkpoint, Saver, load_checkpoint, newest_checkpoint
from largebatch.training.loop import Criterion

STEPS = 8
SMALL = ("model={name: lenet5}", "batch.bn_span=null", "polish=null", "data.image_size=28")


def recipe(*changes: str) -> Recipe:
    return a_recipe(changes=(*SMALL, *changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(recipe(), out=folder)
    return folder


def steps(folder: Path) -> list[tuple[int, float]]:
    """Return what the record says of every update, those that were made again once."""
    return sorted({each["step"]: each["loss"] for each in log(folder, "step")}.items())


def assert_same_end(folder: Path, whole: Path) -> None:
    ours, other = weights(folder), weights(whole)
    assert all(torch.equal(ours[name], other[name]) for name in other)
    assert steps(folder) == steps(whole)
    summaries = [summary(each) for each in (folder, whole)]
    for key in ("status", "steps", "samples", "top1", "loss"):
        assert summaries[0][key] == summaries[1][key], key


def saves(folder: Path) -> list[int]:
    return sorted(int(path.name[5:13]) for path in (folder / "checkpoints").glob("step-*"))


@pytest.fixture
def full_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Make the disk full after a number of further files have been written."""

    def fill(files: int) -> None:
        left = iter(range(files))
        real = os.fsync

        def fsync(number: int) -> None:
            if next(left, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(number)

        monkeypatch.setattr(os, "fsync", fsync)

    yield fill
    monkeypatch.undo()


def test_a_full_disk_stops_the_run_and_room_lets_it_end_alike(
    tmp_path: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    full_after: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    often = "execution.checkpoints.every_steps=2"
    full_after(8)  # recipe.yaml, two more and one checkpoint, each with its folder
    with pytest.raises(CheckpointError, match=r"step-0000000\d.*No space.*--resume"):
        run(recipe(often), out=out)
    assert saves(out) == [2]
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000002.safetensors"]
    monkeypatch.undo()
    run(recipe(often), out=out, resume=True)
    assert_same_end(out, whole)


def test_a_folder_that_is_removed_is_the_error_that_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    real = Saver.comparison_is_due

    def remove(saver: Saver, *, since: int) -> bool:
        if saver.state.progress.step == 3:
            shutil.rmtree(out)
        return real(saver, since=since)

    monkeypatch.setattr(Saver, "comparison_is_due", remove)
    with pytest.raises(CheckpointError, match="removed"):
        run(recipe(), out=out)
    assert not out.exists()


def test_a_finished_run_keeps_its_record_when_it_is_resumed(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert run(recipe(), out=out, resume=True).status == "finished"
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before


def test_a_run_killed_while_its_report_is_drawn_is_drawn_and_ends_its_log_when_resumed(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, drawn = tmp_path / "run", list[Path]()
    shutil.copytree(whole, out)
    *records, last = (out / "log.jsonl").read_text().splitlines(keepends=True)
    assert '"event":"finish"' in last
    (out / "log.jsonl").write_text("".join(records))
    monkeypatch.setattr("largebatch.runs.folder.write_report", drawn.append)
    assert run(recipe(), out=out, resume=True).status == "finished"
    assert drawn == [out]
    assert len(log(out, "finish")) == 1
    assert (out / "log.jsonl").read_text().splitlines()[-1].startswith('{"event":"finish"')
    assert_same_end(out, whole)


def test_a_finished_run_whose_last_checkpoint_is_damaged_makes_it_again(
    tmp_path: Path, whole: Path
) -> None:
    out, often = tmp_path / "run", "execution.checkpoints.every_steps=3"
    run(recipe(often), out=out)
    newest = max((out / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    assert run(recipe(often), out=out, resume=True).status == "finished"
    assert_same_end(out, whole)


def damage_all(folder: Path) -> list[str]:
    paths = sorted((folder / "checkpoints").iterdir())
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    return [path.name for path in paths]


def test_where_no_checkpoint_can_be_read_auto_begins_afresh_and_names_them(
    tmp_path: Path, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    run(recipe("execution.checkpoints.every_steps=3"), out=out, max_steps=5)
    there = damage_all(out)
    with pytest.raises(CheckpointError, match="damaged"):
        run(recipe(), out=out, resume=True)
    run(recipe(), out=out, resume="auto")
    assert_same_end(out, whole)
    assert all(f"{name}: damaged" in caplog.text for name in there)
    aside = sorted(path.name for path in (out / "checkpoints").glob("damaged-*"))
    assert aside == [f"damaged-{name}" for name in there]


def test_a_damaged_checkpoint_does_not_take_the_place_of_a_new_one(tmp_path: Path) -> None:
    out, often = tmp_path / "run", "execution.checkpoints={every_steps: 3, keep_last: 2}"
    run(recipe(often), out=out, max_steps=7)
    newest = max((out / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    once = "execution.checkpoints={every_steps: 1, keep_last: 1}"
    run(recipe(once), out=out, resume=True, max_steps=7)
    before = newest_checkpoint(out / "checkpoints")
    assert before is not None
    newest.with_name("step-00000009.safetensors").write_bytes(b"damaged")
    run(recipe(once), out=out, resume=True, max_steps=8)
    found = newest_checkpoint(out / "checkpoints")
    assert found is not None
    assert found.path.name == "step-00000008.safetensors"


def test_the_summary_of_a_part_goes_when_the_next_part_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert run(recipe(), out=out, max_steps=3).status == "paused"
    (out / "checkpoints/.step-00000009.safetensors.0123.partial").write_bytes(b"killed")

    def killed(*_: object, **__: object) -> bool:
        assert not (out / "summary.json").exists()
        assert saves(out) == [3]
        raise SystemExit

    monkeypatch.setattr("largebatch.runs.run.run_stages", killed)
    with pytest.raises(SystemExit):
        run(recipe(), out=out, resume=True)
    assert summary(out)["status"] == "failed"


def test_a_changed_index_or_recipe_is_refused_until_each_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(digits.write_digits(), data)
    folder = ("data.source=folder", *SMALL)
    assert run(a_recipe(changes=folder), out=out, data=data, max_steps=2).steps == 2
    (data / "train/3").rename(data / "train/x")
    (data / "train/5").rename(data / "train/3")
    (data / "train/x").rename(data / "train/5")
    shutil.rmtree(data / ".largebatch", ignore_errors=True)
    for path in data.glob("*.largebatch*"):
        path.unlink()
    faster = a_recipe(changes=(*folder, "schedule.peak_lr=0.7"))
    with pytest.raises(CheckpointError) as caught:
        run(faster, out=out, data=data, resume=True)
    for words in ("data.index.train", "schedule.peak_lr is", "--allow schedule.peak_lr"):
        assert words in str(caught.value)
    keys = [word for word in str(caught.value).split() if word.startswith("data.index")]
    with pytest.raises(CheckpointError, match="data.index"):
        run(faster, out=out, data=data, resume=True, allow=("schedule.peak_lr",))
    with pytest.raises(CheckpointError, match="--allow optimizer.eta"):
        run(faster, out=out, data=data, resume=True, allow=("optimizer.eta",))
    allowed = {key.strip(";") for key in keys}
    allow = ("schedule.peak_lr", *sorted(allowed))
    assert run(faster, out=out, data=data, resume=True, allow=allow).status == "finished"


def test_checkpoints_come_by_steps_and_by_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    real = Saver.save

    def save(saver: Saver) -> None:
        written.append(saver.state.progress.step)
        real(saver)

    monkeypatch.setattr(Saver, "save", save)
    run(recipe("execution.checkpoints={every_steps: 3, every_minutes: null}"), out=tmp_path / "a")
    assert written == [3, 6, STEPS]
    written.clear()
    run(recipe("execution.checkpoints.every_minutes=1e-9"), out=tmp_path / "b")
    assert written == [*range(1, STEPS + 1), STEPS]


def test_a_run_stops_before_its_time_is_over_and_can_go_on(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "run"
    stopped = run(recipe(), out=out, time_limit=1e-3)
    assert stopped.status == "interrupted"
    assert stopped.reason is not None
    assert stopped.reason.startswith("--time-limit 0.001 s")
    assert log(out, "finish")[-1]["summary"]["reason"] == stopped.reason
    assert saves(out) == [1]
    assert run(recipe(), out=out, resume=True, time_limit=3600.0).status == "finished"
    assert_same_end(out, whole)


class _BadOnce:
    """A criterion whose value is no number at given calls in training."""

    def __init__(self, calls: set[int], real: Criterion) -> None:
        self.calls, self.number = calls, 0
        self.real = real

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = self.real(logits, labels)
        if logits.requires_grad:
            self.number += 1
            if self.number in self.calls:
                loss = loss * torch.nan
        return loss


@pytest.fixture
def bad_numbers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def plant(*calls: int) -> None:
        monkeypatch.setattr(
            "largebatch.runs.state.build_criterion",
            lambda section, weights: _BadOnce(set(calls), build_criterion(section, weights)),
        )

    return plant


def test_a_bad_number_stops_the_run_in_its_step_with_its_place(
    tmp_path: Path, bad_numbers: Callable[..., None]
) -> None:
    out = tmp_path / "run"
    bad_numbers(4)
    place = "step 3 .*worker 0"
    with pytest.raises(DivergedError, match=f"nan.*{place}"):
        run(recipe("execution.checkpoints.every_steps=2"), out=out)
    assert [step for step, _ in steps(out)] == [0, 1, 2, 3]
    assert saves(out) == [2]
    found = newest_checkpoint(out / "checkpoints")
    assert found is not None
    assert all(torch.isfinite(each).all() for each in weights(out).values())


def test_a_nonfinite_update_is_skipped_a_few_times_if_configured(
    tmp_path: Path, bad_numbers: Callable[..., None]
) -> None:
    bad_numbers(4)
    skip = "nonfinite={action: skip, most: 1}"
    once = run(recipe(skip), out=tmp_path / "once")
    assert (once.status, once.skipped_steps, once.steps) == ("finished", 1, STEPS)
    note = log(tmp_path / "once", "note")[0]["text"]
    assert "nan" in note
    assert log(tmp_path / "once", "step")[3]["skipped"]
    bad_numbers(4, 5)
    with pytest.raises(DivergedError, match="step 4"):
        run(recipe(skip), out=tmp_path / "twice")


def compare() -> list[str]:
    """Return what this worker finds of equal weights, of one other bit and of another buffer."""
    backend = connect("torch")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
    state = model.state_dict()
    found = []
    for case in ("equal", "one bit", "a buffer"):
        if case == "one bit" and backend.rank == 1:
            state["0.bias"].view(torch.int16)[2] ^= 1
        if case == "a buffer" and backend.rank == 1:
            state["0.bias"].view(torch.int16)[2] ^= 1
        if case == "a buffer" and backend.rank == 2:
            state["1.num_batches_tracked"] += 1
        try:
            require_same_bits(state.values(), backend, backend.device, when="step 9")
            found.append("equal")
        except DesynchronizedError as error:
            found.append(str(error))
    backend.close()
    return found


def test_a_difference_of_one_bit_between_workers_is_found_and_named() -> None:
    equal, bit, buffer = on_forked_workers(compare, workers=3)
    assert equal == "equal"
    for message, worker in ((bit, 1), (buffer, 2)):
        assert f"worker {worker}" in message
        assert "step 9" in message


def test_weights_are_compared_at_the_interval_and_before_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    monkeypatch.setattr(Saver, "compare", lambda saver: compared.append(saver.state.progress.step))
    run(recipe("execution.compare_every=3"), out=tmp_path / "a")
    assert compared == [3, 6, STEPS]
    compared.clear()
    run(recipe("execution.compare_every=null"), out=tmp_path / "b")
    assert compared == []


def test_a_checkpoint_of_another_model_is_refused_in_words(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    state = content(out)
    checkpoint = load_checkpoint(max((out / "checkpoints").iterdir()))
    name = next(iter(state["model"]))
    cases: dict[str, Callable[[dict[str, Any]], object]] = {
        "size mismatch": lambda state: state["model"].update({name: torch.ones(2)}),
        "Missing key": lambda state: state["model"].pop(name),
        "torch.int8": lambda state: state["model"].update(
            {name: state["model"][name].to(torch.int8)}
        ),
        "has shape": lambda state: state["optimizer"]["state"][0].update(
            momentum_buffer=torch.ones(2)
        ),
        "parameter 99": lambda state: state["optimizer"]["state"].update(
            {99: state["optimizer"]["state"][0]}
        ),
    }
    for message, change in cases.items():
        changed = content(out)
        change(changed)
        refused = pytest.raises(CheckpointError, match=f"it: .*{message}")
        with open_session(recipe(), Options(out=tmp_path), {}) as session, refused:
            session.saver.restore(Checkpoint.of(checkpoint.recipe, changed), source="it")
