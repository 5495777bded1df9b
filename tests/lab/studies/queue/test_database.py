"""The policy database: slots that real processes race for, and databases that are refused."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import claim_slots
import pytest

import largebatch
from largebatch.errors import StudyError
from largebatch.lab.studies.queue import owners as owners_module
from largebatch.lab.studies.queue.database import Queue, Slot, open_existing, open_storage
from largebatch.lab.studies.queue.owners import GRACE_SECONDS, Owners

STORAGES = pytest.mark.parametrize("file", ["sqlite:///{}/study.db", "{}/study.journal"])
NUMBER = 12


@contextmanager
def claiming(url: str, *words: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, claim_slots.__file__, url, str(NUMBER), *words]
    paths = {"PYTHONPATH": str(Path(largebatch.__file__).parents[1])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | paths
    ) as process:
        yield process
        process.kill()


def claimed(processes: "list[subprocess.Popen[str]]") -> list[str]:
    found = []
    for process in processes:
        printed, _ = process.communicate(timeout=600)
        assert process.returncode == 0
        found += printed.splitlines()
    return found


@contextmanager
def a_queue(url: str, number: int = NUMBER) -> Iterator[Queue]:
    with open_storage(url) as storage:
        yield Queue(storage, claim_slots.NAME, claim_slots.DEFINITION, claim_slots.slots(number))


@pytest.mark.long
@STORAGES
def test_processes_that_begin_at_once_make_every_run_once(tmp_path: Path, file: str) -> None:
    url = file.format(tmp_path)
    with claiming(url) as one, claiming(url) as two, claiming(url) as three:
        found = claimed([one, two, three])
    assert Counter(found) == Counter(f"run-{k} {k + 1.0}" for k in range(NUMBER))
    with a_queue(url) as queue:
        assert {name: trial.values for name, trial in queue.done().items()} == {
            f"run-{k}": [k + 1.0] for k in range(NUMBER)
        }


def test_the_run_of_a_process_that_was_killed_is_made_by_another_one(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    with claiming(url, "hang") as hanging:
        assert hanging.stdout is not None
        held = hanging.stdout.readline().strip()  # else the other one may have taken all
        with claiming(url) as other:
            with a_queue(url) as queue:
                assert queue.trials()[held.split()[0]].state.name == "RUNNING"
            hanging.send_signal(signal.SIGKILL)
            hanging.wait()
            found = claimed([other])
    assert held in found
    assert Counter(found) == Counter(f"run-{k} {k + 1.0}" for k in range(NUMBER))
    with a_queue(url) as queue:
        states = Counter(trial.state.name for trial in queue.study.get_trials())
        assert (states["COMPLETE"], states["RUNNING"]) == (NUMBER, 0)


def test_a_started_run_keeps_its_drawn_values(tmp_path: Path) -> None:
    with a_queue(f"sqlite:///{tmp_path}/study.db") as queue:
        drawing = Queue(queue.study._storage, "drawn", {}, [Slot(name="search-1")])
        first = drawing.claim(Owners())
        assert first is not None
        drawn = first.trial.suggest_float("rate", 0.001, 1000.0, log=True)
        drawing.give_back(first)
        again = drawing.claim(Owners())
        assert again is not None
        assert again.trial.suggest_float("rate", 0.001, 1000.0, log=True) == drawn


def test_of_two_trials_of_one_slot_the_first_counts(tmp_path: Path) -> None:
    """As two processes leave them that both found the slot missing."""
    with a_queue(f"sqlite:///{tmp_path}/study.db", 1) as queue:
        for _ in range(3):
            queue.study.enqueue_trial({}, user_attrs={"slot": "run-0"})
        claim = queue.claim(Owners())
        assert claim is not None
        assert claim.trial.number == 0
        claim.trial.set_user_attr("owner", {"host": "another machine", "process": 1, "beat": 0})
        assert queue.claim(Owners()) is None
        queue.tell(0, state="COMPLETE", value=1.0)
        assert queue.is_done
        assert queue.claim(Owners()) is None


def test_a_process_elsewhere_is_gone_after_a_constant_heartbeat() -> None:
    now = 0.0
    owners = Owners(clock=lambda: now)
    trial = {"owner": {"host": "another machine", "process": 1, "beat": 3}}
    assert not owners.is_gone("a trial", trial)
    now = GRACE_SECONDS + 1
    trial["owner"]["beat"] = 4
    assert not owners.is_gone("a trial", trial)
    now += GRACE_SECONDS - 1
    assert not owners.is_gone("a trial", trial)
    now += 2
    assert owners.is_gone("a trial", trial)


def test_numbers_of_processes_are_compared_in_one_container_alone() -> None:
    owners, nobody = Owners(), 1 << 30
    own = owners.own(beat=0) | {"process": nobody}
    assert owners.is_gone("a trial", {"owner": own})
    elsewhere = own | {"numbers": "another boot 4026531836"}
    assert not owners.is_gone("a trial", {"owner": elsewhere})


def test_a_run_beats_and_stops_where_the_process_that_started_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners_module, "BEAT_SECONDS", 0.01)
    stopped: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _, number: stopped.append(number))
    with a_queue(f"sqlite:///{tmp_path}/study.db", 1) as queue:
        claim = queue.claim(Owners())
        assert claim is not None
        with owners_module.beating(claim.trial, Owners()):
            while claim.trial.user_attrs["owner"]["beat"] < 2:
                pass
        assert not stopped
        with owners_module.beating(claim.trial, Owners(parent=1 << 30)):
            while not stopped:
                pass
    assert stopped == [signal.SIGTERM]


def test_a_database_that_is_none_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "study.db"
    file.write_bytes(b"not a database " * 100)
    with pytest.raises(StudyError, match=r"sqlite:.*study.db: .*not a database"):
        a_queue(f"sqlite:///{file}").__enter__()
    assert file.read_bytes() == b"not a database " * 100
    journal = tmp_path / "study.journal"
    journal.write_text("no records\nat all\n")
    with pytest.raises(StudyError, match=r"study.journal: cannot be used"):
        a_queue(str(journal)).__enter__()


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe\n", b"{}\n", b"[1]\n", b'{"op_code": 99, "worker_id": "a"}\n'],
    ids=["bytes", "empty", "list", "unknown"],
)
def test_a_journal_with_a_line_that_is_no_record_is_refused(tmp_path: Path, line: bytes) -> None:
    journal = tmp_path / "study.journal"
    journal.write_bytes(line * 2)
    with pytest.raises(StudyError, match=r"study.journal: cannot be used: one of its lines is no"):
        a_queue(str(journal)).__enter__()
    assert journal.read_bytes() == line * 2


@pytest.mark.parametrize("table", ["customers", "studies"])
def test_the_database_of_another_program_is_refused_and_stays_as_it_is(
    tmp_path: Path, table: str
) -> None:
    """Also where a table of it is called as one of Optuna's."""
    file = tmp_path / "study.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(f"CREATE TABLE {table} (uid TEXT, patient TEXT)")
        connection.commit()
    before = file.read_bytes()
    with pytest.raises(StudyError, match=rf"holds tables of another program \({table}\), and is"):
        a_queue(f"sqlite:///{file}").__enter__()
    with pytest.raises(StudyError, match=r"study.db: holds no studies, and is left as it is"):
        open_existing(f"sqlite:///{file}").__enter__()
    assert file.read_bytes() == before


def test_an_empty_file_is_filled_and_not_read(tmp_path: Path) -> None:
    file = tmp_path / "study.db"
    file.touch()
    with pytest.raises(StudyError, match="holds no studies"):
        open_existing(f"sqlite:///{file}").__enter__()
    assert file.stat().st_size == 0
    with a_queue(f"sqlite:///{file}") as queue:
        assert not queue.trials()


@pytest.mark.long
def test_a_database_that_breaks_in_the_middle_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"

    def claim_from_a_broken_one() -> None:
        with a_queue(url) as queue, sqlite3.connect(tmp_path / "study.db") as connection:
            connection.execute("DROP TABLE trial_user_attributes")
            connection.commit()
            queue.claim(Owners())

    with pytest.raises(StudyError, match="cannot be used: .*trial_user_attributes"):
        claim_from_a_broken_one()


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    with a_queue(url) as queue:
        there = queue.study.user_attrs["definition"]
        queue.study.set_user_attr("definition", {**there, "format": 1})
    with pytest.raises(StudyError, match="a study of this name with format 1, expected 2"):
        a_queue(url).__enter__()


def test_a_database_of_another_optuna_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    with a_queue(url):
        pass
    with sqlite3.connect(tmp_path / "study.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'v99.0.0'")
    with pytest.raises(StudyError, match="is of another version: .*optuna"):
        a_queue(url).__enter__()


def test_two_studies_under_one_name_are_refused_with_what_differs(tmp_path: Path) -> None:
    with open_storage(f"sqlite:///{tmp_path}/study.db") as storage:
        Queue(storage, "tiny/digits/flat/search", {"search": {"trials": 3}}, [])
        Queue(storage, "tiny/digits/flat/search", {"search": {"trials": 3}}, [])
        with pytest.raises(StudyError, match=r"search.trials is 3 there and 4 here; give this one"):
            Queue(storage, "tiny/digits/flat/search", {"search": {"trials": 4}}, [])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "nonsense: cannot be used: Could not parse"),
        ("sqlite:////no/such/folder/a.db", "unable to open database file"),
        ("/no/such/folder/a.journal", "a.journal: No such file"),
        ("nodialect://user:secret@host/name", r"nodialect://user:\*\*\*@host/name: cannot be used"),
    ],
)
def test_a_storage_that_cannot_be_reached_is_refused_without_its_password(
    url: str, message: str
) -> None:
    with pytest.raises(StudyError, match=message) as refused:
        a_queue(url).__enter__()
    assert "secret" not in str(refused.value)
