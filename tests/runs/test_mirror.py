"""Runs that are copied to storage while they train, lose their machine, and continue elsewhere.

Storage is a folder (file://) or a server of S3's protocol in this process.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_server
from short_runs import CLEAN, a_recipe, log, weights

from largebatch import run
from largebatch.address import Address, place_of
from largebatch.bucket import Bucket, open_bucket
from largebatch.cli.main import DONE, USER, main
from largebatch.errors import CheckpointError, LargebatchError
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_yaml
from largebatch.runs import mirror
from largebatch.runs.interrupts import StopRequests
from largebatch.runs.mirror import OWNER, Mirror, bring_up_to_date, local_run

EVERY = ("execution.checkpoints.every_steps=2", "execution.checkpoints.keep_last=2")


def recipe() -> Recipe:
    return a_recipe(CLEAN, changes=EVERY)


def names(address: Address) -> set[str]:
    return {facts.name for facts in open_bucket(address).objects("")}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mirror, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(mirror, "SILENT_SECONDS", 1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped, nor copied."""
    folder = tmp_path_factory.mktemp("whole") / "mine"
    run(recipe(), out=folder, report=False)
    return folder


@pytest.fixture(scope="module")
def storage() -> Iterator[s3_server.Storage]:
    with s3_server.serving() as served, pytest.MonkeyPatch.context() as patched:
        for name, value in served.environment().items():
            patched.setenv(name, value)
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Address:
    address = place_of(f"file://{tmp_path}/storage")
    assert isinstance(address, Address)
    return address


def test_a_run_continues_on_an_empty_machine_to_the_bit(
    storage: s3_server.Storage, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over S3's protocol: stopped, wiped, resumed by its address, and read by it."""
    first = tmp_path / "first" / "mine"
    run(recipe(), out=first, mirror="s3://photos/runs", max_steps=5, report=False)
    there = {name.removeprefix("runs/mine/") for name in storage.objects}
    assert {"recipe.yaml", "options.json", "log.jsonl", "summary.json"} < there
    # As many checkpoints as the folder keeps.
    checkpoints = {f"checkpoints/{path.name}" for path in (first / "checkpoints").iterdir()}
    assert {name for name in there if name.startswith("checkpoints/")} == checkpoints
    assert OWNER not in there

    empty = tmp_path / "second"
    empty.mkdir()
    monkeypatch.chdir(empty)
    assert main(["resume", "s3://photos/runs/mine"]) == DONE
    second = empty / "runs" / "mine"
    assert weights(second).keys() == weights(whole).keys()
    for name, weight in weights(second).items():
        assert weight.equal(weights(whole)[name]), name
    # The log has every update, those of the first machine too.
    steps = [event["step"] for event in log(second, "step")]
    assert steps == [event["step"] for event in log(whole, "step")]
    assert not [event for event in log(second, "note") if "mirror" in event["text"]]

    # The copy has the end, and the commands that read a run take its address.
    for name in ("log.jsonl", "summary.json"):
        assert storage.objects[f"runs/mine/{name}"] == (second / name).read_bytes()
    assert main(["export", "s3://photos/runs/mine", "--out", str(tmp_path / "export")]) == DONE
    assert main(["report", "s3://photos/runs/mine", "--out", str(tmp_path / "page")]) == DONE
    assert (tmp_path / "page" / "report.html").is_file()
    # Only what has changed is read again.
    copy = local_run(Address("s3://photos/runs/mine"))
    before = {path: path.stat().st_mtime_ns for path in copy.iterdir() if path.is_file()}
    local_run(Address("s3://photos/runs/mine"))
    assert {path: path.stat().st_mtime_ns for path in before} == before


class Faulty(Bucket):
    """Storage that refuses writes of checkpoints while `fails`, and takes `seconds` for each."""

    fails = False
    seconds = 0.0

    def write(self, name: str, content: bytes | Path) -> None:
        if name.startswith("checkpoints/"):
            time.sleep(self.seconds)
            if Faulty.fails:
                raise OSError(f"{self.address}/{name}: 503 Slow Down")
        super().write(name, content)


def test_storage_that_fails_is_noted_and_counted_and_the_run_goes_on(
    folder: Address,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(mirror, "open_bucket", Faulty)
    monkeypatch.setattr(Faulty, "fails", True)
    out = tmp_path / "mine"
    summary = run(recipe(), out=out, mirror=str(folder), report=False)
    assert summary.status == "finished"
    for name, weight in weights(out).items():
        assert weight.equal(weights(whole)[name]), name
    notes = [event["text"] for event in log(out, "note")]
    failed = [text for text in notes if "503 Slow Down" in text]
    assert failed
    assert "(1 so far)" in failed[0]
    assert any("failed" in message for message in caplog.messages)
    # The copy is as it was before the first failure: a run without a checkpoint.
    assert not [name for name in names(folder / "mine") if name.startswith("checkpoints/")]


def test_storage_is_at_most_one_checkpoint_behind(
    folder: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured whenever a checkpoint appears here, with storage slower than the run."""
    monkeypatch.setattr(mirror, "open_bucket", Faulty)
    monkeypatch.setattr(Faulty, "seconds", 0.3)
    out = tmp_path / "mine"
    behind: list[int] = []
    written = Mirror.checkpoint_written

    def measured(self: Mirror) -> None:
        here = {path.name for path in (out / "checkpoints").iterdir()}
        there = {name.rpartition("/")[2] for name in names(folder / "mine")}
        behind.append(len(here - there))
        written(self)

    monkeypatch.setattr(Mirror, "checkpoint_written", measured)
    run(recipe(), out=out, mirror=str(folder), report=False)
    assert max(behind) == 1
    assert {path.name for path in (out / "checkpoints").iterdir()} <= {
        name.rpartition("/")[2] for name in names(folder / "mine")
    }


def test_the_last_copy_is_waited_for_no_longer_than_a_stop_allows(
    folder: Address,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(mirror, "open_bucket", Faulty)
    monkeypatch.setattr(Faulty, "seconds", 1.0)
    copies = Mirror(a_folder(tmp_path / "mine"), folder / "mine", note=lambda _: None)
    copies.start()
    copies.close(seconds=0.1)
    assert "1 of 1 copy failed" in caplog.text
    # The mark stays: another machine looks whether this one still writes.
    assert (folder.folder / "mine" / OWNER).exists()


def a_folder(out: Path) -> Path:
    """Return a run folder with a checkpoint that Faulty is slow to copy."""
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / "step-00000001.safetensors").write_bytes(b"x")
    return out


@pytest.mark.parametrize("reason", ["signal", "other worker", "patience"])
def test_a_checkpoint_does_not_wait_for_a_copy_when_the_run_cannot(
    reason: str, folder: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop leaves time for the checkpoint on the disk; other workers wait for a limited time."""
    monkeypatch.setattr(mirror, "open_bucket", Faulty)
    monkeypatch.setattr(Faulty, "seconds", 2.0)
    monkeypatch.setattr(mirror, "LAST_SECONDS", 0.1)
    notes: list[str] = []
    copies = Mirror(
        a_folder(tmp_path / "mine"),
        folder / "mine",
        note=notes.append,
        stopped=lambda: reason == "other worker",
        patience=0.1 if reason == "patience" else 60.0,
    )
    copies.start()
    copies.checkpoint_written()
    if reason == "signal":
        monkeypatch.setattr(StopRequests, "latest", time.monotonic())
    copies.before_checkpoint()
    copies.before_checkpoint()
    assert not [name for name in names(folder / "mine") if name.startswith("checkpoints/")]
    # The last copy ends in the time after the request, not after the end of the run.
    if reason != "patience":
        copies.close(seconds=None)
        assert not [name for name in names(folder / "mine") if name.startswith("checkpoints/")]
        return
    copies.close(seconds=None)
    copies.record(CLEAN)  # type: ignore[arg-type]  # of any event
    assert [note for note in notes if "takes longer" in note] == notes
    assert [name for name in names(folder / "mine") if name.startswith("checkpoints/")]


def test_a_log_is_not_left_older_than_its_checkpoint(
    folder: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost while a run of an older state is brought up to date."""
    out = a_folder(tmp_path / "mine")
    (out / "log.jsonl").write_text("old", encoding="utf-8")
    (out / "recipe.yaml").write_text("x", encoding="utf-8")
    copies = Mirror(out, folder / "mine", note=lambda _: None)
    copies.start()
    copies.close(seconds=60)
    bucket = open_bucket(folder / "mine")
    bucket.write("checkpoints/step-00000002.safetensors", b"y")
    bucket.write("log.jsonl", b"new")

    def lost(self: Bucket, name: str) -> bytes:
        if name == "log.jsonl":
            raise OSError("connection lost")
        return whole_read(self, name)

    whole_read = Bucket.read
    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "read", lost)
        with pytest.raises(CheckpointError, match="connection lost; check the address"):
            bring_up_to_date(out, folder / "mine", resume=True)
        with pytest.raises(CheckpointError, match="connection lost; check the address"):
            local_run(folder / "mine")
    bring_up_to_date(out, folder / "mine", resume=True)
    assert (out / "log.jsonl").read_text(encoding="utf-8") == "new"
    assert (out / "checkpoints" / "step-00000002.safetensors").read_bytes() == b"y"


def test_a_copy_that_was_interrupted_is_completed(
    folder: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint is there, and the recipe, which is the last, is not."""
    whole = a_folder(folder.folder / "mine")
    (whole / "recipe.yaml").write_text("x", encoding="utf-8")
    out = tmp_path / "mine"

    def lost(self: Bucket, name: str) -> bytes:
        if name == "recipe.yaml":
            raise OSError("connection lost")
        return whole_read(self, name)

    whole_read = Bucket.read
    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "read", lost)
        with pytest.raises(CheckpointError, match="connection lost"):
            bring_up_to_date(out, folder / "mine", resume=True)
    assert (out / "checkpoints" / "step-00000001.safetensors").is_file()
    bring_up_to_date(out, folder / "mine", resume=True)
    assert (out / "recipe.yaml").read_text(encoding="utf-8") == "x"


def test_the_files_of_tensorboard_are_copied_and_come_back(folder: Address, tmp_path: Path) -> None:
    out = a_folder(tmp_path / "a" / "mine")
    (out / "recipe.yaml").write_text("x", encoding="utf-8")
    (out / "tensorboard").mkdir()
    events = "tensorboard/events.out.tfevents.1790000000.host-1.example.42.0"
    (out / events).write_bytes(b"scalars")
    (out / "tensorboard" / "events.py").write_text("not of a run", encoding="utf-8")
    copies = Mirror(out, folder / "mine", note=lambda _: None)
    copies.start()
    copies.close(seconds=60)
    assert {name for name in names(folder / "mine") if "/" in name} == {
        "checkpoints/step-00000001.safetensors",
        events,
    }
    bring_up_to_date(tmp_path / "b" / "mine", folder / "mine", resume=True)
    assert (tmp_path / "b" / "mine" / events).read_bytes() == b"scalars"


def test_a_machine_that_stood_still_does_not_write_over_its_successor(
    folder: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it renews the object that tells it."""
    monkeypatch.setattr(mirror, "BEAT_SECONDS", 1000.0)
    first = Mirror(a_folder(tmp_path / "mine"), folder / "mine", note=lambda _: None)
    first.start()
    open_bucket(folder / "mine").write(OWNER, owner("other", 0))
    first.checkpoint_written()
    first.close(seconds=60)
    assert names(folder / "mine") == {OWNER}


def test_a_dead_machine_is_watched_once(
    folder: Address, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not again for each of the steps from its copy to the first update."""
    run(recipe(), out=tmp_path / "a" / "mine", mirror=str(folder), max_steps=2, report=False)
    open_bucket(folder / "mine").write(OWNER, owner("dead", 3))
    bring_up_to_date(tmp_path / "b" / "mine", folder / "mine", resume=True)
    out = tmp_path / "b" / "mine"
    run(recipe(), out=out, mirror=str(folder), resume=True, max_steps=3, report=False)
    assert len([line for line in caplog.messages if "watching" in line]) == 1


def owner(identity: str, beat: int) -> bytes:
    return json.dumps({"identity": identity, "host": "node17", "beat": str(beat)}).encode()


def test_a_run_that_another_machine_writes_is_refused_and_a_dead_one_is_not(
    folder: Address, tmp_path: Path
) -> None:
    folder.folder.mkdir()
    (folder.folder / "mine").mkdir()
    bucket = open_bucket(folder / "mine")
    bucket.write(OWNER, owner("other", 0))
    is_over = threading.Event()

    def live() -> None:
        beat = 0
        while not is_over.wait(0.05):
            beat += 1
            bucket.write(OWNER, owner("other", beat))

    other = threading.Thread(target=live)
    other.start()
    try:
        with pytest.raises(CheckpointError, match="node17"):
            bring_up_to_date(tmp_path / "mine", folder / "mine", resume=True)
    finally:
        is_over.set()
        other.join()
    bring_up_to_date(tmp_path / "mine", folder / "mine", resume=True)


def test_a_machine_that_was_thought_dead_stops_copying(folder: Address, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    notes: list[str] = []
    first = Mirror(out, folder / "mine", note=notes.append)
    first.start()
    open_bucket(folder / "mine").write(OWNER, owner("other", 7))
    end = time.monotonic() + 30
    while not first.failures and time.monotonic() < end:
        time.sleep(0.05)
    (out / "log.jsonl").write_text("{}\n", encoding="utf-8")
    first.close(seconds=30)
    assert "node17" in json.loads(open_bucket(folder / "mine").read(OWNER))["host"]
    assert "log.jsonl" not in names(folder / "mine")


def test_names_that_are_not_of_a_run_are_not_read(folder: Address) -> None:
    out = folder.folder / "mine"
    (out / "checkpoints").mkdir(parents=True)
    for name in ("recipe.yaml", ".bashrc", "run.py", "checkpoints/step-1.pt"):
        (out / name).write_text("x", encoding="utf-8")
    copy = local_run(folder / "mine")
    assert [path.name for path in copy.iterdir()] == ["recipe.yaml"]


def test_a_new_run_is_not_copied_over_another_one(folder: Address, tmp_path: Path) -> None:
    (folder.folder / "mine").mkdir(parents=True)
    (folder.folder / "mine" / "recipe.yaml").write_text(dump_yaml(recipe()), encoding="utf-8")
    with pytest.raises(LargebatchError, match="already holds a run"):
        run(recipe(), out=tmp_path / "mine", mirror=str(folder))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text(dump_yaml(recipe()), encoding="utf-8")
    with pytest.raises(LargebatchError, match="not copied to"):
        run(recipe(), out=tmp_path / "mine", mirror=str(folder), resume="auto")


@pytest.mark.usefixtures("storage")
@pytest.mark.parametrize(
    ("words", "part"),
    [
        pytest.param(["train", "digits_96", "--mirror", "runs"], "s3://", id="no address"),
        pytest.param(["train", "digits_96", "--mirror", "ftp://x/y"], "ftp", id="unknown kind"),
        pytest.param(["train", "digits_96", "--mirror", "s3://k:secret@b"], "s3", id="a secret"),
        pytest.param(["train", "digits_96", "--mirror", "s3://absent/runs"], "absent", id="absent"),
        pytest.param(["train", "digits_96", "--mirror", "https://x/y"], "web", id="of the web"),
        pytest.param(["resume", "s3://photos/none/mine"], "none/mine", id="no run to resume"),
        pytest.param(["resume", "s3://photos"], "s3://photos", id="no name of a run"),
        pytest.param(
            ["train", "digits_96", "--mirror", "s3://photos/x", "--out", "a b"], "a b", id="a name"
        ),
        pytest.param(["evaluate", "s3://photos/none/mine"], "none/mine", id="no run to read"),
    ],
)
def test_a_bad_address_is_one_line(
    words: list[str],
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == USER
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert part in printed
    assert "secret" not in printed


def test_without_the_library_one_line_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    open_bucket.cache_clear()
    address = f"file://{tmp_path}/storage"
    assert main(["train", "digits_96", "--out", str(tmp_path / "x"), "--mirror", address]) == USER
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "largebatch[storage]" in printed


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.usefixtures("ends")
def test_a_run_that_is_killed_and_wiped_continues_elsewhere_to_the_bit(
    folder: Address, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has no time to say anything: SIGKILL, and its disk is gone."""
    source = tmp_path / "recipe.yaml"
    source.write_text(dump_yaml(recipe()), encoding="utf-8")
    machine = tmp_path / "machine"
    command = [sys.executable, "-m", "largebatch", "train", str(source)]
    process = subprocess.Popen(
        [*command, "--out", str(machine / "mine"), "--mirror", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    copies = folder.folder / "mine" / "checkpoints"
    wait_until(lambda: [*copies.glob("step-*")], process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert (folder.folder / "mine" / OWNER).exists()
    machine.rename(tmp_path / "gone")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(mirror, "SILENT_SECONDS", 3.0)
    assert main(["resume", f"{folder}/mine"]) == DONE
    for name, weight in weights(elsewhere / "runs" / "mine").items():
        assert weight.equal(weights(whole)[name]), name
