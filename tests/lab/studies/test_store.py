"""The store: each run is made once, whoever is killed, and records are complete or absent."""

import errno
import fcntl
import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from on_forked_workers import SERVER
from short_studies import (
    SCALING,
    SERVERS,
    STALENESS,
    Json,
    cells_in,
    undisturbed,
)

from largebatch.errors import StudyError
from largebatch.lab.studies import records, runner
from largebatch.lab.studies.hosts import HostsCell
from largebatch.lab.studies.store import Store
from largebatch.lab.studies.study import RATE, Cell, load_study
from largebatch.lab.studies.trained import TrainedCell

MARKS = "a", "b", "dies"


class Bare(Cell):
    """A cell without a recipe."""

    definition = {}  # noqa: RUF012 -- in place of a property


def a_bare_cell() -> Bare:
    return Bare(configuration="digits", variant="one", recipe=None, seeds=16)  # type: ignore[arg-type]


def claim_all(folder: Path, mark: str) -> None:
    """Claim and record what is free, as a process of its own; `dies` does so within seed 9."""
    cell, store = a_bare_cell(), Store(folder / "out")
    store.define([cell])
    (folder / f"ready-{mark}").touch()
    while not (folder / "go").exists():
        time.sleep(0.001)
    with (folder / f"claimed-{mark}").open("w") as claimed:
        for slot in cell.slots:
            if store.claim(cell, slot):
                print(slot.name, file=claimed, flush=True)
                if slot.name == "seed-9" and mark == "dies":
                    os._exit(1)
                store.write(cell, slot, {"by": mark})


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    (cell,) = cells_in(tmp_path, policies={"one": {}})
    return cell


def test_processes_share_the_runs_and_take_over_those_of_the_dead(tmp_path: Path) -> None:
    processes = [SERVER.Process(target=claim_all, args=(tmp_path, mark)) for mark in MARKS]
    for process in processes:
        process.start()
    while len(list(tmp_path.glob("ready-*"))) < len(MARKS):
        assert all(process.exitcode is None for process in processes)
        time.sleep(0.01)
    (tmp_path / "go").touch()
    for process in processes:
        process.join()
    printed = [(tmp_path / f"claimed-{mark}").read_text().split() for mark in MARKS]
    claimed = Counter(name for names in printed for name in names)
    cell = a_bare_cell()
    assert claimed.keys() == {slot.name for slot in cell.slots}
    twice = {name for name, number in claimed.items() if number > 1}
    assert twice <= {"seed-9"}  # if another process came after the one that died
    store = Store(tmp_path / "out")
    left = [slot for slot in cell.slots if not store.path(cell, slot).exists()]
    assert {slot.name for slot in left} <= {"seed-9"}
    assert all(store.claim(cell, slot) for slot in left)
    store.release_all()


def test_a_claim_is_held_until_it_is_released_or_recorded(tmp_path: Path, cell: Cell) -> None:
    owner, other, (slot, next_slot) = Store(tmp_path), Store(tmp_path), cell.slots[:2]
    owner.define([cell])
    assert owner.claim(cell, slot)
    assert not owner.claim(cell, slot)
    assert not other.claim(cell, slot)
    assert other.claim(cell, next_slot)
    owner.release(cell, slot)
    assert other.claim(cell, slot)
    other.write(cell, slot, {"by": "other"})
    assert not owner.claim(cell, slot)
    record = owner.read(cell, slot)
    assert record is not None
    assert (record["by"], record["run"], record["seed"]) == ("other", slot.name, slot.seed)
    other.release_all()
    assert owner.claim(cell, next_slot)
    owner.write(cell, next_slot, {"by": "owner"})
    assert not list((tmp_path / cell.name).glob("*.claim"))


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    store = Store(tmp_path)
    store.define([cell])
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StudyError, match=str(tmp_path)):
        store.claim(cell, cell.slots[0])


def test_records_of_another_definition_are_refused_by_key(tmp_path: Path, cell: Cell) -> None:
    store = Store(tmp_path / "out")
    store.define([cell])
    assert isinstance(cell, TrainedCell)
    store.define([replace(cell, seeds=9)])  # more seeds are the same study
    batch = cell.recipe.batch.model_copy(update={"global_batch": 48})
    other = replace(cell, recipe=cell.recipe.model_copy(update={"batch": batch}))
    with pytest.raises(StudyError, match=r"recipe\.batch\.global_batch.* 96 .*48"):
        store.define([other])


@pytest.mark.parametrize("text", ["", "[]", '{"a": ', "null", "{}", "[" * 99_999])
def test_a_damaged_record_is_refused_by_its_file(tmp_path: Path, cell: Cell, text: str) -> None:
    store, slot = Store(tmp_path), cell.slots[0]
    store.define([cell])
    store.path(cell, slot).write_text(text)
    with pytest.raises(StudyError, match=slot.name):
        store.read(cell, slot)


def test_the_record_of_another_run_is_refused_by_what_differs(tmp_path: Path, cell: Cell) -> None:
    """Copied from another seed, another cell, another study, or made by hand."""
    (other,) = cells_in(tmp_path, policies={"two": {}})
    batch = cell.recipe.batch.model_copy(update={"global_batch": 48})
    large = replace(cell, recipe=cell.recipe.model_copy(update={"batch": batch}))
    store, elsewhere = Store(tmp_path), Store(tmp_path / "other")
    store.define([cell, other])
    elsewhere.define([large])
    first, second = cell.slots[-2:]
    for place, one, slot in (
        (store, cell, first),
        (store, other, second),
        (elsewhere, large, second),
    ):
        place.write(one, slot, {"top1": 0.5})
    target = store.path(cell, second)
    for source, key in (
        (store.path(cell, first), "seed"),
        (store.path(other, second), "variant"),
        (elsewhere.path(large, second), "definition"),
    ):
        target.write_bytes(source.read_bytes())
        with pytest.raises(StudyError, match=rf"{second.name}\.json: .*{key}"):
            store.read(cell, second)
    content = json.loads(store.path(cell, first).read_bytes())
    for key in ("recipe", "variant", "run", "seed", "definition_sha256"):
        for spoiled in ({key: None}, {key: [1]}, {key: True}):
            store.path(cell, first).write_text(json.dumps({**content, **spoiled}))
            with pytest.raises(StudyError, match=key):
                store.read(cell, first)


def test_a_full_disk_is_one_line_and_leaves_the_run_to_others(
    tmp_path: Path, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store, slot = Store(tmp_path), cell.slots[0]
    store.define([cell])
    assert store.claim(cell, slot)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fail)
        for write in (
            lambda: store.write(cell, slot, {}),
            lambda: store.define([cell]),
            lambda: store.values(cell, slot, lambda: {RATE: 0.5}),
        ):
            with pytest.raises(StudyError, match="No space left"):
                write()
    store.release_all()
    assert store.claim(cell, slot)
    store.write(cell, slot, {})
    assert store.read(cell, slot) is not None


def test_other_programs_are_what_is_busy_beside_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In 4 s core 0 is busy for 3 s and core 2 for 2 s, 1 s of which is this process: 1 core."""
    busy = iter([(10.0, 50.0, 20.0), (13.0, 54.0, 22.0)])
    clock = iter([100.0, 104.0])
    own = iter([(1.0, 2.0, 3.0, 4.0, 0.0), (1.25, 2.25, 3.25, 4.25, 0.0)])

    def cpu_times(*, percpu: bool) -> list[SimpleNamespace]:
        assert percpu
        return [SimpleNamespace(user=one, nice=0.0, system=0.0, steal=0.0) for one in next(busy)]

    monkeypatch.setattr(records, "require_psutil", lambda: SimpleNamespace(cpu_times=cpu_times))
    with monkeypatch.context() as clocks:
        clocks.setattr(os, "sched_getaffinity", lambda _: {0, 2}, raising=False)
        clocks.setattr(time, "monotonic", lambda: next(clock))
        clocks.setattr(os, "times", lambda: next(own))
        found = records.watched(lambda: {"top1": 0.5})
    assert found["other_cores"] == pytest.approx((3 + 2 - 1) / 4)
    assert (found["top1"], found["cores"]) == (0.5, 2)
    assert found["begun"] <= found["ended"]


STARTED: Json = {
    "seconds": [0.1], "late": 0.0, "shares": [100], "received": [1.0], "sent": [1.0],
    "rates": [["0x1.0p+0"]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("study", "result"),
    [
        pytest.param(SERVERS, STARTED, id="servers"),
        pytest.param(SCALING, STARTED, id="scaling"),
        pytest.param(
            STALENESS, {"top1": 0.5, "updates": 3, "simulated_seconds": 1.0, "tau": [3]},
            id="staleness",
        ),
    ],
)  # fmt: skip
def test_a_missing_or_mistyped_field_is_one_line_in_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, study: Json, result: Json
) -> None:
    """Policies and settings: test_runner."""
    cells = cells_in(tmp_path, study)
    given = load_study(tmp_path / "study.yaml")
    whole = {}
    for cell in cells:
        record = {**undisturbed(1, cell=cell.name), **result}
        if isinstance(cell, HostsCell):
            protocol = cell.recipe.protocol
            record["received"] = record["sent"] = [1.0] * len(cell.workers_per_host)
            record["shares"] = [100] * (protocol.num_servers if protocol else 1)
        whole[cell.name] = {"seed-1": record}
    kind = runner.kind_of(given)
    assert kind.make_page(given, tmp_path, whole).findings
    monkeypatch.setattr(kind, "cells_of", lambda *_: cells)  # else loaded for each damage
    name = cells[0].name
    wrong: tuple[object, ...] = (None, "1", [], {}, -1, [-1.0] * 9, [None], True, "nan")
    wrong += 10**400, [10**400], [1e308]
    for key in whole[name]["seed-1"].keys() - {"recipe", "variant"}:
        record = whole[name]["seed-1"]
        without = {inside: value for inside, value in record.items() if inside != key}
        spoiled = [{**record, key: value} for value in wrong]
        messages = []
        for content in (without, *spoiled):
            try:
                kind.make_page(given, tmp_path, {**whole, name: {"seed-1": content}}).text()
            except StudyError as error:
                messages.append(str(error))
        assert len(messages) >= 4, key
        for message in messages:
            assert message.startswith(f"{name}/seed-1.json: {key}")
            assert "\n" not in message
