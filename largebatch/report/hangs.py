"""Which worker a hanging run waits for, from the dumps of torch's Flight Recorder.

Each dump has the collectives that one worker has called, numbered in each process group. A worker
waits where it has begun a collective that has not ended. It waits for those members of the group
that have not begun that collective. Some of these only wait for others: in 64 groups of 32 workers
one GPU that stands still stops first its group, and then all. The cause is a worker that is waited
for and waits for nobody.

A GPU that stands still looks like one that waits: its host has called everything. NCCL's events
show the difference, since a collective begins only after all earlier work of its stream.

Dumps are JSON: those of `distributed.flight_recorder`, which have more about their worker, or those
of torch. A pickle is refused, because reading one can run code.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError

from largebatch.errors import LargebatchError, shorten
from largebatch.formatting import duration, plural, ranges
from largebatch.rules import Finding, Rule, examine

DUMPS = "hangs"
"""Folder in a run folder, with a folder of dumps for each time that the run has hung."""

SILENT = "silent.json"
"""File in a folder of dumps: hosts of the workers that wrote none."""

LARGEST = 2**26
"""Largest size of a dump in bytes; torch's whole ring has 1 MB."""

_BYTES = {"Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4}
_BYTES |= {"Float": 4, "Long": 8, "Double": 8}
"""Bytes of an element, by torch's names of types."""

_NAMES = {"Float": "float32", "Half": "float16", "Double": "float64", "Long": "int64"}
_NAMES |= {"Int": "int32", "Byte": "uint8", "BFloat16": "bfloat16"}
"""Names of types that users know, by those of the recorder."""

_PARTS = {
    "forward_backward": "in the forward and backward pass",
    "sum_gradients": "in the sum of the gradients",
    "update_weights": "in the update of the weights",
    "evaluate": "in an evaluation",
    "polish": "in the pass for exact statistics",
    "save": "at a checkpoint",
    "train": "between the passes of an update",
}
"""Where a worker is in an update, by the innermost of these functions on its stack."""

_NAMED_ALONE = 3  # missing workers that are described one by one


def _numbers(text: object) -> object:
    """Return the ranks of torch's "[0, 1, 2]" or of our "0-2, 5"."""
    if not isinstance(text, str):
        return text
    ranks: list[int] = []
    for first, last in re.findall(r"(\d{1,7})(?:-(\d{1,7}))?", text):
        ranks += range(int(first), int(last or first) + 1)
    return ranks


class _Part(BaseModel, extra="ignore"):
    """A part of a dump; what newer versions of torch add is ignored."""


class _Worker(_Part):
    """What our dumps have about their worker."""

    worker: int = Field(ge=0)
    workers: int = Field(ge=1, le=2**20)
    host: str = ""
    seconds: float = 0.0
    """Seconds without progress."""

    update: int | None = None
    stack: list[str] = []
    """Innermost frames of the main thread, the innermost one first."""

    groups: dict[str, Annotated[list[int], BeforeValidator(_numbers)]] = {}
    """Members of the process groups."""

    gradients: list[int] = []
    """Numbers of elements of the groups in which gradients are sent."""


class _Group(_Part):
    ranks: Annotated[list[int], BeforeValidator(_numbers)] = []


class _Status(_Part):
    last_completed_collective: int = -1


class _Entry(_Part):
    process_group: tuple[str, str]
    pg_id: int
    collective_seq_id: int
    profiling_name: str
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    state: str = "scheduled"
    is_p2p: bool = False
    retired: bool = False
    time_created_ns: int = 0
    time_discovered_started_ns: int | None = None


class _Dump(_Part):
    entries: list[_Entry] = []
    pg_config: dict[str, _Group] = {}
    pg_status: dict[int, _Status] = {}
    largebatch: _Worker | None = None


_DUMP = TypeAdapter(_Dump)
_HOSTS = TypeAdapter(dict[int, str])


class CollectiveId(NamedTuple):
    """A collective of a process group: the same on all of its members."""

    group: str
    number: int


@dataclass
class WorkerDump:
    """The collectives of one worker."""

    rank: int
    dump: _Dump
    about: _Worker | None

    @cached_property
    def calls(self) -> dict[CollectiveId, _Entry]:
        """The recorded collectives; messages between two workers are left out."""
        calls = {}
        for entry in self.dump.entries:
            if not entry.is_p2p:
                calls[CollectiveId(entry.process_group[0], entry.collective_seq_id)] = entry
        return calls

    @cached_property
    def called(self) -> dict[str, int]:
        """Number of the last collective of each group that this worker has called."""
        last: dict[str, int] = {}
        for group, number in self.calls:
            last[group] = max(number, last.get(group, 0))
        return last

    @cached_property
    def ended(self) -> dict[str, int]:
        """Number of the last collective of each group that has ended."""
        ended: dict[str, int] = {}
        for (group, number), entry in self.calls.items():
            status = self.dump.pg_status.get(entry.pg_id)
            if status is not None:
                ended[group] = max(status.last_completed_collective, ended.get(group, 0))
            if entry.retired or entry.state == "completed":
                ended[group] = max(number, ended.get(group, 0))
        return ended

    @cached_property
    def shows_begins(self) -> bool:
        """True if the dump shows which collectives the device has begun, as NCCL's events do."""
        return any(entry.time_discovered_started_ns for entry in self.dump.entries)

    def has_begun(self, collective: CollectiveId) -> bool:
        """Return True if this worker takes part in a collective."""
        if self.called.get(collective.group, 0) < collective.number:
            return False
        if not self.shows_begins or self.ended.get(collective.group, 0) >= collective.number:
            return True
        entry = self.calls.get(collective)
        return entry is None or entry.state != "scheduled"

    @cached_property
    def waits(self) -> list[CollectiveId]:
        """The first collective of each group that this worker has begun and that has not ended."""
        first: dict[str, int] = {}
        for group, number in self.calls:
            if number > self.ended.get(group, 0):
                first[group] = min(number, first.get(group, number))
        collectives = [CollectiveId(group, number) for group, number in first.items()]
        return [collective for collective in collectives if self.has_begun(collective)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A worker that others wait for."""

    rank: int
    collective: CollectiveId
    """The first collective that it is missing from."""

    how: str
    """`silent`, it wrote no dump; `host`, it has not called the collective; `device`, it has, and
    its GPU has not begun it."""

    last: int
    """Number of the last collective of the group that it has called; 0 if that is not known."""

    host: str
    stack: Sequence[str]
    update: int | None

    @property
    def text(self) -> str:
        """The worker, and where it is."""
        host = f" on {self.host}" if self.host else ""
        name = f"worker {self.rank}{host}"
        if self.how == "silent":
            return f"{name} (wrote no dump: its process is gone, stopped or blocked)"
        if self.how == "device":
            return f"{name} (its GPU has not begun it)"
        where = f", at {_frame(self.stack)}" if self.stack else ""
        return f"{name} (last collective {self.last:,}{where})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """What the dumps of a hanging run show."""

    workers: int
    missing: Sequence[Missing]
    collective: str
    """The collective that is waited for: name, number, group, size."""

    update: str
    """Where in the update those are that wait."""

    waiting: int
    """Number of workers that wait."""

    seconds: float
    """Seconds that the first of them had waited; NaN if that is not known."""

    different: Sequence[str] = ()
    """What the workers have called in place of the same collective, most workers first."""

    circle: Sequence[str] = ()
    """Collectives in which workers wait for each other."""

    def of(self, how: str) -> list[Missing]:
        """Return the workers that are missing in this way."""
        return [worker for worker in self.missing if worker.how == how]


def _absence(e: Hang, how: str) -> str:
    absent = e.of(how)
    if len(absent) <= _NAMED_ALONE:
        names = ", ".join(worker.text for worker in absent)
    else:
        state = {
            "silent": "wrote no dump",
            "device": "their GPUs have not begun it",
            "host": f"the first is at {_frame(absent[0].stack)}",
        }
        names = f"workers {_shortened(worker.rank for worker in absent)} ({state[how]})"
    since = "" if math.isnan(e.seconds) else f" for {duration(e.seconds)}"
    waiting = f"{plural(e.waiting, 'worker')} waited{since}"
    return f"{names} did not arrive at {e.collective}{e.update}; {waiting}"


_LEAVE_OUT = "leave the host out and resume with --resume auto; repeated on one host, it is faulty"

HANGS: tuple[Rule[Hang], ...] = (
    Rule(
        check="collectives differ",
        level="fault",
        when=lambda e: bool(e.different),
        text=lambda e: f"at {e.collective}{e.update}: {'; '.join(e.different)}",
        remedy="all workers must call the same collectives in the same order: look for a branch on "
        "the rank, or for other data, options or packages on the workers named last",
    ),
    Rule(
        check="GPU stands still",
        level="fault",
        when=lambda e: bool(e.of("device")),
        text=lambda e: _absence(e, "device"),
        remedy=f"look for its errors in dmesg (Xid) and nvidia-smi -q; {_LEAVE_OUT}",
        unless=frozenset({"collectives differ"}),
    ),
    Rule(
        check="worker silent",
        level="fault",
        when=lambda e: bool(e.of("silent")),
        text=lambda e: _absence(e, "silent"),
        remedy=f"look for the end of its process (out of memory, an error) and at its host; "
        f"{_LEAVE_OUT}",
        unless=frozenset({"collectives differ"}),
    ),
    Rule(
        check="worker late",
        level="fault",
        when=lambda e: bool(e.of("host")),
        text=lambda e: _absence(e, "host"),
        remedy="look at the place where it is: data that come slowly, or code that only some "
        "workers run; a longer --timeout waits longer",
        unless=frozenset({"collectives differ"}),
    ),
    Rule(
        check="order of groups",
        level="fault",
        when=lambda e: bool(e.circle),
        text=lambda e: f"workers wait for each other: {'; '.join(e.circle)}{e.update}",
        remedy="all workers must use their groups in the same order",
    ),
    Rule(
        check="network",
        level="fault",
        when=lambda e: e.waiting > 0 and not (e.different or e.missing or e.circle),
        text=lambda e: (
            f"all members have begun {e.collective}{e.update} and {e.waiting:,} have not ended it"
        ),
        remedy="no worker is missing, so it is the network or the library: see `largebatch doctor "
        "--network` and NCCL_DEBUG=INFO",
    ),
    Rule(
        check="nothing waits",
        level="unknown",
        when=lambda e: e.waiting == 0,
        text="no worker waits in a recorded collective; those in CUDA graphs are not recorded",
        remedy="record again with execution.graph: false",
    ),
)


def explain_hang(folder: Path) -> list[Finding]:
    """Return what a folder of dumps shows, the cause first.

    Raises LargebatchError if there is no dump, or if one is a pickle or damaged.
    """
    return list(examine(measure_hang(folder), HANGS))


def hang_line(folder: Path) -> str:
    """Return what a folder of dumps shows in one line, also for damaged dumps."""
    try:
        return "; ".join(finding.text for finding in explain_hang(folder))
    except LargebatchError as error:
        return str(error)


def has_dumps(folder: Path) -> bool:
    """Return True if a folder has dumps, and is not a run folder."""
    return folder.is_dir() and any(_rank_of(path) is not None for path in folder.iterdir())


def newest_dumps(run: Path) -> Path | None:
    """Return the newest folder of dumps of a run folder; None if it never hung."""
    return max(filter(has_dumps, (run / DUMPS).glob("*")), default=None)


def _rank_of(path: Path) -> int | None:
    """Return the rank in the name of a dump: worker-00003.json, or torch's nccl_trace_rank_3."""
    found = re.fullmatch(r"(?:worker-|.*rank_?)(\d{1,7})(?:\.json)?", path.name)
    return int(found[1]) if found else None


def _read(path: Path, rank: int) -> WorkerDump:
    if path.stat().st_size > LARGEST:
        raise LargebatchError(f"{path}: has more than {LARGEST:,} bytes; expected one dump")
    content = path.read_bytes()
    if content[:1] == b"\x80":
        raise LargebatchError(
            f"{path}: is a pickle, which is not read because it could run code; the dumps of a run "
            f"are JSON, in RUN/{DUMPS}"
        )
    try:
        dump = _DUMP.validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise LargebatchError(
            f"{path}: is not a dump of collectives: {where} {first['msg']}"
        ) from None
    about = dump.largebatch
    return WorkerDump(rank if about is None else about.worker, dump, about)


def read_dumps(folder: Path) -> dict[int, WorkerDump]:
    """Return the dumps of a folder by rank; raise LargebatchError as `explain_hang`."""
    dumps: dict[int, WorkerDump] = {}
    for path in sorted(folder.iterdir()):
        rank = _rank_of(path)
        if rank is None or not path.is_file():
            continue
        worker = _read(path, rank)
        if worker.rank in dumps:
            raise LargebatchError(f"{path}: a second dump of worker {worker.rank}; keep one")
        dumps[worker.rank] = worker
    if not dumps:
        raise LargebatchError(f"{folder}: has no dumps; expected worker-RANK.json")
    return dumps


def measure_hang(folder: Path) -> Hang:
    """Find what the workers of a folder of dumps wait for; raise as `explain_hang`."""
    dumps = read_dumps(folder)
    hosts: dict[int, str] | None = None
    if (folder / SILENT).is_file():
        try:
            hosts = _HOSTS.validate_json((folder / SILENT).read_bytes())
        except ValidationError:
            raise LargebatchError(f"{folder / SILENT}: is damaged; remove it") from None
    return _Analysis(dumps, hosts).hang()


@dataclass
class _Analysis:
    dumps: dict[int, WorkerDump]
    silent: dict[int, str] | None
    """Hosts of the workers that wrote no dump; None: all whose dump is not here."""

    def hang(self) -> Hang:
        waiting = {rank: dump.waits for rank, dump in self.dumps.items() if dump.waits}
        collectives = sorted(
            {collective for waits in waiting.values() for collective in waits}, key=self._began
        )
        absences = {collective: self._missing_from(collective) for collective in collectives}
        victims = {
            rank
            for rank, waits in waiting.items()
            if any(absences[collective] for collective in waits)
        }
        # The collective that was begun first: what a worker is missing from first.
        first: dict[int, CollectiveId] = {}
        for collective in collectives:
            for rank in absences[collective]:
                if rank not in victims:
                    first.setdefault(rank, collective)
        missing = [self._describe(rank, collective) for rank, collective in sorted(first.items())]
        different: Sequence[str] = ()
        shown = collectives[0] if collectives else None
        for collective in collectives:
            if variants := self._variants(collective):
                different = variants
                shown = collective
                break
        else:
            if missing:
                shown = min((worker.collective for worker in missing), key=self._began)
        circle: list[str] = []
        if victims and not missing:
            circle = [
                f"{self._workers_in(collective, waiting)} in {self._collective(collective)}"
                for collective in collectives[:_NAMED_ALONE]
            ]
        times = [dump.about.seconds for dump in self.dumps.values() if dump.about and dump.waits]
        return Hang(
            workers=self._world,
            missing=missing,
            collective="" if shown is None else self._collective(shown),
            update="" if shown is None else self._update(shown, waiting),
            waiting=len(waiting),
            seconds=max(times, default=math.nan),
            different=different,
            circle=circle,
        )

    @cached_property
    def _world(self) -> int:
        told = [dump.about.workers for dump in self.dumps.values() if dump.about]
        configured = [len(ranks) for ranks in self._members.values()]
        return max([*told, *configured, max(self.dumps) + 1])

    @cached_property
    def _members(self) -> dict[str, list[int]]:
        """Members of each group, as far as a dump names them; else those that have called it."""
        members: dict[str, list[int]] = {}
        callers: dict[str, list[int]] = {}
        for rank, dump in self.dumps.items():
            if dump.about:
                for group, ranks in dump.about.groups.items():
                    members.setdefault(group, ranks)
            for group, config in dump.dump.pg_config.items():
                if config.ranks:
                    members.setdefault(group, config.ranks)
            for group in dump.called:
                callers.setdefault(group, []).append(rank)
        return callers | members

    def _missing_from(self, collective: CollectiveId) -> list[int]:
        return [
            rank for rank in self._members[collective.group] if self._is_missing(rank, collective)
        ]

    def _is_missing(self, rank: int, collective: CollectiveId) -> bool:
        dump = self.dumps.get(rank)
        if dump is None:
            # The file of a worker that wrote one may not have come here.
            return self.silent is None or rank in self.silent
        return not dump.has_begun(collective)

    def _began(self, collective: CollectiveId) -> int:
        calls = (dump.calls.get(collective) for dump in self.dumps.values())
        return min(entry.time_created_ns for entry in calls if entry is not None)

    def _describe(self, rank: int, collective: CollectiveId) -> Missing:
        dump = self.dumps.get(rank)
        if dump is None:
            host = (self.silent or {}).get(rank, "")
            return Missing(
                rank=rank,
                collective=collective,
                how="silent",
                last=0,
                host=host,
                stack=(),
                update=None,
            )
        last = dump.called.get(collective.group, 0)
        about = dump.about
        return Missing(
            rank=rank,
            collective=collective,
            how="device" if last >= collective.number else "host",
            last=last,
            host=about.host if about else "",
            stack=about.stack if about else (),
            update=about.update if about else None,
        )

    def _variants(self, collective: CollectiveId) -> list[str]:
        """Return what was called as this collective, if that differs; most workers first."""
        callers: dict[str, list[int]] = {}
        for rank, dump in self.dumps.items():
            entry = dump.calls.get(collective)
            if entry is not None:
                callers.setdefault(f"{_operation(entry)} of {_size(entry)}", []).append(rank)
        if len(callers) < 2:
            return []
        ordered = sorted(callers.items(), key=lambda item: -len(item[1]))
        return [f"{_named(ranks)} called {what}" for what, ranks in ordered]

    def _collective(self, collective: CollectiveId) -> str:
        dump, entry = next(
            (dump, dump.calls[collective])
            for dump in self.dumps.values()
            if collective in dump.calls
        )
        members = self._members[collective.group]
        group = f"all {self._world:,} workers"
        if len(members) < self._world:
            group = _named(members)
        size = _size(entry)
        gradients = dump.about.gradients if dump.about else []
        elements = sum(map(math.prod, entry.input_sizes))
        if entry.profiling_name.endswith("all_reduce") and gradients.count(elements) == 1:
            number = gradients.index(elements) + 1
            size += f", gradients, group {number} of {len(gradients)}"
        return f"{_operation(entry)} {collective.number:,} of {group} ({size})"

    def _update(self, collective: CollectiveId, waiting: dict[int, list[CollectiveId]]) -> str:
        for rank, waits in waiting.items():
            about = self.dumps[rank].about
            if collective in waits and about is not None and about.update is not None:
                part = _part(about.stack)
                return f" of update {about.update + 1:,}{f' ({part})' if part else ''}"
        return ""

    def _workers_in(self, collective: CollectiveId, waiting: dict[int, list[CollectiveId]]) -> str:
        return _named([rank for rank, waits in waiting.items() if collective in waits])


def _operation(entry: _Entry) -> str:
    return entry.profiling_name.rpartition(":")[2]


def _size(entry: _Entry) -> str:
    if not entry.input_sizes:
        return "no tensor"
    parts = []
    for sizes, dtype in zip(entry.input_sizes, entry.input_dtypes, strict=False):
        elements = math.prod(sizes)
        size = elements * _BYTES.get(dtype, 0)
        shown = f"{size / 1e6:,.3g} MB" if size >= 1e5 else f"{size:,} bytes"
        parts.append(f"{elements:,} {_NAMES.get(dtype, dtype)}, {shown}")
    return shorten(parts, most=_NAMED_ALONE)


def _part(stack: Iterable[str]) -> str:
    """Return where in an update a stack is; empty if it is in none of `_PARTS`."""
    for frame in stack:
        function = frame.rpartition(" in ")[2]
        if function in _PARTS and not frame.startswith("distributed/"):
            return _PARTS[function]
    return ""


def _frame(stack: Sequence[str]) -> str:
    """Return the innermost frame, and the innermost one in this package, whose paths have a /.

    >>> _frame(["own.py:31 in load", "dataset.py:8 in get", "data/own.py:88 in fetch"])
    'own.py:31 in load (called from data/own.py:88 in fetch)'
    """
    if not stack:
        return "an unknown place"
    ours = next((frame for frame in stack if "/" in frame), stack[0])
    return stack[0] if ours == stack[0] else f"{stack[0]} (called from {ours})"


def _named(ranks: Sequence[int]) -> str:
    return f"{'worker' if len(ranks) == 1 else 'workers'} {_shortened(ranks)}"


def _shortened(ranks: Iterable[int]) -> str:
    return shorten(ranges(ranks).split(", "))
