"""Parquet files in the layout of the Hugging Face hub: encoded images and class numbers.

The files of a split have its name in theirs, such as `data/train-00000-of-00002.parquet`, or in
that of a folder, such as `default/train/0000.parquet`. The columns and the names of the classes
are in the schema, where the library `datasets` writes them. Images keep their bytes and order.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from largebatch.data.datasets.packing import TRAIN, VAL, DataSet, Sample, extension_of
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
    files = _files(source, (val_name,) if val_name else VAL_NAMES)
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

        def samples(split: str) -> Iterator[Sample | Unusable]:
            for path in files[split]:
                yield from _samples(path, opened[path], columns)

        sizes = {
            split: sum(opened[path].metadata.num_rows for path in paths)
            for split, paths in files.items()
        }
        others = sorted(set(source.rglob("*.parquet")) - opened.keys())
        names = shorten([path.relative_to(source).as_posix() for path in others])
        remarks = [f"{source}: {len(others)} other files ignored: {names}"] if others else []
        yield DataSet(columns[2], sizes, samples, remarks)


def _files(source: Path, val_names: Sequence[str]) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = {TRAIN: [], VAL: []}
    names = sorted(path.relative_to(source).as_posix() for path in source.rglob("*.parquet"))
    for name in names:
        words = set(re.split(r"[^a-z0-9]+", name.lower()))
        for split, wanted in {TRAIN: [TRAIN], VAL: val_names}.items():
            if not words.isdisjoint(wanted):
                splits[split].append(source / name)
    if not all(splits.values()) or not set(splits[TRAIN]).isdisjoint(splits[VAL]):
        raise DataError(
            f"{source}: expected data/train-*.parquet and data/validation-*.parquet, as on the "
            "Hugging Face hub; if validation has another name: --val-name test; found "
            f"{shorten(names)}"
        )
    return splits


def _columns(schema: Any, path: Path) -> _Columns:  # noqa: ANN401 -- pyarrow is optional
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        kinds = {name: about.get("_type") for name, about in features.items()}
    except (ValueError, AttributeError, TypeError, KeyError):
        features, kinds = {}, {}
    images = [name for name, kind in kinds.items() if kind == "Image"]
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    labels = [name for name in labels if isinstance(features[name].get("names"), list)]
    if len(images) != 1 or len(labels) != 1:
        found = [f"{name} ({kinds.get(name, 'not described')})" for name in schema.names]
        raise DataError(
            f"{path}: expected one column of images and one of class labels in the metadata "
            f"written by the library `datasets`; found {shorten(found)}"
        )
    return images[0], labels[0], tuple(map(str, features[labels[0]]["names"]))


def _samples(path: Path, file: Any, columns: _Columns) -> Iterator[Sample | Unusable]:  # noqa: ANN401 -- as above
    image_column, label_column, classes = columns
    row = 0
    try:
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
