"""Logs of other programs as records: CSV, JSON lines, JSON and the `trainer_state.json` of Trainer.

A column is read for what its name, its tool and all of its cells show it to be: training or
validation, which metric, fraction or per cent. What none of them shows is asked for (`--columns`):
a wrong reading would end in a wrong cause, and nobody would notice.
"""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from largebatch.errors import CheckpointError, LargebatchError, nearest, shorten
from largebatch.formatting import plural
from largebatch.report.record import Record, record_of
from largebatch.report.run import FloatArray, read_run
from largebatch.tracking.events import LOG

Row = dict[str, float]
"""The numbers of a row by column: without blank cells and texts; NaN where the log has NaN."""

KINDS = ("loss", "val_loss", "top1", "lr", "step", "epoch", "grad_norm")
"""What is read of a log, by the names that `--columns` has for it."""

UNITS = ("fraction", "percent")
"""Units of top1 in `--columns`."""

SPLITS = {
    "train": "train training trn tr trainer",
    "val": "val valid validation eval evaluation dev",
    "test": "test testing",
}
"""Words in names for training, validation and, where a log has no validation, test."""

PLAIN = "epoch step batch avg average mean total running metric metrics global percent pct"
"""Words in names that do not change which metric it is."""

METRICS = {
    "loss": r"loss|(ce|nll|xent|cross_entropy)(_loss)?",
    "top1": r"((multiclass|categorical|sparse_categorical)_)?(acc|accuracy|prec)(_?(at_?|top_?)?1)?"
    r"|top_?1(_acc|_accuracy)?",
    "lr": r"(base_|optimizer_|opt_)?(lr|learning_rate)"
    r"(?!.*(momentum|decay|scale|factor|scheduler|patience))(_.*)?",
    "grad_norm": r"(total_)?grad(ient)?s?_norm",
}
"""Names of each metric, without the words of SPLITS and PLAIN."""

COUNTERS = {
    "step": r"(train_|trainer_)?(global_|optimizer_|completed_|num_)?"
    r"(step|iter|iteration|update)s?",
    "epoch": r"(train_|trainer_|current_)?epochs?",
}
"""Names of the counters, in lower case and with _ for other signs."""

PER_CENT = " %"
"""End of the name of a column whose cells are like 45.3%."""

HEADER = "\n"
"""Key of a row that stands for a header that is repeated: some write one for each start."""

GROUPS = {"mode", "split", "phase", "set", "subset", "stage"}
"""Columns of text that name the split of a row, such as mmcv's `mode`."""

METRIC_NAMES = {"key", "metric", "metric_name", "tag"}
"""Columns of text that name the metric of a row, such as MLflow's `key`."""

RUN_NAMES = {"run", "run_id", "run_uuid", "run_name"}

FILES = (
    "trainer_state.json", "metrics.csv", "summary.csv", "results.csv", "history.csv",
    "metrics.json", "scalars.json", "log.txt",
)  # fmt: skip
"""Logs that are looked for in a folder, Trainer's first."""

FITTED = 0.01
"""Highest training loss in nats before one that is 0 by rounding, because the run fits its data."""

LEAST_LOSS = math.log(2)
"""Least loss of a wrong prediction in nats: its class has at most the probability 1/2."""

ROUNDED = 1.0001
"""Highest mean of fractions, which may round to a little above 1."""

BELOW_LOSS = 2
"""Factor by which an accuracy may be below exp(-loss). A model whose probabilities are right is
right at least so often; one in per cent that is taken for a fraction is above by up to 100."""


@dataclass(frozen=True, slots=True)
class NamedColumn:
    """A column that `--columns` names."""

    column: str
    unit: str = ""


class UnclearError(ValueError):
    """The columns of a log have several readings."""

    def __init__(self, problem: str, *answers: str) -> None:
        options = " or ".join(f"--columns '{answer}'" for answer in answers)
        super().__init__(f"{problem}; choose with {options}")


def parse_columns(texts: Sequence[str]) -> dict[str, NamedColumn]:
    """Return the columns that `--columns` names, by kind; raise LargebatchError for others.

    >>> parse_columns(["loss=train/loss,top1=acc:percent"])["top1"]
    NamedColumn(column='acc', unit='percent')
    """
    columns: dict[str, NamedColumn] = {}
    for text in texts:
        # Only before a known kind: names of columns may contain commas.
        for item in re.split(rf",(?=(?:{'|'.join(KINDS)})=)", text):
            kind, _, column = item.partition("=")
            if kind not in KINDS or not column:
                hint = nearest(kind, KINDS, otherwise=f"the names are {', '.join(KINDS)}")
                raise LargebatchError(f"--columns {item}: expected NAME=COLUMN; {hint}")
            name, _, unit = column.rpartition(":")
            if kind == "top1" and name and unit in UNITS:
                columns[kind] = NamedColumn(name, unit)
            else:
                columns[kind] = NamedColumn(column)
    return columns


def read_record(path: Path, *, classes: int | None = None, columns: Sequence[str] = ()) -> Record:
    """Read a run folder, or the log of another program with a row for each update or epoch.

    Args:
        path: A run folder, a file, or a folder with a log that has one of the usual names.
        classes: Number of classes, which other programs do not log.
        columns: Columns of what the log does not show, such as `top1=acc:percent`.

    Raises:
        CheckpointError: No log, no training loss, or columns with several readings.
    """
    # Our own logs have types and a plan; all others are read by the names of their columns.
    file = find_log(path)
    if is_of_run(file):
        return record_of(read_run(file.parent))
    named = parse_columns(columns)
    try:
        return _record(list(_rows(file)), name=str(path), classes=classes, named=named)
    except UnicodeDecodeError:
        raise CheckpointError(
            f"{file}: is not text; expected a CSV with commas, JSON or JSON lines"
        ) from None
    except (OSError, ValueError, csv.Error, RecursionError) as error:
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
    if not path.exists():
        raise CheckpointError(
            f"{path}: not found; expected a run folder, or a log as CSV, JSON or JSON lines"
        )
    if not path.is_dir():
        return path
    logs = [path / name for name in (LOG, *FILES) if (path / name).exists()]
    if not logs:
        raise CheckpointError(
            f"{path}: holds no log of a run; expected {LOG} or {', '.join(FILES)}"
        )
    # Beside our log there may be files of trackers, which hold the same.
    if logs[0].name != LOG and len(logs) > 1:
        names = ", ".join(log.name for log in logs)
        raise CheckpointError(f"{path}: holds several logs ({names}); give one of the files")
    return logs[0]


# Files: rows of numbers.


def _rows(path: Path) -> Iterator[Row]:
    # Spreadsheets write a byte-order mark, which would be part of the first name.
    text = path.read_text(encoding="utf-8-sig")
    is_json = text.lstrip()[:1] in {"{", "["}
    table = list(_read_json(text) if is_json else _read_csv(text, path))
    names = {_plain(name) for row in table[:1] for name in row}
    if {"value", "step"} <= names and names & METRIC_NAMES:
        table = _by_step(table)
    yield from filter(None, map(_numbers, table))


def _read_json(text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of JSON lines, of a list, or of the `log_history` of Trainer."""
    decoder = json.JSONDecoder()
    position = 0
    while begin := re.compile(r"[\s,]*(?=\S)").match(text, position):
        try:
            content, position = decoder.raw_decode(text, begin.end())
        except json.JSONDecodeError as error:
            if position and "\n" not in text[begin.end() :].rstrip():
                return  # a killed program leaves its last line incomplete
            line = text.count("\n", 0, begin.end()) + 1
            raise ValueError(f"line {line} is not JSON: {error.msg}") from None
        # Trainer writes one object with a list in it, W&B's export a list, most others an object
        # a line.
        entries = content.get("log_history", [content]) if isinstance(content, dict) else content
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict):
                nested = [(key, below) for key, below in entry.items() if isinstance(below, dict)]
                yield entry | {
                    f"{key}/{name}": v for key, below in nested for name, v in below.items()
                }


def _read_csv(text: str, path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the cells of each row by column; raise ValueError for a row that has more of them."""
    lines = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    first = [name.strip() for name in next(lines, [])]
    if len(first) == 1 and (sign := re.search("[;\t]", first[0])):
        words = {";": "semicolons", "\t": "tabs"}[sign[0]]
        raise ValueError(f"expected commas between columns, found {words}: {first[0]}")
    twice = [name for name in first if name and first.count(name) > 1]
    if twice:
        raise ValueError(f"its header names {twice[0]} twice")
    header = _exported(first, path)
    for line in lines:
        cells = [cell.strip() for cell in line]
        # Two equal names or more: one alone may be a value, such as a split.
        if len(({*cells} & {*header}) - {""}) > 1 or cells == first:
            # A program that appends after a restart may write its columns in another order.
            header = _exported(cells, path)
            yield {HEADER: 0}
            continue
        if any(cells[len(header) :]):
            raise ValueError(
                f"line {lines.line_num} has more cells than the header, {len(cells)} and "
                f"{len(header)}"
            )
        # A killed program leaves its last line incomplete.
        if len(cells) >= len(header) or lines.line_num <= text.count("\n"):
            yield dict(zip(header, cells, strict=False))


def _exported(header: list[str], path: Path) -> list[str]:
    """Return the names of columns, as charts exported by W&B and TensorBoard mean them."""
    # TensorBoard's export has the name of the metric in the file's name only.
    if {name.lower() for name in header} == {"wall time", "step", "value"}:
        tag = re.search(r"tag-(.+)", path.stem)
        return [tag[1] if tag and name.lower() == "value" else name for name in header]
    runs = sorted({name.rpartition(" - ")[0] for name in header if " - " in name})
    if len(runs) > 1:
        raise ValueError(f"holds {plural(len(runs), 'run')} ({shorten(runs)}); export each alone")
    bounds = re.compile(r"__(MIN|MAX)$")  # W&B's, of the updates that a point stands for
    return ["" if bounds.search(name) else name.rpartition(" - ")[2] for name in header]


def _by_step(table: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a row for each step of a table with a row for each number, as MLflow exports it."""
    columns = {_plain(name): name for name in table[0]}
    metric = next(columns[name] for name in columns if name in METRIC_NAMES)
    run_names = [columns[name] for name in columns if name in RUN_NAMES]
    runs = sorted({str(row.get(name, "")) for name in run_names[:1] for row in table})
    if len(runs) > 1:
        raise ValueError(f"holds {plural(len(runs), 'run')} ({shorten(runs)}); export each alone")
    by_step: dict[str, dict[str, Any]] = {}
    for row in table:
        step = str(row.get(columns["step"], ""))
        # MLflow's own tables have 0 and a mark in place of NaN.
        is_nan = str(row.get(columns.get("is_nan", ""), "")).lower() in {"1", "true"}
        value = "nan" if is_nan else row.get(columns["value"])
        by_step.setdefault(step, {"step": step})[str(row.get(metric, ""))] = value
    return sorted(by_step.values(), key=lambda row: _float(row["step"]) or 0.0)


def _numbers(row: Mapping[str, Any]) -> Row:
    """Return the numbers of a row by column; W&B's own, which begin with _, are left out."""
    group = next(
        (v for name, v in row.items() if _plain(name) in GROUPS and isinstance(v, str)), ""
    )
    # mmcv and detectron2 write rows of training and of validation with the same names.
    split = _split(_plain(group))
    numbers: Row = {}
    for column, cell in row.items():
        name = column
        value = _float(cell)
        if isinstance(cell, str) and value is None:  # 3/90 of a counter, 45.3% of an accuracy
            parts = re.fullmatch(r"([\d.e+-]+)\s*(%|/\s*\d+)", cell.strip())
            value = _float(parts[1]) if parts else None
            name += PER_CENT if parts and parts[2] == "%" else ""
        if name and value is not None and not name.startswith("_"):
            has_split = _split(_plain(name)) or any(
                re.fullmatch(pattern, _plain(name)) for pattern in COUNTERS.values()
            )
            numbers[name if has_split or not split else f"{split}/{name}"] = value
    # It has a loss, which would look like the last update's.
    if _measured(numbers, "train_runtime") or _measured(numbers, "train/train_runtime"):
        return {}  # Trainer's last row: means over the whole run
    return numbers


def _float(cell: object) -> float | None:
    # A bool is a number in Python; in a log it is a flag.
    if isinstance(cell, bool):
        return None
    try:
        return float(cell)  # type: ignore[arg-type]  # a TypeError is caught
    except (TypeError, ValueError, OverflowError):
        return None


def _measured(row: Row, name: str) -> bool:
    return math.isfinite(row.get(name, math.nan))


# Names: what a column is.


@cache
def _plain(name: str) -> str:
    """Return the name of a column in lower case, with _ for other signs.

    >>> _plain("Loss/train"), _plain("valAcc@1"), _plain("lr-SGD/pg1"), _plain("Val Acc (%)")
    ('loss_train', 'val_acc_at_1', 'lr_sgd_pg1', 'val_acc_percent')
    """
    # valAcc becomes val_acc; SGD stays one word.
    words = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name).lower()
    words = words.replace("@", " at ").replace("%", " percent ")
    words = re.sub(r"\b(train|valid|val|test|eval)(?=loss|acc|top)", r"\1_", words)
    return re.sub(r"[^a-z0-9]+", "_", words).strip("_")


@cache
def _split(name: str) -> str:
    """Return which of SPLITS a plain name has words of; "mixed" for training and another one."""
    words = set(name.split("_"))
    splits = [split for split, names in SPLITS.items() if words & {*names.split()}]
    return "mixed" if "train" in splits[:-1] else "".join(splits[-1:])


@cache
def _rest(name: str) -> str:
    """Return a plain name without the words for training, validation and averages."""
    left_out = " ".join((PLAIN, *SPLITS.values())).split()
    return "_".join(word for word in name.split("_") if word not in left_out)


def _is_metric(name: str, metric: str) -> bool:
    return re.fullmatch(METRICS[metric], _rest(_plain(name))) is not None


@dataclass(frozen=True)
class Columns:
    """The columns of a log, and which of them are read."""

    rows: list[Row]
    named: Mapping[str, NamedColumn]

    @property
    def names(self) -> list[str]:
        """The columns with a number, in the order of the log."""
        return [*dict.fromkeys(name for row in self.rows for name in row if name != HEADER)]

    def find(self) -> dict[str, str]:
        """Return the column of each kind; raise ValueError without losses or for several."""
        loss = self._choose("loss", self._alike("loss", "train", ""), prefer="step")
        if loss is None:
            raise ValueError(
                f"has no training loss, such as train_loss; it has {shorten(self.names)}; name one "
                "with --columns 'loss=...'"
            )
        trained = Columns([row for row in self.rows if loss in row], self.named)
        val_loss = self._choose("val_loss", self._of_validation("loss"), prefer="epoch")
        norms = self._alike("grad_norm", "train", "")
        by_kind = {
            "loss": loss,
            "val_loss": val_loss,
            "top1": self._choose("top1", self._accuracies(loss), prefer="epoch"),
            "lr": self._choose("lr", self._rates(), is_same=_are_proportional),
            "step": trained._counter("step"),
            "epoch": trained._counter("epoch"),
            "grad_norm": self._choose("grad_norm", norms),
        }
        columns = {kind: column for kind, column in by_kind.items() if column is not None}
        # Trackers count `step` by calls of log(), which many loops make once an epoch.
        if "step" in columns and "epoch" not in columns and trained._are_epochs(columns):
            columns["epoch"] = columns.pop("step")
        return columns

    def _alike(self, metric: str, *splits: str) -> list[str]:
        return [
            name
            for name in self.names
            if _split(_plain(name)) in splits and _is_metric(name, metric)
        ]

    def _of_validation(self, metric: str) -> list[str]:
        return self._alike(metric, "val") or self._alike(metric, "test")

    def _accuracies(self, loss: str) -> list[str]:
        """Return the columns of top-1 on validation data.

        An accuracy whose name has no split is of validation if the tool says so, or if no row has
        it beside a training loss; otherwise it may be of training, and is not read.
        """
        named = self._of_validation("top1")
        if named:
            return named
        others = self._alike("top1", "")
        if {"train_loss", "valid_loss", "accuracy"} <= {*self.names}:  # fastai
            return ["accuracy"]
        if "metrics/accuracy_top1" in others:  # Ultralytics
            return ["metrics/accuracy_top1"]
        trained = [row for row in self.rows if _measured(row, loss)]
        return [name for name in others if not any(_measured(row, name) for row in trained)]

    def _rates(self) -> list[str]:
        rates = self._alike("lr", "train", "")
        if {"lr/pg0", "lr/pg1"} <= {*rates} and any(
            name.startswith("metrics/") for name in self.names
        ):
            return ["lr/pg1"]  # Ultralytics: group 0 is the biases, whose warm-up begins high
        return rates

    def _counter(self, kind: str) -> str | None:
        """Return the column that counts updates or epochs: one that hardly goes back."""
        alike = [name for name in self.names if re.fullmatch(COUNTERS[kind], _plain(name))]
        returns = {name: int((np.diff(self._known(name)) < 0).sum()) for name in alike}
        least = min(returns.values(), default=0)
        steady = [name for name in alike if returns[name] == least]
        return self._choose(kind, steady, is_same=_are_shifted)

    def _known(self, name: str) -> FloatArray:
        return np.array([row[name] for row in self.rows if _measured(row, name)])

    def _choose(
        self,
        kind: str,
        alike: list[str],
        *,
        prefer: str = "",
        is_same: Callable[[FloatArray, FloatArray], bool] = np.array_equal,
    ) -> str | None:
        """Return the one column of a kind; raise UnclearError for several with other numbers.

        `prefer` is the word in the name of the better one of two means, as of Lightning's
        train_loss_step and train_loss_epoch.
        """
        if kind in self.named:
            return self._given(kind)
        finite = [name for name in alike if self._known(name).size]
        chosen = finite or alike
        # Lightning logs train_loss_step and train_loss_epoch; the other kind of mean is dropped,
        # not a column that names neither.
        preferred = [name for name in chosen if prefer and prefer in _plain(name).split("_")]
        other = {"step": "epoch", "epoch": "step"}.get(prefer, "")
        means = [name for name in chosen if other and other in _plain(name).split("_")]
        if preferred:
            chosen = [name for name in chosen if name not in means]
        if not chosen:
            return None
        first = chosen[0]
        for name in chosen[1:]:
            with_both = [row for row in self.rows if _measured(row, first) and _measured(row, name)]
            pair = [np.array([row[column] for row in with_both]) for column in (first, name)]
            if not with_both or not is_same(*pair):
                raise UnclearError(
                    f"{first} and {name} may both be the {kind} column",
                    f"{kind}={first}", f"{kind}={name}",
                )  # fmt: skip
        return max(chosen, key=lambda name: self._known(name).size)

    def _given(self, kind: str) -> str:
        column = self.named[kind].column
        alike = [
            name
            for name in self.names
            if column in {name, _plain(name), name.removesuffix(PER_CENT)}
        ]
        if len(alike) != 1:
            hint = nearest(column, self.names, otherwise=f"it has {shorten(self.names)}")
            raise ValueError(f"has no column {column} with numbers; {hint}")
        return alike[0]

    def _are_epochs(self, columns: Mapping[str, str]) -> bool:
        """Return True if what is named steps counts epochs, as the steps of trackers may.

        It does if every row of training has an evaluation, and they count by one.
        """
        evaluated = [columns[kind] for kind in ("val_loss", "top1") if kind in columns]
        steps = self._known(columns["step"])
        return (
            "step" not in self.named
            and len(steps) > 1
            and all(any(_measured(row, name) for name in evaluated) for row in self.rows)
            and {*np.diff(steps)} == {1.0}
        )


def _are_proportional(rates: FloatArray, others: FloatArray) -> bool:
    """Return True for the rates of parameter groups that one schedule drives."""
    if not rates.any() or not others.any():
        return True  # a frozen group
    return bool(np.allclose(rates / rates.max(), others / others.max(), rtol=1e-3, atol=1e-6))


def _are_shifted(counts: FloatArray, others: FloatArray) -> bool:
    """Return True for two counters of one thing, from 0 and from 1."""
    shifts = np.unique(counts - others)
    return len(shifts) == 1 and abs(float(shifts[0])) <= 1


# Rows: the course of the run.


def _record(
    rows: list[Row], *, name: str, classes: int | None, named: Mapping[str, NamedColumn]
) -> Record:
    if not rows:
        raise ValueError("has no rows with numbers")
    columns = Columns(rows, named).find()
    kinds = {column: kind for kind, column in columns.items()}
    for kind, column in columns.items():
        if kinds[column] != kind:
            raise ValueError(
                f"{column} is named as {kind} and {kinds[column]}; give another column"
            )
    renamed = [_with_kinds(row, kinds) for row in rows]
    table = _without_repeats(renamed)
    is_percent = "top1" in columns and _is_percent(columns["top1"], table, classes, named)
    training = _training(table)
    # A row takes the rate and the epoch of the row before it.
    for before, row in pairwise(table):  # Lightning has rates, mmengine epochs in rows of their own
        for kind in ("lr", "epoch"):
            if kind in before and not _measured(row, kind):
                row[kind] = before[kind]
    losses, steps, epochs = (_values(training, kind) for kind in ("loss", "step", "epoch"))
    filtered = _filtered(losses, training, table)
    # What the logger hid is shown again as not finite.
    losses[filtered:] = math.nan
    if (np.diff(steps[np.isfinite(steps)]) < 0).any():  # counted from the start of each epoch
        steps[:] = math.nan
    first_step = 0 if _counts_from_zero(steps) else 1
    val_epoch, val_loss, top1 = _evaluations(table)
    units = {"top1": " (per cent)" if is_percent else " (a fraction)"}
    read = [f"{kind} = {column}{units.get(kind, '')}" for kind, column in columns.items()]
    notes = [", ".join(read)]
    repeated = sum(HEADER not in row for row in rows) - len(table)
    if repeated:
        notes.append(f"left out: {plural(repeated, 'row')} before a restart")
    if filtered < len(losses):
        notes.append(f"{columns['loss']} has numbers in place of NaN at the end")
    return Record(
        name=name,
        step=steps,
        first_step=first_step,
        epoch=epochs,
        loss=losses,
        lr=_values(training, "lr"),
        by_update=not _is_by_epoch(epochs),
        updates=round(steps[-1]) - first_step + 1 if math.isfinite(steps[-1]) else None,
        epochs=_epochs(epochs),
        val_epoch=val_epoch,
        val_loss=val_loss,
        top1=top1 / 100 if is_percent else top1,
        classes=classes,
        notes=tuple(notes),
    )


def _with_kinds(row: Row, kinds: Mapping[str, str]) -> Row:
    """Return a row by kind; other columns keep their name, if it is not that of a kind."""
    others = {column: value for column, value in row.items() if column not in {*kinds, *KINDS}}
    return others | {kinds[column]: value for column, value in row.items() if column in kinds}


def _values(rows: list[Row], kind: str) -> FloatArray:
    return np.array([row.get(kind, math.nan) for row in rows], dtype=np.float64)


def _is_by_epoch(epochs: FloatArray) -> bool:
    """Return True if a row is the mean of an epoch.

    Trainer's epochs are fractions: 0.02, 0.04 for a row of a few updates, and 0.99, 1.99 for one of
    an epoch whose last batch was left out.
    """
    if not np.isfinite(epochs).all():
        return False
    if len(epochs) == 1:
        return not (epochs % 1).any()
    return bool((np.diff(epochs) > 0.9).all())


def _epochs(epochs: FloatArray) -> float:
    """Return the passes over the training data; whole numbers may count from 0."""
    known = epochs[np.isfinite(epochs)]
    if not known.size:
        return math.nan
    if (known % 1).any():
        return float(known[-1])
    return float(known[-1] - min(known[0], 1) + 1)


def _counts_from_zero(steps: FloatArray) -> bool:
    """Return True if the first update is number 0.

    Lightning and detectron2, which count so, log every 50 updates as 49, 99, ...; those that count
    from 1 as 50, 100, ...
    """
    known = steps[np.isfinite(steps)]
    if known.size < 2 or known[0] == 0:
        return bool(known.size and known[0] == 0)
    # The most frequent distance: restarts and evaluations add others.
    distances, counts = np.unique(np.diff(known), return_counts=True)
    every = distances[np.argmax(counts)]
    return bool(every > 1 and (known[0] + 1) % every == 0)


def _without_repeats(rows: list[Row]) -> list[Row]:
    """Return the rows without headers, and without those that a resumed run made again.

    Raise ValueError for a counter that goes back to its start without a header: a log of two runs.
    Updates that are counted from the start of each epoch go back too, but their epochs do not.
    """
    kinds = [kind for kind in ("epoch", "step") if any(kind in row for row in rows)]
    unique: list[Row] = []
    places: list[tuple[tuple[float, ...], int]] = []
    restarts = False
    for row in rows:
        if HEADER in row:
            restarts = True
            continue
        counters = tuple(row[kind] for kind in kinds if _measured(row, kind))
        if "loss" in row and kinds and len(counters) == len(kinds):
            if places and counters < places[-1][0]:
                if counters <= places[0][0] and not restarts:
                    # A lone counter of the updates of an epoch is no counter of the run.
                    if kinds == ["step"]:
                        return [content for content in rows if HEADER not in content]
                    raise ValueError("its epochs or updates go back; give the rows of one run")
                # What a resumed run made again replaces the rows before the restart.
                while places and places[-1][0] >= counters:
                    del unique[places.pop()[1] :]
            places.append((counters, len(unique)))
            restarts = False
        unique.append(row)
    return unique


def _training(rows: list[Row]) -> list[Row]:
    """Return the rows of training, without those in which the loss was not measured.

    If cells that were not measured are blank, NaN is a loss that was not finite. Otherwise the loss
    was lost if it is missing up to the end, for more rows than before, in rows of the same kind.
    """
    with_loss = [
        row_number
        for row_number, row in enumerate(rows)
        if not math.isnan(row.get("loss", math.nan))
    ]
    measured = {
        key
        for row_number in with_loss
        for key in rows[row_number]
        if _measured(rows[row_number], key)
    }
    alike = [all(key in measured for key in row if _measured(row, key)) for row in rows]
    lost = [row_number for row_number, row in enumerate(rows) if math.isnan(row.get("loss", 0))]
    # Some loggers leave cells blank that were not measured, others write NaN in them; blank cells
    # anywhere mean that NaN is a loss.
    has_blanks = bool(lost) and any("loss" not in row for row in rows)
    if with_loss and not has_blanks:
        tail = range(with_loss[-1] + 1, len(rows))
        is_lost = len(tail) > _gap(with_loss) and all(alike[with_loss[-1] + 1 :])
        lost = [*tail] if is_lost else []
    lost = [row_number for row_number in lost if alike[row_number] or not with_loss]
    return [rows[row_number] for row_number in sorted({*with_loss, *lost})]


def _gap(numbers: Sequence[int]) -> int:
    """Return the most rows before one of these places and after the one before."""
    return int(max(np.diff([-1, *numbers]), default=1)) - 1


def _filtered(losses: FloatArray, training: list[Row], rows: list[Row]) -> int:
    """Return the row of training from which the logger replaced losses that were not finite.

    Trainer does so (logging_nan_inf_filter): the loss is 0, and the norm of the gradient NaN. A
    finite validation loss after it needs finite weights, and shows that nothing was lost.
    """
    norms = _values(training, "grad_norm")
    has_norms = any("grad_norm" in row for row in training)
    known = np.flatnonzero(np.isfinite(norms)).tolist()
    zeros = len(losses)
    # The first row of the tail of zeros.
    while zeros and (losses[zeros - 1] == 0 or not math.isfinite(losses[zeros - 1])):
        zeros -= 1
    begin = known[-1] + 1 if known else 0
    tail = len(losses) - begin

    def is_fitted(row_number: int) -> bool:
        if row_number >= len(losses):
            return True
        later = rows[rows.index(training[row_number]) :]
        return any(_measured(row, "val_loss") for row in later)

    # Only a loss of 0, or norms that were numbers before, show that NaN is not "not measured".
    is_tail = tail > 1 and tail > _gap(known) and (bool(known) or zeros <= 1)
    if has_norms and is_tail and not is_fitted(begin):
        return begin
    if has_norms and known and tail == 1 and zeros == begin and not is_fitted(begin):
        return begin
    if not 0 < zeros < len(losses) or losses[zeros] != 0 or losses[zeros - 1] < FITTED:
        return len(losses)
    has_gradient = bool((norms[zeros:] > 0).any())
    return len(losses) if has_gradient or is_fitted(zeros) else zeros


def _evaluations(rows: list[Row]) -> FloatArray:
    """Return epochs, losses and accuracies of evaluations, NaN where one was not measured.

    A loss of NaN was measured, and is infinite here, if another metric of validation was measured
    in its row, or if cells that were not measured are blank; without other metrics, if it is NaN
    up to the end, for more rows than before.
    """
    others = {
        key
        for row in rows
        for key in row
        if _split(_plain(key)) in {"val", "test"}
        and re.search("acc|top|prec|f1|auc|err", _rest(_plain(key)))
    } | {"top1"}
    with_loss = [row_number for row_number, row in enumerate(rows) if _measured(row, "val_loss")]
    has_blanks = any("val_loss" not in row for row in rows)
    has_others = any(_measured(row, key) for row in rows for key in others)
    is_lost = (
        not has_others and len(with_loss) > 1 and len(rows) - 1 - with_loss[-1] > _gap(with_loss)
    )
    evaluations: list[list[float]] = []
    for row_number, row in enumerate(rows):
        epoch, loss, top1 = (row.get(kind, math.nan) for kind in ("epoch", "val_loss", "top1"))
        if "val_loss" in row and not math.isfinite(loss):
            is_measured = has_blanks or any(_measured(row, key) for key in others)
            is_measured = is_measured or (is_lost and row_number > with_loss[-1])
            loss = math.inf if is_measured or math.isinf(loss) else math.nan
        if math.isnan(loss) and math.isnan(top1):
            continue
        # Loss and accuracy of one evaluation may be in two rows: they have the same epoch, and no
        # metric twice.
        last = evaluations[-1] if evaluations else [math.nan] * 3
        if last[0] == epoch and all(map(math.isnan, (last[1] + loss, last[2] + top1))):
            last[1:] = np.fmax(last[1:], [loss, top1]).tolist()  # one evaluation in two rows
        else:
            evaluations.append([epoch, loss, top1])
    return np.array(evaluations, dtype=np.float64).reshape(-1, 3).T


def _is_percent(
    column: str, rows: list[Row], classes: int | None, named: Mapping[str, NamedColumn]
) -> bool:
    """Return True if accuracies are per cent; raise ValueError if they are neither or may be both.

    They are if the option, the name or the tool says so, or one of the log is above 1, of training
    or top-5 too. If none is, they are fractions where that many per cent would be fewer than the
    losses or guessing allow.
    """
    measured = [row for row in rows if _measured(row, "top1")]
    values = [row["top1"] for row in measured]
    most = max(values, default=0.0)
    wrong = next((value for value in values if not 0 <= value < 100.001), None)
    if wrong is not None:
        raise ValueError(f"{column} is {wrong:.6g}; expected an accuracy from 0 to 1 or to 100")
    unit = named["top1"].unit if "top1" in named else ""
    if unit == "fraction" and most > ROUNDED:
        raise ValueError(f"{column} is {most:.6g}; expected a fraction from 0 to 1")
    # Top-5, which is above 1 earlier, says as well which unit the log has.
    names = {name for row in rows for name in row} | {column}
    alike = [name for name in names if _is_metric(name.replace("5", "1"), "top1")]
    others = [row[name] for name in alike for row in rows if _measured(row, name)]
    has_percent = max(others, default=0.0) > ROUNDED
    if unit or not measured:
        return unit == "percent"
    if (
        most > ROUNDED
        or {"percent", "pct"} & {*_plain(column).split("_")}
        or {"eval_top1", "eval_top5"} <= names  # timm
        or {"test_acc1", "n_parameters"} <= names  # DeiT and its heirs
    ):
        return True
    is_below = any(_excludes_percent(row, guess=0.0) for row in measured)
    if has_percent and not is_below:
        return True
    if not has_percent:
        if column in _FRACTIONS or ("eval/accuracy" in names and "train/global_step" in names):
            return False
        start = next((row["loss"] for row in rows if _measured(row, "loss")), math.inf)
        guess = 1 / classes if classes else math.exp(-max(start, 0.0))
        if any(_excludes_percent(row, guess) for row in measured):
            return False
    what = "a fraction by the validation loss, and others are per cent" * has_percent
    raise UnclearError(
        f"{column} ends at {values[-1]:g}, {what or 'a fraction or per cent'}",
        f"top1={column}:fraction", f"top1={column}:percent",
    )  # fmt: skip


_FRACTIONS = {
    "val_accuracy", "val_sparse_categorical_accuracy", "val_categorical_accuracy",  # Keras
    "eval_accuracy",  # Trainer, by sklearn or evaluate
    "metrics/accuracy_top1",  # Ultralytics
}  # fmt: skip
"""Names by which a tool writes accuracies from 0 to 1."""


def _excludes_percent(row: Row, guess: float) -> bool:
    """Return True if the accuracy of a row cannot be per cent.

    At most a hundredth of the images would be right then. Each other one has a loss of ln 2, and a
    model whose probabilities are right is right on exp(-loss) of them, on `guess` at the start.
    """
    value = row["top1"] / 100
    loss = row.get("val_loss", math.nan)
    is_below = BELOW_LOSS * value < max(guess, math.exp(-loss) if loss > 0 else 0.0)
    return is_below or loss < (1 - value) * LEAST_LOSS
