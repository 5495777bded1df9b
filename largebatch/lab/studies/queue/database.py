"""The policy database: an Optuna storage that many processes and machines fill at once.

For every cell it holds two Optuna studies, the search (trials on held-out images) and the seeds
(runs at the best rate). Both are queues with a fixed number of slots, each of which is done once. A
slot is a waiting Optuna trial; `ask` gives it to one process. If that process ends without a
result, the trial is failed and the slot is enqueued again, to resume in its run folder.

Only Optuna's own records are used, so the count stays exact however many processes see the same
gap at once: of two trials of one slot the one with the lower number counts, and a trial that
`ask` makes because another process took the last waiting one has no slot and is released.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from largebatch.errors import LONGEST_NAME, StudyError, clip, shorten
from largebatch.lab.studies.queue.owners import OWNER, Owners
from largebatch.optional import require_optuna
from largebatch.recipe.loading import differences

if TYPE_CHECKING:
    import optuna
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage, RDBStorage
    from optuna.trial import FrozenTrial

FORMAT = 2
"""Version of the attributes of studies and trials; other versions are refused."""

JOURNAL = ".journal"
"""File name suffix of Optuna's journal storage, which works on a network file system."""

DEFINITION, SLOT, RESULT = "definition", "slot", "result"
"""Names of attributes: the first one of studies, the others of trials."""

KINDS = ("policy", "setting")
"""Key of a definition that names what a study compares."""

_MADE_BY = (
    "`largebatch lr bench` and `largebatch bench` make one, by default study.db in their --out"
)

_BUSY_SECONDS = 120
"""Seconds that a process waits for others that write to the same SQLite file."""

Json = Mapping[str, Any]


@contextmanager
def open_storage(url: str, *, only_read: bool = False) -> "Iterator[BaseStorage]":
    """Yield the storage at an SQL URL, or in a file whose name ends with .journal.

    Raises StudyError for a missing storage of this version, for another program's file, and for
    later failures; with `only_read`, also for a database without Optuna's tables, which are
    created otherwise.
    """
    require_optuna()
    import optuna
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield _connect(url, only_read=only_read)
    except (SQLAlchemyError, StorageInternalError, json.JSONDecodeError) as error:
        raise _unusable(url, error) from None


def _unusable(url: str, error: Exception) -> StudyError:
    cause = error.__cause__ or error
    reason = clip(" ".join(str(getattr(cause, "orig", cause)).split()), 2 * LONGEST_NAME)
    return StudyError(
        f"{shown(url)}: cannot be used: {reason}; a file that is damaged or no "
        "database is not changed: give another --storage, or put a copy in its place"
    )


@contextmanager
def open_existing(url: str) -> "Iterator[BaseStorage]":
    """Yield an existing storage as open_storage does, without creating files or tables.

    Raises StudyError if there is none.
    """
    require_optuna()
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    file: str | None = url if url.endswith(JOURNAL) else None
    with suppress(ArgumentError):  # of no URL: open_storage's message
        parsed = make_url(url)
        file = parsed.database if parsed.get_backend_name() == "sqlite" else file
    if file is not None and not Path(file).is_file():
        raise StudyError(f"{shown(url)}: no such file; {_MADE_BY}")
    with open_storage(url, only_read=True) as storage:
        yield storage


def _connect(url: str, *, only_read: bool) -> "BaseStorage":
    from sqlalchemy.engine import make_url

    try:
        if url.endswith(JOURNAL):
            return _replay(url)
        is_sqlite = make_url(url).get_backend_name() == "sqlite"
        arguments = {"timeout": _BUSY_SECONDS} if is_sqlite else {}
        if is_sqlite or only_read:
            _require_own_tables(url, arguments, only_read=only_read)
        storage = _open_tables(url, arguments)
    except ModuleNotFoundError as error:
        raise StudyError(f"{shown(url)}: needs the package {error.name}") from None
    except OSError as error:
        raise StudyError(f"{shown(url)}: {error.strerror}") from None
    except RuntimeError as error:  # Optuna's, of a schema that another version of it made
        reason = " ".join(str(error).split())
        raise StudyError(f"{shown(url)}: is of another version: {reason}") from None
    if is_sqlite:
        _write_one_at_a_time(storage)
    return storage


def _replay(journal: str) -> "BaseStorage":
    """Open a journal; Optuna replays its lines and logs damaged ones."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    try:
        return JournalStorage(JournalFileBackend(journal))
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        problem = ValueError(f"one of its lines is no record of Optuna ({type(error).__name__})")
        raise _unusable(journal, problem) from None


def _require_own_tables(url: str, arguments: dict[str, Any], *, only_read: bool) -> None:
    """Raise StudyError if a database has tables and none of Optuna's.

    With `only_read`, also if any of Optuna's tables is missing. Otherwise some may be missing,
    because another process is creating them: the first are `studies` and `version_info`.
    """
    from sqlalchemy import create_engine, inspect
    from sqlalchemy.pool import NullPool

    engine = create_engine(url, poolclass=NullPool, connect_args=arguments)
    with engine.connect() as connection:
        inspector = inspect(connection)
        tables = inspector.get_table_names()
        if "version_info" in tables and ("trials" in tables or not only_read):
            return
        columns = inspector.get_columns("studies") if "studies" in tables else []
    if only_read:
        raise StudyError(f"{shown(url)}: holds no studies, and is left as it is; {_MADE_BY}")
    if tables and "study_name" not in {column["name"] for column in columns}:
        raise StudyError(
            f"{shown(url)}: holds tables of another program ({shorten(tables)}), and is left as it "
            "is: give another --storage"
        )


def _open_tables(url: str, arguments: dict[str, Any]) -> "RDBStorage":
    """Connect; retry if another process creates the same tables at this moment."""
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import DBAPIError, IntegrityError

    for left in reversed(range(5)):
        try:
            return RDBStorage(url, engine_kwargs={"connect_args": arguments})
        except DBAPIError as error:
            made_elsewhere = isinstance(error, IntegrityError) or "already exists" in str(error)
            if not left or not made_elsewhere:
                raise
            time.sleep(0.2)
    raise AssertionError


def _write_one_at_a_time(storage: "RDBStorage") -> None:
    """Lock an SQLite file from the start of every transaction.

    SQLite has no SELECT ... FOR UPDATE, by which Optuna gives a waiting trial to one process:
    two that read before either writes would both get it.
    """
    from sqlalchemy import event

    @event.listens_for(storage.engine, "connect")
    def _(connection: Any, _: object) -> None:  # noqa: ANN401 -- sqlite3's
        connection.isolation_level = None  # sqlite3 itself begins none

    @event.listens_for(storage.engine, "begin")
    def _(connection: Any) -> None:  # noqa: ANN401 -- SQLAlchemy's
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    storage.engine.dispose()  # connections that were made before


def shown(url: str) -> str:
    """Return a URL without its password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return url if url.endswith(JOURNAL) else make_url(url).render_as_string()
    except ArgumentError:
        return clip(url, LONGEST_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One run of a queue."""

    name: str
    """Unique name in the queue; also names the run folder."""

    fixed: Mapping[str, float] = field(default_factory=dict)
    """Fixed values of searched keys; the others are drawn."""

    about: Mapping[str, float] = field(default_factory=dict)
    """Other facts about the run: its seed."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A slot claimed by this process."""

    slot: str
    trial: "optuna.Trial"


class Queue:
    """The slots of one Optuna study."""

    def __init__(
        self,
        storage: "BaseStorage",
        name: str,
        definition: Json,
        slots: Sequence[Slot],
        *,
        sampler: "Callable[[int], BaseSampler] | None" = None,
    ) -> None:
        """Open the queue of this name, or create it.

        `sampler` makes the sampler of a trial from the number of earlier trials. Raises
        StudyError if the queue was created for another definition or in another format.
        """
        import optuna

        self.name, self.slots = name, {slot.name: slot for slot in slots}
        self._sampler = sampler
        self._all_done: dict[str, FrozenTrial] | None = None
        self.study = optuna.create_study(
            storage=storage,
            study_name=name,
            direction="maximize",
            load_if_exists=True,
            pruner=optuna.pruners.NopPruner(),
        )
        _require_same(self.study, {"format": FORMAT, **definition})

    def trials(self) -> "dict[str, FrozenTrial]":
        """Return the valid trial of every slot that has one."""
        trials = trials_by_slot(self.study)
        return {slot: trial for slot, trial in trials.items() if slot in self.slots}

    def done(self) -> "dict[str, FrozenTrial]":
        """Return the trials with a result."""
        if self._all_done is not None:
            return self._all_done
        finished = {name: one for name, one in self.trials().items() if one.state.is_finished()}
        if len(finished) == len(self.slots):
            self._all_done = finished
        return finished

    @property
    def is_done(self) -> bool:
        """True if every slot has its result."""
        return len(self.done()) == len(self.slots)

    @property
    def num_begun(self) -> int:
        """Number of slots that have a result or are running."""
        if self.is_done:
            return len(self.slots)
        return sum(trial.state.name != "WAITING" for trial in self.trials().values())

    def claim(self, owners: Owners) -> Claim | None:
        """Claim a free slot; return None if there is none."""
        if self.is_done:
            return None
        self._release(owners)
        self._enqueue_missing()
        while any(trial.state.name == "WAITING" for trial in self.trials().values()):
            if self._sampler is not None:  # before it asks: then values are drawn together
                before = [one.state.name != "WAITING" for one in self.study.get_trials()]
                self.study.sampler = self._sampler(sum(before))
            trial = self.study.ask()
            slot = trial.user_attrs.get(SLOT)
            counts = self.trials().get(slot) if slot else None
            if slot and counts is not None and counts.number == trial.number:
                trial.set_user_attr(OWNER, owners.own(beat=0))
                return Claim(slot, trial)
            self.tell(trial.number, state="FAIL")
        return None

    def give_back(self, claim: Claim) -> None:
        """Release a slot, for this process or another to resume."""
        self.tell(claim.trial.number, state="FAIL")
        self._enqueue_missing()

    def finish(self, claim: Claim, result: Json, *, value: float) -> None:
        """Record the result of a slot, and the value to maximize."""
        claim.trial.set_user_attr(RESULT, result)
        self.tell(claim.trial.number, state="COMPLETE", value=value)

    def tell(self, number: int, *, state: str, value: float | None = None) -> None:
        """End a trial, unless another process has ended it."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        if not self.study.get_trials(deepcopy=False)[number].state.is_finished():
            with suppress(UpdateFinishedTrialError):
                self.study.tell(number, value, TrialState[state])

    def _release(self, owners: Owners) -> None:
        """Fail the trials of processes that are gone."""
        for trial in self.study.get_trials(deepcopy=False):
            is_running = trial.state.name == "RUNNING"
            if is_running and owners.is_gone((self.name, trial.number), trial.user_attrs):
                self.tell(trial.number, state="FAIL")

    def _enqueue_missing(self) -> None:
        """Enqueue every slot without a trial; a failed one keeps its values."""
        present = self.trials()
        missing = [slot for name, slot in self.slots.items() if name not in present]
        if not missing:
            return
        before = self.study.get_trials(deepcopy=False)
        had = {trial.user_attrs.get(SLOT): trial.params for trial in before if trial.params}
        for slot in missing:
            fixed = {**slot.fixed, **had.get(slot.name, {})}
            self.study.enqueue_trial(fixed, user_attrs={SLOT: slot.name, **slot.about})


def trials_by_slot(study: "optuna.Study") -> "dict[str, FrozenTrial]":
    """Return the valid trial of every slot that has one: of several the one that came first."""
    trials: dict[str, FrozenTrial] = {}
    for trial in study.get_trials(deepcopy=False):
        slot = trial.user_attrs.get(SLOT)
        if isinstance(slot, str) and trial.state.name != "FAIL":
            trials.setdefault(slot, trial)
    return trials


def _require_same(study: "optuna.Study", definition: Json) -> None:
    """Record the definition of a queue; raise StudyError if it has another one."""
    is_empty = not study.get_trials(deepcopy=False)  # read first: trials come after the definition
    there = study.user_attrs.get(DEFINITION)
    here = json.loads(json.dumps(definition))
    if there is None and is_empty:
        study.set_user_attr(DEFINITION, here)
        return
    require_format(study.study_name, there)
    if there != here:
        where, old, new = next(differences(there, here))
        raise StudyError(
            f"{study.study_name}: the database holds another study of this name: {where} is "
            f"{clip(json.dumps(old), LONGEST_NAME)} there and {clip(json.dumps(new), LONGEST_NAME)}"
            " here; give this one another name, or another --storage"
        )


def require_kind(storage: "BaseStorage", name: str, kind: str) -> None:
    """Raise StudyError if the storage holds a study of this name that compares something else."""
    import optuna

    for each in optuna.get_all_study_names(storage):
        if not each.startswith(f"{name}/"):
            continue
        there = optuna.load_study(study_name=each, storage=storage).user_attrs.get(DEFINITION)
        if isinstance(there, dict) and there.get("study") == name and kind not in there:
            found = next((one for one in KINDS if one in there), "something else")
            raise StudyError(
                f"{name}: the database holds another study of this name: it compares every "
                f"{found}, and this one every {kind}; give this one another name, or another "
                "--storage"
            )


def require_format(name: str, definition: object) -> None:
    """Raise StudyError if the study of this name has another format."""
    number = definition.get("format") if isinstance(definition, dict) else None
    if number != FORMAT:
        written = "no format" if number is None else f"format {number}"
        raise StudyError(
            f"{name}: the database holds a study of this name with {written}, expected {FORMAT}: "
            "another program or version wrote it; give another --storage"
        )
