"""Logs of other programs -> records: CSV, the Trainer's JSON, TensorBoard's event files.

Columns are found by their usual names: timm's summary.csv, Lightning's metrics.csv, the
trainer_state.json of transformers, and scalars of TensorBoard. A column that is not found is not
known, and is not guessed from others.
"""

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from largebatch.errors import CheckpointError, shorten
from largebatch.optional import require_tensorboard
from largebatch.report.record import Record, bounded, record_of
from largebatch.report.run import FloatArray, read_run
from largebatch.tracking.events import LOG

Row = Mapping[str, float]

NAMES = {
    "step": "step global_step steps iteration iter update updates num_updates",
    "epoch": "epoch epochs train_epoch",
    "loss": "train_loss loss training_loss loss_train train_loss_epoch train_loss_step",
    "val_loss": "val_loss eval_loss valid_loss validation_loss test_loss loss_val val_loss_epoch "
    "loss_valid loss_validation loss_test",
    "top1": "val_top1 eval_top1 val_acc1 eval_acc1 val_acc val_accuracy valid_acc valid_accuracy "
    "validation_accuracy eval_acc eval_accuracy test_acc test_acc1 test_accuracy test_top1 top1 "
    "acc1 acc accuracy accuracy_val accuracy_test acc_val acc_test",
    "lr": "train_lr lr learning_rate train_learning_rate",
}
"""Usual names of each column, the likeliest first, in lower case and with _ for other signs."""

FILES = ("metrics.csv", "summary.csv", "trainer_state.json")
"""Logs that are looked for in a folder."""

EVENTS = "events.out.tfevents"
"""Part of the names of TensorBoard's files."""


def read_record(path: Path, *, classes: int | None = None) -> Record:
    """Read a run folder, or the log of another program in a file or folder.

    `classes` is the number of classes, which other programs do not log. Raises CheckpointError if
    there is no log or it has no training loss, MissingPackageError for event files without
    TensorBoard.
    """
    file = find_log(path)
    if file.name == LOG:
        return record_of(read_run(file.parent))
    try:
        rows = list(_rows(file))
    except UnicodeDecodeError:
        raise CheckpointError(
            f"{file}: cannot be read as a log: is not text; expected a CSV with commas"
        ) from None
    except (OSError, ValueError, csv.Error) as error:
        raise CheckpointError(f"{file}: cannot be read as a log: {error}") from None
    return record_of_rows(rows, name=str(path), classes=classes)


def find_log(path: Path) -> Path:
    """Return the log in a folder, or the file itself; raise CheckpointError without one."""
    if path.is_file():
        return path
    if not path.exists():
        raise CheckpointError(f"{path}: not found; expected a run folder or a log")
    for name in (LOG, *FILES):
        if (path / name).exists():
            return path / name
    if any(path.rglob(f"*{EVENTS}*")):
        return path
    raise CheckpointError(
        f"{path}: holds no log of a run; expected {LOG}, {', '.join(FILES)} or TensorBoard's event "
        "files"
    )


def _rows(path: Path) -> Iterator[Row]:
    """Yield the numbers of each row, by column."""
    if path.is_dir() or EVENTS in path.name:
        yield from _read_events(path)
    elif path.suffix == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        history = content.get("log_history") if isinstance(content, dict) else content
        if not isinstance(history, list):
            raise ValueError("expected the list log_history, as in trainer_state.json")
        yield from (_numbers(entry) for entry in history if isinstance(entry, dict))
    else:
        with path.open(encoding="utf-8", newline="") as file:
            table = csv.DictReader(file)
            if len(table.fieldnames or ()) == 1 and ";" in (table.fieldnames or ("",))[0]:
                raise ValueError("expected commas between columns, found semicolons")
            rows = [_numbers(row) for row in table]
        if not rows:
            raise ValueError("has no rows")
        yield from rows


def _numbers(row: Mapping[Any, Any]) -> Row:
    """Return the numbers of a row, without empty cells and texts."""
    values = ((_plain(name), _float(text)) for name, text in row.items())
    return {name: value for name, value in values if value is not None}


def _float(text: object) -> float | None:
    try:
        return float(text)  # type: ignore[arg-type]  # a TypeError is caught
    except (TypeError, ValueError):
        return None


def _plain(name: object) -> str:
    """Return the name of a column in lower case, with _ for other signs.

    >>> _plain("Loss/train"), _plain("lr-SGD/pg1")
    ('loss_train', 'lr_sgd_pg1')
    """
    return re.sub(r"[^a-z0-9]+", "_", str(name).lower()).strip("_")


def _read_events(path: Path) -> Iterator[Row]:
    """Yield a row for each scalar of TensorBoard's event files, in the order of steps."""
    require_tensorboard()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = [path] if path.is_file() else sorted(path.rglob(f"*{EVENTS}*"))
    rows: dict[int, dict[str, float]] = {}
    folders: dict[str, Path] = {}
    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            if folders.setdefault(tag, file.parent) != file.parent:
                raise ValueError(
                    f"{tag} is in {folders[tag]} and in {file.parent}; give one of the folders"
                )
            for event in events.Scalars(tag):
                rows.setdefault(event.step, {"step": event.step})[_plain(tag)] = event.value
    yield from (rows[step] for step in sorted(rows))


def record_of_rows(rows: Iterable[Row], *, name: str, classes: int | None) -> Record:
    """Return the record of rows with the usual names; raise CheckpointError without losses."""
    table = list(rows)
    found = {kind: _column(kind, table) for kind in NAMES}
    if found["loss"] is None:
        columns = dict.fromkeys(key for row in table for key in row)
        raise CheckpointError(
            f"{name}: has no training loss; expected a column such as train_loss or loss, found "
            f"{shorten(list(columns))}"
        )
    training = [row for row in table if found["loss"] in row]
    measured = [row for row in table if found["val_loss"] in row or found["top1"] in row]
    epoch, top1 = found["epoch"], _values(measured, found["top1"])
    percents = np.nanmax(top1, initial=0.0) > 1 or _is_timms(found["top1"], table)
    step, epochs = (_values(training, found[kind]) for kind in ("step", "epoch"))
    first_step, first_epoch = _first(step), _first(epochs)
    per_epoch = len({row.get(epoch or "") for row in training}) == len(training)
    return Record(
        name=name,
        step=step + 1 - first_step,
        first_step=first_step,
        epoch=epochs + 1 - first_epoch,
        first_epoch=first_epoch,
        loss=_values(training, found["loss"]),
        lr=_filled(_values(training, found["lr"]), table, found["lr"]),
        by_update=not (epoch and per_epoch and not _fractional(training, epoch)),
        val_epoch=_values(measured, epoch) + 1 - first_epoch,
        val_loss=_losses(measured, found["val_loss"]),
        top1=top1 / 100 if percents else top1,
        classes=classes,
    )


def _column(kind: str, rows: list[Row]) -> str | None:
    """Return the column of a kind, of several the one with the most rows.

    Rates of an optimizer, such as lr_sgd, count as lr.
    """
    known = Counter(key for row in rows for key in row)
    usual = [name for name in NAMES[kind].split() if name in known]
    if not usual and kind == "lr":
        usual = [key for key in known if key.startswith("lr_")]
    return max(usual, key=lambda name: known[name], default=None)


def _is_timms(top1: str | None, rows: list[Row]) -> bool:
    """Return True for timm's summary.csv, whose accuracies are per cent, however low."""
    return top1 == "eval_top1" and any("eval_top5" in row for row in rows)


def _values(rows: list[Row], name: str | None) -> FloatArray:
    """Return a column, NaN where a row has no value."""
    return np.array([row.get(name or "", math.nan) for row in rows], dtype=np.float64)


def _losses(rows: list[Row], name: str | None) -> FloatArray:
    """Return a column of losses, NaN where a row has no value and infinite where it has NaN."""
    known = np.array([name in row for row in rows], dtype=bool)
    return np.where(known, bounded(_values(rows, name)), math.nan)


def _first(counter: FloatArray) -> int:
    """Return the number of the first update or epoch: 0 if it begins at 0, as timm's epochs."""
    known = counter[np.isfinite(counter)]
    return 0 if known.size and known[0] == 0 and not (known % 1).any() else 1


def _filled(rates: FloatArray, rows: list[Row], name: str | None) -> FloatArray:
    """Return the rates; where the rows of the loss have none, those of other rows in their place.

    Lightning writes rates in rows of their own.
    """
    alone = _values([row for row in rows if name in row], name)
    if np.isfinite(rates).any() or not alone.size or not rates.size:
        return rates
    places = np.linspace(0, alone.size - 1, rates.size).round().astype(int)
    return np.asarray(alone[places], dtype=np.float64)


def _fractional(rows: list[Row], epoch: str) -> bool:
    """Return True if epochs have fractions, as in logs by update."""
    return any(row.get(epoch, 0.0) % 1 for row in rows)
