"""Which worker a hanging run waits for: dumps in torch's JSON, of up to 2,048 workers.

Their form is that of torch's source, FlightRecorderDetail.hpp: numbers of `pg_status` and ranks of
`pg_config` are text, and times that are not known are 0.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from largebatch.cli.main import DONE, USER, main
from largebatch.errors import LargebatchError
from largebatch.report.hangs import HANGS, explain_hang, measure_hang, newest_dumps
from largebatch.rules import examine

SECOND = 10**9


def entry(
    group: str,
    number: int,
    *,
    state: str,
    elements: int = 1000,
    name: str = "nccl:all_reduce",
    timed: bool = True,
    at: int | None = None,
) -> dict[str, Any]:
    """Return a collective as NCCL's recorder writes it; without `timed` as Gloo's."""
    return {
        "record_id": number,
        "pg_id": int(group),
        "process_group": [group, "default_pg" if group == "0" else "undefined"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": name,
        "time_created_ns": (number if at is None else at) * SECOND,
        "input_sizes": [[elements]],
        "input_dtypes": ["Float"],
        "output_sizes": [[elements]],
        "output_dtypes": ["Float"],
        "state": state if timed else "scheduled",
        "time_discovered_started_ns": number if timed and state != "scheduled" else 0,
        "time_discovered_completed_ns": number if timed and state == "completed" else 0,
        "retired": state == "completed",
        "timeout_ms": 300_000,
        "is_p2p": False,
    }


def dump(entries: list[dict[str, Any]], groups: dict[str, list[int]]) -> dict[str, Any]:
    """Return the dump of a worker, with the status of the groups that its collectives have."""
    status = {}
    for group in groups:
        numbers = [it["collective_seq_id"] for it in entries if it["process_group"][0] == group]
        ended = [
            it["collective_seq_id"]
            for it in entries
            if it["process_group"][0] == group and it["retired"]
        ]
        status[group] = {
            "last_enqueued_collective": str(max(numbers, default=-1)),
            "last_started_collective": "-1",
            "last_completed_collective": str(max(ended, default=-1)),
        }
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.5",
        "pg_config": {
            group: {"name": group, "desc": "", "ranks": str(ranks)}
            for group, ranks in groups.items()
        },
        "pg_status": status,
        "entries": entries,
        "nccl_comm_state": {},
    }


def write(folder: Path, rank: int, content: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"worker-{rank:05}.json").write_text(json.dumps(content), encoding="utf-8")


def ring(last: str, *, workers: int, timed: bool = True) -> dict[str, Any]:
    """Return the dump of a worker of one group that has ended six collectives; the state of the 7th
    is `last`, empty if it has not called it."""
    entries = [entry("0", number, state="completed", timed=timed) for number in range(1, 7)]
    if last:
        entries.append(entry("0", 7, state=last, timed=timed))
    return dump(entries, {"0": list(range(workers))})


@pytest.mark.parametrize("timed", [True, False], ids=["NCCL", "Gloo"])
def test_a_worker_that_has_not_called_the_collective_is_named(timed: bool, tmp_path: Path) -> None:
    for rank in range(4):
        last = "" if rank == 2 else "started"
        write(tmp_path, rank, ring(last, workers=4, timed=timed))
    hang = measure_hang(tmp_path)
    assert [(worker.rank, worker.how, worker.last) for worker in hang.missing] == [(2, "host", 6)]
    assert hang.waiting == 3
    (finding,) = explain_hang(tmp_path)
    assert finding.check == "worker late"
    # The worker, the collective, its number and its size.
    for part in ("worker 2", "all_reduce", "7 of all 4", "1,000 float32"):
        assert part in finding.text


def test_a_worker_without_a_dump_is_named_with_its_host(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        write(tmp_path, rank, ring("started", workers=4))
    (tmp_path / "silent.json").write_text('{"2": "node17"}', encoding="utf-8")
    (finding,) = explain_hang(tmp_path)
    assert finding.check == "worker silent"
    assert "worker 2 on node17" in finding.text


def test_a_worker_whose_dump_was_lost_on_the_way_is_not_blamed(tmp_path: Path) -> None:
    """Worker 3 wrote one, which a network file system does not show yet."""
    write(tmp_path, 0, ring("started", workers=4))
    write(tmp_path, 1, ring("", workers=4))
    (tmp_path / "silent.json").write_text('{"2": "node17"}', encoding="utf-8")
    assert [worker.rank for worker in measure_hang(tmp_path).missing] == [1, 2]


WORKERS, MEMBERS, STUCK = 2048, 32, 1337


def stuck_gpu(rank: int) -> dict[str, Any]:
    """Return the dump of one of 2,048 workers in 64 groups, of which the GPU of one stands still.

    The hosts have called everything. Of the group of that GPU the others are in its collective;
    all other workers have ended theirs and are in the sum over all.
    """
    own = rank // MEMBERS
    group = str(own + 1)
    if own != STUCK // MEMBERS:
        states = ("completed", "started")
    elif rank != STUCK:
        states = ("started", "scheduled")
    else:
        states = ("scheduled", "scheduled")
    entries = [entry("0", number, state="completed", at=number) for number in range(45, 50)]
    entries.append(entry(group, 30, state=states[0], elements=129, at=60))
    entries.append(entry("0", 50, state=states[1], elements=25_600_000, at=61))
    members = list(range(own * MEMBERS, (own + 1) * MEMBERS))
    # torch writes all ranks of the default group into each dump; one is enough to know them.
    groups = {group: members} | ({"0": list(range(WORKERS))} if rank == 0 else {"0": []})
    return dump(entries, groups)


def test_one_gpu_of_2048_is_named(tmp_path: Path) -> None:
    """The question of NCCL's issue 1063."""
    for rank in range(WORKERS):
        write(tmp_path, rank, stuck_gpu(rank))
    hang = measure_hang(tmp_path)
    assert [(worker.rank, worker.how) for worker in hang.missing] == [(STUCK, "device")]
    assert hang.waiting == WORKERS - 1
    (finding,) = examine(hang, HANGS)
    assert finding.check == "GPU stands still"
    assert f"worker {STUCK} " in finding.text
    assert "workers 1312-1343" in finding.text


def test_other_sizes_and_other_operations_at_one_place_are_named(tmp_path: Path) -> None:
    for rank in range(3):
        content = ring("started", workers=3)
        if rank == 1:
            content["entries"][-1] = entry("0", 7, state="started", elements=999)
        write(tmp_path, rank, content)
    (finding,) = explain_hang(tmp_path)
    assert finding.check == "collectives differ"
    assert finding.text.index("workers 0, 2 called") < finding.text.index("worker 1 called")


def test_workers_that_wait_for_each_other_in_two_groups_are_a_circle(tmp_path: Path) -> None:
    groups = {"0": [0, 1], "1": [0, 1]}
    for rank in range(2):
        own, other = ("0", "1") if rank == 0 else ("1", "0")
        entries = [entry(own, 1, state="started"), entry(other, 1, state="scheduled")]
        write(tmp_path, rank, dump(entries, groups))
    assert [finding.check for finding in explain_hang(tmp_path)] == ["order of groups"]


def test_a_collective_that_all_have_begun_is_the_network(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, ring("started", workers=2))
    assert [finding.check for finding in explain_hang(tmp_path)] == ["network"]


def test_nothing_is_blamed_where_nothing_waits(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, ring("", workers=2))
    assert [finding.level for finding in explain_hang(tmp_path)] == ["unknown"]


def test_diagnose_reads_dumps_of_torch_and_a_run_names_its_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's files end with the rank."""
    for name in ("20260101-000000", "20260102-000000"):
        folder = tmp_path / "hangs" / name
        folder.mkdir(parents=True)
        for rank in range(2):
            content = ring("started" if rank else "", workers=2)
            (folder / f"nccl_trace_rank_{rank}").write_text(json.dumps(content), encoding="utf-8")
    assert newest_dumps(tmp_path) == folder
    assert main(["report", "diagnose", str(folder), "--json"]) == DONE
    (cause,) = json.loads(capsys.readouterr().out)["causes"]
    assert cause["kind"] == "worker late"
    assert "worker 0 " in cause["figure"]


class Runs:
    """Writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"{", id="cut"),
        pytest.param(b'{"entries": [{"pg_id": "x"}]}', id="of another form"),
        pytest.param(b"[1, 2]", id="a list"),
    ],
)
def test_damaged_dumps_are_refused_in_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "worker-00000.json").write_bytes(content)
    assert main(["report", "diagnose", str(tmp_path)]) == USER
    assert capsys.readouterr().err.count("\n") == 1


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    (folder / "nccl_trace_rank_0").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(LargebatchError, match="pickle"):
        explain_hang(folder)
    assert not (tmp_path / "ran").exists()
