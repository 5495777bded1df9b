"""Logs of other programs -> records: CSV, JSON, JSON lines, TensorBoard's event files.

A column means what its name says: training or validation, and which metric. Where the name alone
does not show that, as of Keras's `accuracy`, the names and cells beside it do; the number of its
cells never does. A column that is not known is not guessed from others.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from largebatch.errors import CheckpointError, shorten
from largebatch.formatting import plural
from largebatch.optional import require_tensorboard
from largebatch.report.record import Record, record_of
from largebatch.report.run import FloatArray, read_run
from largebatch.tracking.events import LOG

Row = dict[str, float]
"""The numbers of a row by column: without blank cells and texts, NaN where the log has NaN."""

SPLITS = {
    "train": "train training trn tr",
    "val": "val valid validation eval evaluation dev",
    "test": "test testing",
}
"""Words in names for training, validation and, where a log has no validation, test."""

LOSS, VAL_LOSS, TOP1, LR = "training loss", "validation loss", "top-1", "learning rate"
NORM, STEP, EPOCH = "norm of gradients", "number of the update", "number of the epoch"
HEADER = "header_of_a_csv"
"""Keys of the columns that are read, once they are found, and of rows that stand for a header."""

COUNTERS = {
    STEP: "global_step trainer_global_step train_global_step step steps iteration iter update "
    "updates num_updates",
    EPOCH: "epoch epochs train_epoch",
}
"""Usual names of the counters, the likeliest first, in lower case and with _ for other signs."""

METRICS = {
    "loss": r"loss|(ce|nll|xent|cross_entropy)(_loss)?",
    "top1": r"((multiclass|categorical|sparse_categorical)_)?(acc|accuracy|prec)(_?(at_?|top_?)?1)?"
    r"|top_?1(_acc|_accuracy)?",
    "lr": r"(base_|optimizer_|opt_)?(lr|learning_rate)(?!.*(momentum|decay))(_.*)?",
    "grad_norm": "grad(ient)?_norm",
}
"""Names of each metric, without the words of `SPLITS` and `PLAIN`."""

PLAIN = "epoch step batch avg average mean total running metric metrics global percent pct"
"""Words in names that do not change which metric it is."""

GROUPS = {"mode", "split", "phase", "set", "subset", "stage", "type"}
"""Columns of text that name the split of a row, as mmcv's `mode`."""

FITTED = 0.01
"""Highest training loss before one that is 0 by rounding, because the run fits its data."""

FILES = (
    *("metrics.csv", "summary.csv", "results.csv", "history.csv", "trainer_state.json"),
    *("log.txt", "metrics.json", "scalars.json"),
)
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
    if is_of_run(file):
        return record_of(read_run(file.parent))
    try:
        return _record_of_rows(list(_rows(file)), name=str(path), classes=classes)
    except UnicodeDecodeError:
        raise CheckpointError(
            f"{file}: cannot be read as a log: is not text; expected a CSV with commas"
        ) from None
    except (OSError, ValueError, csv.Error) as error:
        raise CheckpointError(f"{file}: cannot be read as a log: {error}") from None


def is_of_run(log: Path) -> bool:
    """Return True for the log of a run folder, False for another program's of the same name."""
    if log.name != LOG or log.is_dir():
        return False
    with log.open("rb") as file:
        start = file.read(1000)
    return not start.startswith(b"{") or b'"event"' in start


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
    if path.is_dir() or EVENTS in path.name:
        yield from _read_events(path)
        return
    text = path.read_text(encoding="utf-8-sig")
    found = _read_json(text) if text.lstrip()[:1] in {"{", "["} else _read_csv(text, path)
    yield from filter(None, map(_numbers, found))


def _read_json(text: str) -> Iterator[Mapping[Any, Any]]:
    """Yield the objects of JSON, JSON lines, or the log_history of transformers' Trainer."""
    decoder, place = json.JSONDecoder(), 0
    while begin := re.compile(r"[\s,]*(?=\S)").match(text, place):
        try:
            content, place = decoder.raw_decode(text, begin.end())
        except json.JSONDecodeError as error:
            if place and "\n" not in text[begin.end() :].rstrip():
                return  # a killed program leaves its last line incomplete
            line = text.count("\n", 0, begin.end()) + 1
            raise ValueError(f"line {line} is not JSON: {error.msg}") from None
        entries = content.get("log_history", [content]) if isinstance(content, dict) else content
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict):
                nested = [(k, below) for k, below in entry.items() if isinstance(below, dict)]
                yield entry | {f"{k}/{n}": v for k, below in nested for n, v in below.items()}


def _read_csv(text: str, path: Path) -> Iterator[Mapping[Any, Any]]:
    """Yield the cells of each row by column; raise ValueError for a row that has more of them."""
    lines = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    header: list[str] = []
    empty = True
    for line in lines:
        cells = [cell.strip() for cell in line]
        if not header or (all(_float(it) is None for it in cells) and any(map(_is_known, cells))):
            _check_header(cells, header, f"line {lines.line_num}")
            header = _exported(cells, path)
            yield {HEADER: 1}
        elif any(cells[len(header) :]):
            raise ValueError(
                f"line {lines.line_num} has {len(cells)} cells, the header {len(header)}; write "
                "the header of such rows above them, or remove them"
            )
        elif len(cells) >= len(header) or lines.line_num <= text.count("\n"):
            empty = False
            yield dict(zip(header, cells, strict=False))
    if empty:
        raise ValueError("has no rows")


def _check_header(header: list[str], before: list[str], line: str) -> None:
    """Raise ValueError unless a header has commas, each name once, and what is read of the last."""
    if len(header) == 1 and (sign := re.search("[;\t]", header[0])):
        words = {";": "semicolons", "\t": "tabs"}[sign[0]]
        raise ValueError(f"expected commas between columns, found {words}")
    if twice := [name for name in header if name and header.count(name) > 1]:
        raise ValueError(f"{line} names {twice[0]} twice")
    if lacks := [name for name in filter(_is_known, before) if name not in header]:
        raise ValueError(f"{line}, another header, is without {lacks[0]}")


def _exported(header: list[str], path: Path) -> list[str]:
    """Return the names of columns, as the exports of charts by W&B and TensorBoard mean them."""
    if {name.lower() for name in header} == {"wall time", "step", "value"}:
        tag = re.search(r"tag-(.+)", path.stem)
        return [tag[1] if tag and name.lower() == "value" else name for name in header]
    runs = {name.rpartition(" - ")[0] for name in header if " - " in name}
    if len(runs) > 1:
        raise ValueError(f"holds {len(runs)} runs ({shorten(sorted(runs))}); export each alone")
    return [re.sub(r".* - |.*__(MIN|MAX)$", "", name) for name in header]


def _numbers(row: Mapping[Any, Any]) -> Row:
    """Return the numbers of a row by column; W&B's own, which begin with _, are left out."""
    group = next((v for k, v in row.items() if _plain(k) in GROUPS and isinstance(v, str)), "")
    split = _split(_plain(group))
    values = ((_plain(k), _float(v)) for k, v in row.items() if not str(k).startswith("_"))
    numbers = {
        f"{split}_{name}" if split and not _split(name) and not _is_counter(name) else name: value
        for name, value in values
        if name and value is not None
    }
    return {} if _has(numbers, "train_runtime") else numbers  # the summary of transformers


def _is_counter(name: str) -> bool:
    return any(name in usual.split() for usual in COUNTERS.values())


def _is_known(column: str) -> bool:
    name = _plain(column)
    return _is_counter(name) or any(re.fullmatch(it, _rest(name)) for it in METRICS.values())


def _float(text: object) -> float | None:
    try:
        return float(text)  # type: ignore[arg-type]  # a TypeError is caught
    except (TypeError, ValueError):
        return None


@cache
def _plain(name: object) -> str:
    """Return the name of a column in lower case, with _ for other signs.

    >>> _plain("Loss/train"), _plain("valAcc@1"), _plain("lr-SGD/pg1")
    ('loss_train', 'val_acc_at_1', 'lr_sgd_pg1')
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", str(name)).lower()
    words = words.replace("@", " at ").replace("%", " percent ")
    words = re.sub(r"\b(train|valid|val|test|eval)(?=loss|acc|top)", r"\1_", words)
    return re.sub(r"[^a-z0-9]+", "_", words).strip("_")


@cache
def _split(name: str) -> str:
    """Return which of `SPLITS` a name has words of; "mixed" for training and another one."""
    words = set(name.split("_"))
    found = [split for split, each in SPLITS.items() if words & {*each.split()}]
    return "mixed" if "train" in found[:-1] else "".join(found[-1:])


@cache
def _rest(name: str) -> str:
    """Return a name without the words for training, validation and averages."""
    left_out = " ".join((PLAIN, *SPLITS.values())).split()
    return "_".join(word for word in name.split("_") if word not in left_out)


def _read_events(path: Path) -> Iterator[Row]:
    """Yield a row for each scalar of TensorBoard's event files, in the order of steps."""
    require_tensorboard()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = [path] if path.is_file() else sorted(path.rglob(f"*{EVENTS}*"))
    rows: dict[int, Row] = {}
    folders: dict[str, Path] = {}
    for file in files:
        split = _split(_plain(file.parent.relative_to(path))) if path.is_dir() else ""
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            name = f"{split}_{_plain(tag)}" if split and not _split(_plain(tag)) else _plain(tag)
            if folders.setdefault(name, file.parent) != file.parent:
                raise ValueError(
                    f"{tag} is in {folders[name]} and in {file.parent}; give one of the folders"
                )
            for event in events.Scalars(tag):
                rows.setdefault(event.step, {"step": event.step})[name] = event.value
    yield from (rows[step] for step in sorted(rows))


def _record_of_rows(rows: list[Row], *, name: str, classes: int | None) -> Record:
    columns = _columns([row for row in rows if HEADER not in row])
    kinds = {column: kind for kind, column in columns.items()}
    renamed = [{kinds.get(key, key): value for key, value in row.items()} for row in rows]
    table = _without_repeats(renamed)
    percent = TOP1 in columns and _is_percent(columns[TOP1], table)
    training = _training(table)
    for before, row in pairwise(table):  # Lightning has rates, mmengine epochs in other rows
        row |= {
            kind: before[kind] for kind in (LR, EPOCH) if kind in before and not _has(row, kind)
        }
    losses, steps, epochs = (_values(training, kind) for kind in (LOSS, STEP, EPOCH))
    filtered = _filtered(losses, training, table)
    losses[filtered:] = math.nan
    if (np.diff(steps[np.isfinite(steps)]) < 0).any():  # counted from the start of each epoch
        steps[:] = math.nan
    first_step, first_epoch = _first(steps), _first(epochs)
    by_epoch = len({*epochs}) == len(epochs) and not (epochs % 1).any()
    val_epoch, val_loss, top1 = _evaluations(table)
    used = [columns[kind] for kind in (LOSS, VAL_LOSS, TOP1, LR) if kind in columns]
    repeats = sum(HEADER not in row for row in rows) - len(table)
    return Record(
        name=name,
        step=steps + 1 - first_step,
        first_step=first_step,
        epoch=epochs + 1 - first_epoch,
        first_epoch=first_epoch,
        loss=losses,
        lr=_values(training, LR),
        by_update=EPOCH not in columns or not by_epoch,
        val_epoch=val_epoch + 1 - first_epoch,
        val_loss=val_loss,
        top1=top1 / 100 if percent else top1,
        classes=classes,
        is_filtered=filtered < len(losses),
        source=", ".join(used)
        + (f" ({columns[TOP1]} in per cent)" if percent else "")
        + (f", without {plural(repeats, 'row')} before a restart" if repeats else ""),
    )


def _columns(rows: list[Row]) -> dict[str, str]:
    """Return the column of each kind that a log has; raise ValueError without training losses."""
    names = {key: False for row in rows for key in row}
    names |= {key: True for row in rows for key in row if _has(row, key)}
    loss = _column(names, "loss", "train", "")
    if loss is None:
        expected, found = "expected a column such as train_loss or loss", shorten(list(names))
        raise ValueError(f"has no training loss; {expected}, found {found}")
    columns = {
        LOSS: loss,
        VAL_LOSS: _column(names, "loss", "val", "test"),
        TOP1: _column(names, "top1", "val", "test"),
        LR: _column(names, "lr", "train", ""),
        NORM: _column(names, "grad_norm", "train", ""),
    }
    trained = [row for row in rows if loss in row]
    for kind, usual in COUNTERS.items():
        known = (name for name in usual.split() if any(name in row for row in trained))
        columns[kind] = next(known, None)
    unnamed = _column(names, "top1", "")
    if not columns[TOP1] and not _is_of_training(unnamed, loss, columns[VAL_LOSS], rows):
        columns[TOP1] = unnamed
    each = all(_has(row, columns[VAL_LOSS]) or _has(row, columns[TOP1]) for row in trained)
    steps = {*np.diff([row.get("step", math.nan) for row in trained])}
    if each and steps == {1} and (columns[STEP], columns[EPOCH]) == ("step", None):
        columns |= {STEP: None, EPOCH: "step"}  # TensorBoard has no other name for it
    return {kind: column for kind, column in columns.items() if column}


def _column(names: Mapping[str, bool], metric: str, *splits: str) -> str | None:
    """Return the likeliest column of a metric in the first of these splits that has one.

    `names` maps columns to True where they have a finite number. A loss by update comes before a
    mean of an epoch in training, and after it in validation.
    """
    other = "epoch" if "train" in splits else "step"
    found = [
        (not finite, splits.index(_split(name)), _rest(name) != metric, other in name, last, name)
        for name, finite in names.items()
        for last in [_split(name.rpartition("_")[2])]
        if _split(name) in splits and re.fullmatch(METRICS[metric], _rest(name))
    ]
    return min(found)[-1] if found else None


def _is_of_training(name: str | None, loss: str, val_loss: str | None, rows: list[Row]) -> bool:
    """Return True if an accuracy without a split in its name is of training.

    It is where a row has it with the training loss and without that of validation. In logs without
    the latter, as of Keras, it is if the name of the training loss has no split either.
    """
    beside = [row for row in rows if _has(row, name) and _has(row, loss)]
    if not val_loss:
        return bool(beside) and not _split(loss)
    return not all(_has(row, val_loss) for row in beside)


def _has(row: Row, name: str | None) -> bool:
    return math.isfinite(row.get(name or "", math.nan))


def _without_repeats(rows: list[Row]) -> list[Row]:
    """Return the rows without headers and without those that a restarted run repeats.

    A restart is a counter of training that goes back. Updates that are counted from the start of
    each epoch do so too: without epochs, a restart from the start needs a header of its own.
    """
    kept: list[Row] = []
    places: list[tuple[tuple[float, ...], int]] = []
    begins = False
    kinds = [kind for kind in (EPOCH, STEP) if any(kind in row for row in rows)]
    for row in rows:
        begins = begins or HEADER in row
        counters = tuple(row[kind] for kind in kinds if _has(row, kind))
        if LOSS in row and kinds and len(counters) == len(kinds):
            goes_back = bool(places) and counters < places[-1][0]
            if begins or (goes_back and (EPOCH in row or counters > places[0][0])):
                while places and places[-1][0] >= counters:
                    del kept[places.pop()[1] :]
            places.append((counters, len(kept)))
            begins = False
        kept += [row] if HEADER not in row else []
    return kept


def _training(rows: list[Row]) -> list[Row]:
    """Return the rows of training, without those in which the loss was not measured.

    If cells that were not measured are blank, NaN is a loss that was not finite. Otherwise the loss
    was lost if it is missing up to the end, for more rows than before, in rows of the same kind.
    """
    known = [place for place, row in enumerate(rows) if not math.isnan(row.get(LOSS, math.nan))]
    measured = {key for place in known for key in rows[place] if _has(rows[place], key)}
    alike = [all(key in measured for key in row if _has(row, key)) for row in rows]
    nan = [place for place, row in enumerate(rows) if math.isnan(row.get(LOSS, 0))]
    if known and not (nan and any(LOSS not in row for row in rows)):
        tail = range(known[-1] + 1, len(rows))
        nan = [*tail] if len(tail) > _gap(known) and all(alike[known[-1] + 1 :]) else []
    nan = [place for place in nan if alike[place] or not known]
    return [rows[place] for place in sorted({*known, *nan})]


def _gap(places: Sequence[int] | NDArray[np.int64]) -> int:
    """Return the most rows before one of these places and after the one before."""
    return int(max(np.diff([-1, *places]), default=1)) - 1


def _filtered(losses: FloatArray, training: list[Row], rows: list[Row]) -> int:
    """Return the row of training from which the logger replaced losses that were not finite.

    transformers does so (logging_nan_inf_filter): the loss is 0, and the norm of gradients NaN.
    """
    norms = np.array([row.get(NORM, 0.0) for row in training])
    known, zeros = np.flatnonzero(np.isfinite(norms)), _tail(~np.isfinite(losses) | (losses == 0))
    begin = int(known[-1]) + 1 if known.size else 0
    if np.isnan(norms[-1]) and (zeros <= 1 or 0 < begin < len(norms) - _gap(known)):
        return begin
    if not 0 < zeros < len(losses) or losses[zeros] != 0 or losses[zeros - 1] < FITTED:
        return len(losses)
    later = rows[rows.index(training[zeros]) :]
    is_fitted = any(_has(row, VAL_LOSS) or (_has(row, NORM) and row[NORM] > 0) for row in later)
    return len(losses) if is_fitted else zeros


def _tail(mask: NDArray[np.bool_]) -> int:
    """Return the first place from which all are True; the length if the last one is not."""
    return len(mask) - int(np.argmin([*mask[::-1], False]))


def _evaluations(rows: list[Row]) -> FloatArray:
    """Return epochs, losses and accuracies of evaluations, NaN where one was not measured.

    A loss of NaN was measured, and is infinite here, if another metric of validation was measured
    in its row, or if cells that were not measured are blank; without other metrics, if it is NaN
    up to the end, for more rows than before.
    """
    names = {
        key for row in rows for key in row if _has(row, key) and _split(key) in {"val", "test"}
    }
    others = [key for key in names if re.search("acc|top|prec|f1|auc|err", _rest(key))]
    others += [TOP1] if any(_has(row, TOP1) for row in rows) else []
    known = [place for place, row in enumerate(rows) if _has(row, VAL_LOSS)]
    blank = any(VAL_LOSS not in row for row in rows)
    is_lost = not others and len(known) > 1 and len(rows) - 1 - known[-1] > _gap(known)
    found = [[math.nan] * 3]
    for place, row in enumerate(rows):
        epoch, loss, top1 = (row.get(kind, math.nan) for kind in (EPOCH, VAL_LOSS, TOP1))
        if VAL_LOSS in row and math.isnan(loss):
            measured = blank or any(_has(row, key) for key in others)
            loss = math.inf if measured or (is_lost and place > known[-1]) else math.nan
        last = found[-1]
        if last[0] == epoch and all(map(math.isnan, (last[1] + loss, last[2] + top1))):
            last[1:] = np.fmax(last[1:], [loss, top1]).tolist()
        elif not (math.isnan(loss) and math.isnan(top1)):
            found.append([epoch, loss, top1])
    return np.array(found[1:], dtype=np.float64).reshape(-1, 3).T


def _is_percent(column: str, rows: list[Row]) -> bool:
    """Return True if accuracies are per cent; raise ValueError if they are neither.

    They are if the name or the tool says so, or an accuracy of the file is above 1, of training or
    top-5 too. If none is, a loss of L decides, which probabilities of exp(-L) have: a fraction far
    above it is none. `accuracy` is more often a fraction, top-1 more often per cent.
    """
    values = [row[TOP1] for row in rows if _has(row, TOP1)]
    wrong = next((value for value in values if not 0 <= value < 100.001), None)
    if wrong is not None:
        raise ValueError(f"{column} is {wrong:.6g}; expected an accuracy from 0 to 1 or to 100")
    names = {key for row in rows for key in row}
    tools = {"eval_top1", "eval_top5"}, {"test_acc1", "n_parameters"}  # timm, DeiT and its heirs
    if any(tool <= {column, *names} for tool in tools) or {"percent", "pct"} & {*column.split("_")}:
        return True
    same = [key for key in names if re.fullmatch(METRICS["top1"], _rest(key).replace("5", "1"))]
    values += [row[key] for key in same for row in rows if _has(row, key)]
    if max(values, default=0) > 1.0001:  # a mean of fractions may round to a little above 1
        return True
    start = next((row[LOSS] for row in rows if _has(row, LOSS)), math.inf)
    limits = [
        math.log(row[TOP1]) + min(start, row[VAL_LOSS] if _has(row, VAL_LOSS) else start)
        for row in rows
        if row.get(TOP1, 0) > 0 and (_has(row, VAL_LOSS) or start < math.inf)
    ]
    is_top1 = re.search("1|prec", _rest(column)) is not None
    return float(np.median(limits)) > math.log(10 if is_top1 else 50) if limits else is_top1


def _values(rows: list[Row], kind: str) -> FloatArray:
    return np.array([row.get(kind, math.nan) for row in rows], dtype=np.float64)


def _first(counter: FloatArray) -> int:
    """Return the number of the first update or epoch: 0 if it begins at 0, as timm's epochs."""
    known = counter[np.isfinite(counter)]
    return 0 if known.size and known[0] == 0 and not (known % 1).any() else 1
