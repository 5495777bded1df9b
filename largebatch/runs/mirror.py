"""Copies of a run folder in storage, so that a run survives its machine.

`--mirror s3://bucket/runs` copies the run folder `runs/mine` to s3://bucket/runs/mine while the run
writes it, and `resume s3://bucket/runs/mine` on an empty machine continues from there. A thread of
worker 0 copies after each checkpoint and at the end. The next checkpoint is written only when the
last one is copied, so storage is at most one checkpoint behind; a run waits for slow storage only
if a copy takes longer than the time between two checkpoints. Objects appear whole or not at all,
the newest checkpoint last, and what the folder no longer has is removed after that.

Storage that fails costs copies and not the run: it is noted, and tried again after the next
checkpoint. One run writes to an address at a time: it renews an object that other machines look at.
"""

import hashlib
import json
import logging
import math
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from largebatch.address import WEB, Address, Place
from largebatch.bucket import Bucket, Object, open_bucket
from largebatch.distributed.environment import TIMEOUT_SECONDS, worker_rank
from largebatch.errors import CheckpointError, LargebatchError, reason_of
from largebatch.formatting import plural
from largebatch.runs.interrupts import StopRequests
from largebatch.storage import user_cache, write_whole, writing
from largebatch.tracking.events import (
    CHECKPOINTS,
    LOG,
    RECIPE,
    SUMMARY,
    TRACE,
    Event,
)
from largebatch.tracking.log import require_unlocked
from largebatch.tracking.tensorboard import FOLDER as TENSORBOARD

OWNER = "owner.json"
"""Object that the run which writes to an address renews."""

TOKEN = ".mirror.json"  # noqa: S105 -- no secret
"""File in a run folder with the address of its copy, and the identity under which it owns that."""

BEAT_SECONDS = 20.0
"""Seconds between two renewals of OWNER."""

SILENT_SECONDS = 70.0
"""Seconds without a renewal after which another machine may continue the run."""

LAST_SECONDS = 90.0
"""Seconds after a request to stop in which the last copy may end: Slurm kills after 120 s, and the
pods of `launch` after as long."""

FAILED_SECONDS = 5.0
"""Seconds that the last copy may take after an error of one of several workers: launchers kill the
others after 10 s, and the error of this one is reported after the copy."""

PATIENCE = 1 / 3
"""Part of the other workers' timeout that a checkpoint waits for the copy of the one before it."""

_LOOK_SECONDS = 0.2  # between two looks at requests to stop

_CHECKPOINT = re.compile(rf"{CHECKPOINTS}/step-(\d{{8,}})\.safetensors")
_FILE = re.compile(r"\w[\w.-]*\.(yaml|json|jsonl|html|png|txt|csv)", re.ASCII)
_SCALARS = re.compile(rf"{TENSORBOARD}/events\.out\.tfevents\.[\w.-]+", re.ASCII)
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_NOT_COPIED = {OWNER, TRACE}

_TEXTS: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])
_LOG = logging.getLogger(__name__)

Stamp = tuple[int, int]
"""Size and time of change of a file: it is copied again if one differs."""


class Mirror:
    """Copies a run folder to an address in a thread; worker 0 only.

    It is a Tracker too: `record` runs in the thread of the run, and notes there what failed in that
    of the copies.
    """

    def __init__(
        self,
        folder: Path,
        address: Address,
        *,
        note: Callable[[str], object],
        stopped: Callable[[], bool] = lambda: False,
        patience: float = TIMEOUT_SECONDS * PATIENCE,
    ) -> None:
        self._folder = folder
        self._stopped = stopped
        self._patience = patience
        self._stop_time = math.inf
        self._begin = time.monotonic()
        self._bucket = _open_to_write(address)
        self._note = note
        self._identity = _identity(folder, address)
        self._copied: dict[str, Stamp] = {}
        self._there: set[str] = set()
        self._state = threading.Condition()
        self._requested = 0
        self._done = 0
        self._slow_copy = 0  # number of the last copy that was not waited for any more
        self._is_closing = False
        self._is_lost = False
        self._problems: list[str] = []
        self.failures = 0
        """Number of copies that failed."""

        self.copies = 0
        """Number of copies that were tried."""

        self._threads = [
            threading.Thread(target=target, name=f"mirror {target.__name__}", daemon=True)
            for target in (self._follow, self._renew)
        ]

    def start(self) -> None:
        """Own the address, and copy from now on.

        Raises CheckpointError if another machine writes there, or if the address cannot be written.
        """
        with _errors(self._bucket.address):
            require_unowned(self._bucket, self._folder)
            _write_owner(self._bucket, self._identity, 0)
            self._there = set(_run_objects(self._bucket))
        for thread in self._threads:
            thread.start()

    def checkpoint_written(self) -> None:
        """Copy the folder: a checkpoint is complete."""
        with self._state:
            self._requested += 1
            self._state.notify_all()

    def before_checkpoint(self) -> None:
        """Wait until what was requested is copied, or failed.

        Neither longer than the other workers have patience, once for each copy, nor after a request
        to stop: the checkpoint on the disk comes first.
        """
        end = time.monotonic() + self._patience
        while not self._is_copied(_LOOK_SECONDS):
            if self._time_of_stop() < math.inf or self._slow_copy == self.copies:
                return
            if time.monotonic() > end:
                self._slow_copy = self.copies
                with self._state:
                    self._problems.append(
                        f"mirror: copy {self.copies} takes longer than the time between two "
                        "checkpoints, which are written without waiting for it"
                    )

    def close(self, *, seconds: float | None) -> None:
        """Copy the end of the run, and give up the address.

        Waits at most for `seconds`, and until LAST_SECONDS after a request to stop.
        """
        self.checkpoint_written()
        end = math.inf if seconds is None else time.monotonic() + seconds
        is_complete = self._is_copied(0)
        while not is_complete and time.monotonic() < min(end, self._time_of_stop() + LAST_SECONDS):
            is_complete = self._is_copied(_LOOK_SECONDS)
        with self._state:
            self._is_closing = True
            self._state.notify_all()
        if is_complete and not self._is_lost:
            self._give_up_address()
        if not is_complete:
            self._problems.append("the last copy was not complete in the time that a stop leaves")
            self.failures += 1
        if self.failures:
            # The log of the run has ended.
            _LOG.warning(
                "%s: %s of %s failed: %s",
                self._bucket.address,
                self.failures,
                plural(self.copies, "copy", "copies"),
                "; ".join(self._problems[-1:]) or "see the notes in the log",
            )

    def _is_copied(self, seconds: float) -> bool:
        """Return True if all that was requested is copied, or failed, within `seconds`."""
        with self._state:
            return self._state.wait_for(lambda: self._done >= self._requested, seconds)

    def _time_of_stop(self) -> float:
        """Return the time of the request to stop, by the monotonic clock; infinity without one."""
        if StopRequests.latest > self._begin:
            self._stop_time = min(self._stop_time, StopRequests.latest)
        elif self._stopped():  # another worker was asked, or the time limit is near
            self._stop_time = min(self._stop_time, time.monotonic())
        return self._stop_time

    def _give_up_address(self) -> None:
        self._threads[-1].join(_LOOK_SECONDS)  # it may be renewing the object
        with suppress(OSError, LargebatchError):
            if self._owns():
                self._bucket.remove(OWNER)

    def record(self, _event: Event) -> None:
        """Note what failed since the last event; a method of Tracker."""
        with self._state:
            problems = self._problems
            self._problems = []
        for problem in problems:
            self._note(problem)

    def _follow(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._is_closing or self._requested > self._done)
                if self._is_closing:
                    return
                requested = self._requested
            if not self._is_lost:
                self._try_to_copy()
            with self._state:
                self._done = requested
                self._state.notify_all()

    def _try_to_copy(self) -> None:
        self.copies += 1
        try:
            # A machine that stood still for minutes would write over its successor's run.
            if self._owns():
                self._copy()
        # Whatever it is: a copy must not end the run.
        except Exception as error:
            self._fail(reason_of(error))

    def _fail(self, reason: str) -> None:
        with self._state:
            self.failures += 1
            self._problems.append(
                f"mirror: copy {self.copies} failed ({self.failures} so far): {reason}; the next "
                "one is after the next checkpoint"
            )

    def _owns(self) -> bool:
        """Return False, and stop copying, if another machine writes to the address now."""
        owner = _owner(self._bucket)
        if owner.get("identity", self._identity) == self._identity:
            return True
        with self._state:
            if not self._is_lost:
                self._is_lost = True
                self.failures += 1
                host = owner.get("host", "another machine")
                self._problems.append(f"mirror: {host} writes there now; this run is not copied")
        return False

    def _copy(self) -> None:
        """Copy what has changed: the newest checkpoint last, then remove what is not here."""
        files = _files(self._folder)
        for name, path in files.items():
            try:
                facts = path.stat()
            except FileNotFoundError:  # a newer checkpoint did not wait for this copy
                continue
            stamp = (facts.st_size, facts.st_mtime_ns)
            if self._copied.get(name) == stamp:
                continue
            self._bucket.write(name, path if _CHECKPOINT.fullmatch(name) else _content(path))
            self._copied[name] = stamp
            self._there.add(name)
        for name in sorted(self._there - files.keys()):
            with suppress(FileNotFoundError):
                self._bucket.remove(name)
            self._there.discard(name)
            self._copied.pop(name, None)

    def _renew(self) -> None:
        number = 0
        while True:
            with self._state:
                if self._state.wait_for(lambda: self._is_closing, BEAT_SECONDS):
                    return
            number += 1
            with suppress(OSError, LargebatchError):  # a copy will fail too, and be noted
                if not self._owns():
                    return
                _write_owner(self._bucket, self._identity, number)


@contextmanager
def mirrored(
    folder: Path,
    address: Address | None,
    *,
    note: Callable[[str], object],
    stopped: Callable[[], bool],
    timeout: float,
) -> Iterator[Mirror | None]:
    """Copy a run folder to `address`/NAME inside the block, and wait for the last copy at its end.

    `stopped` returns True if the run was requested to stop; its time is then short. After a second
    request nothing is waited for. Other workers wait for this one at most for `timeout` seconds.
    Raises as Mirror.start.
    """
    if address is None:
        yield None
        return
    mirror = Mirror(
        folder, copy_of(folder, address), note=note, stopped=stopped, patience=PATIENCE * timeout
    )
    mirror.start()
    try:
        yield mirror
    except KeyboardInterrupt:
        mirror.close(seconds=0)
        raise
    except BaseException:
        mirror.close(seconds=LAST_SECONDS if worker_rank() is None else FAILED_SECONDS)
        raise
    mirror.close(seconds=None)


def bring_up_to_date(folder: Path, address: Address, *, resume: bool) -> None:
    """Copy a run from its address to its folder, if the address has a newer checkpoint.

    Without `resume` an address that has a run is refused, as a folder is. Raises CheckpointError if
    another machine writes there, or if the address cannot be reached: a run that cannot see its
    copy would start again from nothing.
    """
    bucket = _open_to_write(address)
    with _errors(bucket.address):
        require_unowned(bucket, folder)
        objects = _run_objects(bucket)
        if RECIPE in objects and not resume:
            raise CheckpointError(
                f"{address}: already holds a run; choose another --out, or add --resume"
            )
        local = _files(folder) if folder.is_dir() else {}
        if RECIPE in objects and RECIPE in local and _token(folder).get("address") != str(address):
            raise CheckpointError(
                f"{folder}: holds a run that was not copied to {address}, which holds one too; "
                "choose another --out, or remove one of them"
            )
        # A copy that was interrupted has no recipe yet.
        is_part = RECIPE in objects and RECIPE not in local and _newest(objects) >= 0
        if is_part or _newest(objects) > _newest(local):
            require_unlocked(folder / LOG)
            _LOG.warning("%s: copying the run from %s", folder, address)
            _fetch(bucket, objects, folder)
            with writing(folder):
                _identity(folder, address)
        token = _token(folder)
        if token.get("address") == str(address) and _owner(bucket):
            # Its writer is dead, and need not be watched again when the run begins.
            _write_owner(bucket, token["identity"], 0)


def local_run(place: Place) -> Path:
    """Return a run folder; of an address a copy of it in the cache, with the newest checkpoint.

    What the cache has and the address has not changed is not read again. Raises CheckpointError if
    there is no run or the address cannot be reached.
    """
    if isinstance(place, Path):
        return place
    bucket = _open(place)
    key = hashlib.sha256(str(place).encode()).hexdigest()[:16]
    folder = user_cache() / "runs" / key / place.name
    versions_path = folder.parent / "versions.json"
    with _errors(place):
        objects = _run_objects(bucket)
    if RECIPE not in objects:
        raise CheckpointError(f"{place}: holds no run; expected {RECIPE} and {CHECKPOINTS} there")
    checkpoints = [name for name in objects if _CHECKPOINT.fullmatch(name)]
    needed = {
        name: facts
        for name, facts in objects.items()
        if name not in checkpoints or name == max(checkpoints, key=_step)
    }
    versions: dict[str, str] = {}
    with suppress(OSError, ValidationError):
        versions = _TEXTS.validate_json(versions_path.read_bytes())
    changed = {
        name: facts
        for name, facts in needed.items()
        if versions.get(name) != facts.version or not (folder / name).is_file()
    }
    _fetch(bucket, changed, folder)
    with writing(folder):
        for name in _files(folder).keys() - needed.keys():
            (folder / name).unlink(missing_ok=True)
        now = {name: facts.version for name, facts in needed.items()}
        write_whole(versions_path, json.dumps(now).encode())
    return folder


def copy_of(folder: Path, address: Address) -> Address:
    """Return the address of the copy of a run folder below `address`.

    Raises CheckpointError for a name that addresses write in another way.
    """
    name = folder.absolute().name
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"--out {folder}: its name becomes a part of an address; give one of letters, digits, "
            ". _ and -, or leave --mirror out"
        )
    return address / name


def fetch_run(address: Address) -> tuple[Path, Address]:
    """Copy a run from its address to runs/NAME; return this folder, and the address above.

    A folder of that name which is as new is left as it is. Raises CheckpointError as
    `bring_up_to_date`, if the address holds no run, and under a launcher, whose workers would all
    write to the folder.
    """
    above, _, name = address.url.rpartition("/")
    if not re.search(r"://.", above) or not _NAME.fullmatch(name):
        raise CheckpointError(f"{address}: expected the address of a run: s3://bucket/runs/NAME")
    if worker_rank() is not None:
        raise CheckpointError(
            f"resume {address}: a launcher started this worker; start the workers with: train "
            f"RECIPE --out runs/{name} --mirror {above} --resume auto"
        )
    folder = Path("runs", name)
    bring_up_to_date(folder, address, resume=True)
    if not folder.is_dir():
        raise CheckpointError(f"{address}: holds no run with a checkpoint to resume")
    return folder, Address(above)


def require_unowned(bucket: Bucket, folder: Path) -> None:
    """Raise CheckpointError if another machine writes to an address.

    A machine that died leaves its OWNER there. It is told from one that lives by watching for
    SILENT_SECONDS, because clocks of machines differ; the same run folder need not wait.
    """
    owner = _owner(bucket)
    if not owner or owner.get("identity") == _token(folder).get("identity"):
        return
    host = owner.get("host", "an unknown host")
    _LOG.warning(
        "%s: its last writer, on %s, has not ended it; watching for %g s whether it still writes",
        bucket.address, host, SILENT_SECONDS,
    )  # fmt: skip
    end = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < end:
        time.sleep(min(5.0, SILENT_SECONDS / 10))
        following = _owner(bucket)
        if not following:
            return
        if following != owner:
            raise CheckpointError(
                f"{bucket.address}: another machine ({host}) is writing to it; wait for its end or "
                "choose another --out"
            )


def _owner(bucket: Bucket) -> Mapping[str, str]:
    """Return what OWNER has; empty without one."""
    with suppress(FileNotFoundError, ValidationError):
        return _TEXTS.validate_json(bucket.read(OWNER))
    return {}


def _write_owner(bucket: Bucket, identity: str, number: int) -> None:
    owner = {"identity": identity, "host": socket.gethostname(), "beat": str(number)}
    bucket.write(OWNER, json.dumps(owner).encode())


def _identity(folder: Path, address: Address) -> str:
    """Return the identity of a run folder at an address, which it keeps for later starts."""
    known = _token(folder)
    if known.get("address") == str(address):
        return known["identity"]
    identity = uuid.uuid4().hex
    write_whole(
        folder / TOKEN, json.dumps({"address": str(address), "identity": identity}).encode()
    )
    return identity


def _token(folder: Path) -> Mapping[str, str]:
    """Return the content of TOKEN; empty without one."""
    with suppress(OSError, ValidationError):
        token = _TEXTS.validate_json((folder / TOKEN).read_bytes())
        return token if token.keys() >= {"address", "identity"} else {}
    return {}


def _open(address: Address) -> Bucket:
    if address.scheme in WEB:
        raise CheckpointError(
            f"{address}: a web server does not list its objects; give an address such as "
            "s3://bucket/runs"
        )
    with _errors(address):
        return open_bucket(address)


def _open_to_write(address: Address) -> Bucket:
    if address.scheme == "file":  # of the library this is a folder that exists
        with writing(address.folder, hint="choose another --mirror"):
            address.folder.mkdir(parents=True, exist_ok=True)
    return _open(address)


@contextmanager
def _errors(address: Address) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{address}: there is no such bucket or folder") from None
    except OSError as error:
        text = reason_of(error)
        where = "" if str(address) in text else f"{address}: "
        raise CheckpointError(
            f"{where}{text}; check the address, the network and the credentials"
        ) from None


def _run_objects(bucket: Bucket) -> dict[str, Object]:
    """Return the objects of a run by name; others below its address are not ours."""
    return {facts.name: facts for facts in bucket.objects("") if _is_of_run(facts.name)}


def _is_of_run(name: str) -> bool:
    # The names come from storage: none may lead out of the run folder.
    is_file = _FILE.fullmatch(name) and name not in _NOT_COPIED
    return bool(is_file or _CHECKPOINT.fullmatch(name) or _SCALARS.fullmatch(name))


def _files(folder: Path) -> dict[str, Path]:
    """Return the files to copy by name, in the order in which they are copied.

    A log without its last lines would miss updates before the checkpoint, and one with its end
    belongs to a summary: so the log comes after all other files, and checkpoints after the log.
    """
    order = {SUMMARY: 1, LOG: 2}
    names = [path.name for path in folder.iterdir() if path.is_file() and _is_of_run(path.name)]
    # What these lack of the log is added to them when the run continues.
    scalars = (f"{TENSORBOARD}/{path.name}" for path in (folder / TENSORBOARD).glob("events.*"))
    names += filter(_SCALARS.fullmatch, scalars)
    names.sort(key=lambda name: (order.get(name, 0), name))
    checkpoints = (f"{CHECKPOINTS}/{path.name}" for path in (folder / CHECKPOINTS).glob("step-*"))
    names += sorted(filter(_CHECKPOINT.fullmatch, checkpoints), key=_step)
    return {name: folder / name for name in names}


def _content(path: Path) -> bytes:
    """Return the content of a file; of the log without a line that is being written."""
    content = path.read_bytes()
    if path.name == LOG:
        return content[: content.rfind(b"\n") + 1]
    return content


def _fetch(bucket: Bucket, objects: Mapping[str, Object], folder: Path) -> None:
    """Copy objects to a folder: checkpoints after the log, and the recipe last.

    A folder with a recipe holds a run, and one with the newest checkpoint is not copied again.
    """

    def place(name: str) -> tuple[bool, bool, str]:
        return name == RECIPE, _CHECKPOINT.fullmatch(name) is not None, name

    for name in sorted(objects, key=place):
        # Not one block: a lost connection is no full disk.
        with _errors(bucket.address):
            content = bucket.read(name)
        with writing(folder):
            write_whole(folder / name, content)


def _step(name: str) -> int:
    found = _CHECKPOINT.fullmatch(name)
    assert found is not None
    return int(found[1])


def _newest(names: Mapping[str, object]) -> int:
    """Return the number of updates before the newest checkpoint; -1 without one."""
    return max((_step(name) for name in names if _CHECKPOINT.fullmatch(name)), default=-1)
