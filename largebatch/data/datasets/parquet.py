"""Parquet files in the layout of the Hugging Face hub: encoded images and class numbers.

The files of a split have its name in theirs, such as `data/train-00000-of-00002.parquet`, or in
that of a folder, such as `default/train/0000.parquet`. The columns and the names of the classes
are in the schema, where the library `datasets` writes them. Images keep their bytes and order.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from largebatch.data.datasets.image_folder import Division
from largebatch.data.datasets.packing import TRAIN, VAL, DataSet, Sample, extension_of
from largebatch.data.index.folder import visible
from largebatch.data.index.headers import BadImageError, measure_bytes
from largebatch.data.index.shards import Unusable
from largebatch.errors import DataError, shorten
from largebatch.optional import require_parquet

VAL_NAMES = ("val", "valid", "validation", "dev")
"""Names of validation on the hub; `test` is used only if requested."""

ROWS = 256  # number of rows in memory at a time


class _Columns(NamedTuple):
    image: str
    label: str
    classes: tuple[str, ...]


@contextmanager
def open_parquet(
    source: Path,
    *,
    scratch: Path,  # noqa: ARG001 -- all openers have this argument
    val_name: str | None = None,
    label: str | None = None,
    val_fraction: float | None = None,
    seed: int = 0,
) -> Iterator[DataSet]:
    """Read the Parquet files in the folder `source` and below.

    `val_name` is the name of the validation split, `label` the column of class numbers if there
    are several. With `val_fraction` that fraction of the training rows of every class is used for
    validation; a row's name is its number.
    """
    parquet = require_parquet()
    files = _files(source, (val_name,) if val_name else VAL_NAMES, divided=val_fraction is not None)
    opened = {path: _open(parquet, path) for split in files.values() for path in split}
    layouts = {_columns(file.schema_arrow, path, label) for path, file in opened.items()}
    if len(layouts) > 1:
        raise DataError(f"{source}: its files have different columns or classes; import one set")
    (columns,) = layouts
    sizes = {
        split: sum(opened[path].metadata.num_rows for path in paths)
        for split, paths in files.items()
    }
    if val_fraction is None:
        data_set = DataSet(
            columns.classes, sizes, lambda split: _samples(files[split], opened, columns)
        )
    else:
        data_set = _divided(files[TRAIN], opened, columns, Division(val_fraction, seed))
    yield replace(data_set, remarks=[*data_set.remarks, *_unread(source, opened)])
    for file in opened.values():
        file.close()


def _unread(source: Path, taken: Collection[Path]) -> list[str]:
    """Return a line that names the other files, of other splits or hidden, if there are any."""
    others = [path for path in sorted(source.rglob("*.parquet")) if path not in taken]
    names = shorten([path.relative_to(source).as_posix() for path in others])
    return [f"{source}: {len(others)} other files ignored: {names}"] if others else []


def _divided(
    paths: Sequence[Path], files: dict[Path, Any], columns: _Columns, division: Division
) -> DataSet:
    """Return the training rows as two splits; this reads only their labels."""
    rows: dict[object, list[str]] = {}
    number = 0
    for path in paths:
        for (label,) in _rows(path, files[path], columns.label):
            rows.setdefault(label, []).append(str(number))
            number += 1
    names = dict(enumerate(columns.classes))
    chosen = {
        int(row)
        for label, numbers in rows.items()
        if label in names  # other labels are reported when the rows are read
        for row in division.validating(names[label], numbers)
    }

    def samples(split: str) -> Iterator[Sample | Unusable]:
        for row, sample in enumerate(_samples(paths, files, columns)):
            if (row in chosen) == (split == VAL):
                yield sample

    sizes = {TRAIN: number - len(chosen), VAL: len(chosen)}
    return DataSet(columns.classes, sizes, samples, [division.describe()])


def _files(source: Path, val_names: Sequence[str], *, divided: bool) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = {TRAIN: [], VAL: []}
    found = sorted(path.relative_to(source) for path in source.rglob("*.parquet"))
    names = [path.as_posix() for path in found if all(map(visible, path.parts))]
    for name in names:
        words = set(re.split(r"[^a-z0-9]+", name.lower()))
        for split, wanted in {TRAIN: [TRAIN], VAL: val_names}.items():
            if not words.isdisjoint(wanted):
                splits[split].append(source / name)
    if divided and splits[VAL]:
        raise DataError(
            f"{source}: a validation split already exists ({shorten(names)}); remove --val-fraction"
        )
    missing = [split for split, files in splits.items() if not files and not divided]
    both = not set(splits[TRAIN]).isdisjoint(splits[VAL])
    if missing or both or not splits[TRAIN]:
        raise DataError(
            f"{source}: expected data/train-*.parquet and data/validation-*.parquet, as on the "
            "Hugging Face hub; if validation has another name: --val-name test; to divide "
            f"train: --val-fraction 0.1; found {shorten(names)}"
        )
    return splits


def _open(parquet: ModuleType, path: Path) -> Any:  # noqa: ANN401 -- pyarrow is optional
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # base classes of pyarrow's errors
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split())
    return DataError(f"{path}: not a whole Parquet file ({reason}); download it again")


def _columns(schema: Any, path: Path, label: str | None) -> _Columns:  # noqa: ANN401 -- as above
    metadata = (schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        features = json.loads(metadata).get("info", {}).get("features", {})
        kinds = {name: about.get("_type") for name, about in features.items()}
    except (ValueError, AttributeError):
        kinds = {}
    images = [name for name, kind in kinds.items() if kind == "Image"]
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    labels = [name for name in labels if isinstance(features[name].get("names"), list)]
    if label is not None:
        labels = [name for name in labels if name == label]
    if len(images) != 1 or len(labels) != 1:
        several = "; choose one of several labels with --label" if len(labels) > 1 else ""
        raise DataError(
            f"{path}: expected one column of images and one of class labels in the metadata "
            f"written by the library `datasets`{several}; found {_shown(schema, kinds)}"
        )
    return _Columns(images[0], labels[0], tuple(map(str, features[labels[0]]["names"])))


def _shown(schema: Any, kinds: dict[str, str]) -> str:  # noqa: ANN401 -- as above
    return shorten([f"{name} ({kinds.get(name, 'not described')})" for name in schema.names])


def _samples(
    paths: Sequence[Path], files: dict[Path, Any], columns: _Columns
) -> Iterator[Sample | Unusable]:
    for path in paths:
        for row, (image, label) in enumerate(
            _rows(path, files[path], columns.image, columns.label)
        ):
            origin = f"{path.name}, row {row}"
            reason = _fault(image, label, len(columns.classes))
            if reason is None:
                content = image["bytes"]
                yield Sample(content, extension_of(content), label, origin)
            else:
                yield Unusable(origin, reason)


def _rows(path: Path, file: Any, *names: str) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401 -- as above
    try:
        for batch in file.iter_batches(ROWS, columns=list(names)):
            yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _fault(image: Any, label: Any, num_classes: int) -> str | None:  # noqa: ANN401 -- as above
    content = image.get("bytes") if isinstance(image, dict) else None
    if not isinstance(content, bytes):
        return "it has no image bytes"
    if not isinstance(label, int) or not 0 <= label < num_classes:
        return f"its label is {label}, expected a number from 0 to {num_classes - 1}"
    try:
        measure_bytes(content)
    except BadImageError as error:
        return str(error)
    return None
