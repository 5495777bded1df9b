"""Parquet files in the layout of the Hugging Face hub: encoded images and class numbers.

The files of a split have its name in theirs, such as `data/train-00000-of-00002.parquet`, or in
that of a folder, such as `default/train/0000.parquet`. A folder may hold several configurations,
which are different data, and files of an earlier or interrupted download: exactly one complete set
of files is imported for each split, or none. The columns and the names of the classes are in the
schema, where the library `datasets` writes them. Images keep their bytes.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import Any, NamedTuple

from largebatch.data.datasets.packing import TRAIN, VAL, DataSet, Sample, extension_of
from largebatch.data.index.folder import visible
from largebatch.data.index.headers import BadImageError, measure_bytes
from largebatch.data.index.shards import Unusable
from largebatch.errors import DataError, shorten
from largebatch.optional import require_parquet

VAL_NAMES = ("val", "valid", "validation", "dev")
"""Names of validation on the hub; `test` is used only if requested."""

ROWS = 256  # number of rows in memory at a time

_Columns = tuple[str, str, tuple[str, ...]]
"""The column of images, the column of labels and the names of the classes."""


@contextmanager
def open_parquet(source: Path, *, val_name: str | None = None) -> Iterator[DataSet]:
    """Read the Parquet files in the folder `source` and below.

    `val_name` is the name of the validation split.
    """
    parquet = require_parquet()
    files = _files(source, (val_name.lower(),) if val_name else VAL_NAMES)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for path in (path for split in files.values() for path in split):
            try:
                opened[path] = stack.enter_context(parquet.ParquetFile(path))
            except (OSError, ValueError) as error:  # base classes of pyarrow's errors
                raise DataError(f"{path}: not a whole Parquet file ({error})") from error
        layouts = {_columns(file.schema_arrow, path) for path, file in opened.items()}
        if len(layouts) > 1:
            raise DataError(f"{source}: its files have different columns or classes")
        (columns,) = layouts

        def samples(split: str, rows: Sequence[int]) -> Iterator[Sample | Unusable]:
            in_files = (_samples(path, opened[path], columns) for path in files[split])
            in_order = chain.from_iterable(in_files)
            return in_order if isinstance(rows, range) else _reordered(in_order, rows)

        sizes = {
            split: sum(opened[path].metadata.num_rows for path in paths)
            for split, paths in files.items()
        }
        others = sorted(set(source.rglob("*.parquet")) - opened.keys())
        names = shorten([path.relative_to(source).as_posix() for path in others])
        remarks = [f"{source}: {len(others)} other files ignored: {names}"] if others else []

        def name(split: str, row: int) -> str:
            for path in files[split]:
                number = opened[path].metadata.num_rows
                if row < number:
                    return f"{path.relative_to(source).as_posix()}, row {row}"
                row -= number
            raise IndexError(row)

        yield DataSet(columns[2], sizes, samples, remarks, name)


def _reordered(
    samples: Iterable[Sample | Unusable], rows: Sequence[int]
) -> Iterator[Sample | Unusable]:
    """Yield samples in the order of `rows`, by way of a temporary file.

    A row of a Parquet file cannot be read without the hundreds around it.
    """
    stored: list[Unusable | tuple[int, int, str, int]] = []
    try:
        with TemporaryFile() as file:
            for sample in samples:
                if isinstance(sample, Unusable):
                    stored.append(sample)
                    continue
                place = file.tell()
                file.write(sample.content)
                stored.append((place, len(sample.content), sample.extension, sample.label))
            file.flush()
            for row in rows:
                entry = stored[row]
                if isinstance(entry, Unusable):
                    yield entry
                    continue
                place, length, extension, label = entry
                yield Sample(os.pread(file.fileno(), length, place), extension, label)
    except OSError as error:
        raise DataError(
            f"the images could not be shuffled in {gettempdir()} ({error.strerror}): set TMPDIR to "
            "a folder with room for them, or keep their order with --keep-order"
        ) from error


class _SplitFile(NamedTuple):
    path: str  # relative to the source
    configuration: str  # its folders and the words before the split
    split: str
    series: str  # file name without its number: the files of one set differ in the number alone
    number: int
    total: int | None  # N of `-of-N`


_OF_TOTAL = re.compile(r"(?P<text>.*?)-?(?P<number>\d+)-of-(?P<total>\d+)(?P<rest>.*)")
_NUMBERED = re.compile(r"(?P<text>\D*?)(?:(?:^|[-_.])(?P<number>\d+)(?P<rest>.*))?")
_FINGERPRINT = re.compile("-[0-9a-f]{16}")  # of each file, as older versions of `datasets` added
HIVE = "split="
"""Before the name of a split in that of a folder, as DuckDB and Spark write it."""


def _files(source: Path, val_names: Sequence[str]) -> dict[str, list[Path]]:
    """Return the files of both splits in order; raise DataError unless they are one whole set."""
    names = [path.relative_to(source) for path in source.rglob("*.parquet")]
    visible_names = sorted(name.as_posix() for name in names if all(map(visible, name.parts)))
    if TRAIN in val_names:
        raise DataError(f"--val-name {TRAIN}: that is the training split; choose another name")
    configurations: dict[str, dict[str, list[_SplitFile]]] = defaultdict(lambda: defaultdict(list))
    for file in (_parsed(name, {TRAIN, *val_names}) for name in visible_names):
        configurations[file.configuration][file.split].append(file)
    pairs = [
        (splits[TRAIN], splits[name])
        for splits in configurations.values()
        for name in val_names
        if {TRAIN, name} <= splits.keys()
    ]
    # Not a guess among several: an import of the wrong configuration would go unnoticed.
    if len(pairs) == 1 and not any(map(_fault, pairs[0])):
        train, val = (sorted(files, key=_number) for files in pairs[0])
        return {
            TRAIN: [source / file.path for file in train],
            VAL: [source / file.path for file in val],
        }
    parsed = [
        f"{configuration or '.'}: "
        + ", ".join(split + _fault(files) for split, files in sorted(splits.items()))
        for configuration, splits in configurations.items()
    ]
    raise DataError(
        f"{source}: expected one configuration with the splits {TRAIN} and "
        f"{' or '.join(val_names)}, each one whole set of files (data/train-00000-of-00002.parquet "
        f"or default/train/0000.parquet); found {shorten(parsed, between='; ')}. Choose a "
        "configuration by its folder, as DIR/default; a split that validates by --val-name test; "
        "move files of other sets away"
    )


def _parsed(name: str, known: Collection[str]) -> _SplitFile:
    """Return what the path of a file says; a split of another name than the known is kept apart.

    The name of the file counts first, `words-SPLIT-00000-of-00002`, then those of its folders.
    """
    *folders, file = name.split("/")
    stem = file.removesuffix(".parquet")
    # `train-00000-of-00002` first: its numbers would match the other form, too.
    match = _OF_TOTAL.fullmatch(stem) or _NUMBERED.fullmatch(stem)
    parts: dict[str, str | None] = match.groupdict() if match else {}
    text = parts.get("text") or ""
    number = parts.get("number")
    total = parts.get("total")
    rest = parts.get("rest") or ""
    if _FINGERPRINT.fullmatch(rest):
        rest = ""
    words, _, split = text.lower().rpartition("-")
    if rest or not text:  # as `train-0-extra`, which is not a part of train
        words = ""
        split = stem
    if split not in known:
        of_folders = [folder.lower().removeprefix(HIVE) for folder in folders]
        # The innermost folder counts: the outer ones are names of configurations.
        inner = next((folder for folder in reversed(of_folders) if folder in known), None)
        if inner is None and folders and not text:
            inner = of_folders[-1]  # a folder of numbered files is a split, such as `test`
        if inner is not None:
            words = ""
            split = inner
    around = [folder for folder in folders if folder.lower().removeprefix(HIVE) != split]
    return _SplitFile(
        path=name,
        configuration="/".join([*around, words] if words else around),
        split=split,
        series=text + (f"#{rest}" if number else "") + (f" of {int(total)}" if total else ""),
        number=int(number or 0),
        total=int(total) if total else None,
    )


def _number(file: _SplitFile) -> int:
    return file.number


def _fault(files: Sequence[_SplitFile]) -> str:
    """Return why the files of a split are not one whole set, in brackets; empty if they are.

    Numbers begin with 0 or 1. Without `-of-N` a missing last file cannot be seen.
    """
    series = sorted({file.series for file in files})
    if len(series) > 1:
        return f" (files of {len(series)} sets: {shorten(series)})"
    # A set without a gap: a missing file is a part of the data that would be missed silently.
    numbers = sorted(file.number for file in files)
    total = files[0].total or len(numbers)
    if numbers in (list(range(total)), list(range(1, total + 1))):
        return ""
    if len(set(numbers)) < len(numbers):
        return " (two files of one number)"
    if files[0].total is None:
        return f" (numbers {shorten(list(map(str, numbers)))}: some are missing)"
    return f" ({len(numbers)} of {total} files)"


def _columns(schema: Any, path: Path) -> _Columns:  # noqa: ANN401 -- pyarrow is optional
    try:
        # Parquet knows bytes and integers; which column is an image and what labels are called is
        # in this metadata.
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        kinds = {name: about.get("_type") for name, about in features.items()}
    except (ValueError, AttributeError, TypeError, KeyError):
        features = {}
        kinds = {}
    images = [name for name, kind in kinds.items() if kind == "Image"]
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    labels = [name for name in labels if isinstance(features[name].get("names"), list)]
    if len(images) != 1 or len(labels) != 1:
        described = [f"{name} ({kinds.get(name, 'not described')})" for name in schema.names]
        raise DataError(
            f"{path}: expected one column of images and one of class labels in the metadata "
            f"written by the library `datasets`; found {shorten(described)}"
        )
    return images[0], labels[0], tuple(map(str, features[labels[0]]["names"]))


def _samples(path: Path, file: Any, columns: _Columns) -> Iterator[Sample | Unusable]:  # noqa: ANN401 -- as above
    image_column, label_column, classes = columns
    row = 0
    try:
        # Row groups may be of gigabytes, so they are read in smaller batches.
        for batch in file.iter_batches(ROWS, columns=[image_column, label_column]):
            images, labels = (batch.column(name).to_pylist() for name in columns[:2])
            for image, label in zip(images, labels, strict=True):
                try:
                    yield _sample(image, label, len(classes))
                except BadImageError as error:
                    yield Unusable(f"{path.name}, row {row}", str(error))
                row += 1
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a whole Parquet file ({error})") from error


def _sample(image: Any, label: Any, num_classes: int) -> Sample:  # noqa: ANN401 -- as above
    content = image.get("bytes") if isinstance(image, dict) else None
    if not isinstance(content, bytes):
        raise BadImageError("it has no image bytes")
    if not isinstance(label, int) or not 0 <= label < num_classes:
        raise BadImageError(f"its label is {label}, expected a number from 0 to {num_classes - 1}")
    measure_bytes(content)
    return Sample(content, extension_of(content), label)
