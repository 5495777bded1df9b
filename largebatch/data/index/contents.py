"""Consistency checks of an index file whose checksum is right.

A damaged file is rebuilt. An undamaged one with impossible content, such as a label without a
class or an image beyond the end of its shard, was written by another program: training would read
wrong bytes or none, so it is an error.
"""

import os
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from largebatch.data.index.build import MAX_BYTES, MAX_SIDE, MOST_ORIENTATION
from largebatch.data.index.file import Arrays, Header

_HEADER: Mapping[str, object] = {
    "format": int,
    "split": str,
    "classes": [str],
    "folders": [(str, int)],
    "shards": [(str, int, int)],
    "bad": [(str, str, int, int)],
    "ignored": [(str, int, [str])],
    "digest": str,
}
"""Types of a header's values: a list has any number of its element, a tuple exactly these."""

_OF_EACH = ("labels", "heights", "widths", "num_bytes")
_OF_FILES = {
    **dict.fromkeys((*_OF_EACH, "mtimes"), np.int64),
    "orientations": np.uint8,
    "names": np.uint8,
    "name_ends": np.uint32,
}
_OF_SHARDS = {
    **dict.fromkeys((*_OF_EACH, "offsets", "shards"), np.int64),
    "orientations": np.uint8,
}


def fault_in(header: Header, arrays: Arrays) -> str | None:
    """Return a description of the first inconsistency, or None."""
    try:
        _check_header(header)
        _check_types(arrays, _OF_SHARDS if header["shards"] else _OF_FILES)
        _check_images(arrays, num_classes=len(header["classes"]))
        if header["shards"]:
            _check_places(header, arrays)
        else:
            _check_names(arrays)
    except ValueError as error:
        return str(error)
    return None


def _require(condition: bool | np.bool_, problem: str) -> None:  # noqa: FBT001 -- as assert
    if not condition:
        raise ValueError(problem)


def _check_header(header: Header) -> None:
    _require(header.keys() == _HEADER.keys(), f"its header has the keys {sorted(header)}")
    for key, shape in _HEADER.items():
        _require(_has_shape(header[key], shape), f"{key} in its header is of another type")
    classes = header["classes"]
    _require(len(set(classes)) == len(classes) > 0, "its classes are empty or not unique")
    folders, shards = ([name for name, *_ in header[key]] for key in ("folders", "shards"))
    _require(folders == ([] if shards else classes), "its class folders are not its classes")
    _require(not any("/" in name for name in (*folders, *shards)), "a name in it has a /")


def _has_shape(value: object, shape: object) -> bool:
    if isinstance(shape, list):
        return isinstance(value, list) and all(_has_shape(item, shape[0]) for item in value)
    if isinstance(shape, tuple):
        if not isinstance(value, list) or len(value) != len(shape):
            return False
        return all(map(_has_shape, value, shape))
    if type(value) is int:
        return shape is int and abs(value) < 2**63
    # A lone surrogate raises ValueError in os.fsencode.
    return shape is str and isinstance(value, str) and b"\0" not in os.fsencode(value)


def _check_types(arrays: Arrays, expected: Mapping[str, npt.DTypeLike]) -> None:
    _require(arrays.keys() == expected.keys(), f"its arrays are {', '.join(sorted(arrays))}")
    for name, kind in expected.items():
        array = arrays[name]
        _require(array.dtype == kind, f"{name} are {array.dtype}, expected {np.dtype(kind)}")
        _require(array.ndim == 1, f"{name} have {array.ndim} dimensions")
    lengths = {name: len(array) for name, array in arrays.items() if name != "names"}
    _require(len(set(lengths.values())) == 1, f"its arrays have unequal lengths: {lengths}")
    _require(lengths["labels"] > 0, "it lists no images")


def _check_images(arrays: Arrays, *, num_classes: int) -> None:
    _within(arrays, "labels", 0, num_classes - 1)
    _within(arrays, "heights", 1, MAX_SIDE)
    _within(arrays, "widths", 1, MAX_SIDE)
    _within(arrays, "orientations", 1, MOST_ORIENTATION)
    _within(arrays, "num_bytes", 1, MAX_BYTES)


def _check_places(header: Header, arrays: Arrays) -> None:
    _within(arrays, "shards", 0, len(header["shards"]) - 1)
    sizes = np.array([size for _, size, _ in header["shards"]], dtype=np.int64)
    left = sizes[arrays["shards"]] - arrays["num_bytes"]
    outside = np.flatnonzero((arrays["offsets"] < 0) | (arrays["offsets"] > left))
    _require(not len(outside), f"image {outside[:1]} is outside its shard")


def _check_names(arrays: Arrays) -> None:
    ends, names = arrays["name_ends"].astype(np.int64), arrays["names"]
    _require(np.diff(ends, prepend=0).min() > 0, "an image in it has no name")
    _require(ends[-1] == len(names), f"its names have {len(names)} bytes, expected {ends[-1]}")
    _require(not np.isin(names, (0, ord("/"))).any(), "a name in it has a / or a NUL")
    _require(np.diff(arrays["labels"], prepend=0).min() >= 0, "its labels are not sorted")


def _within(arrays: Arrays, name: str, least: int, most: int) -> None:
    smallest, largest = arrays[name].min(), arrays[name].max()
    _require(
        least <= smallest and largest <= most,
        f"{name} range from {smallest} to {largest}, expected {least} to {most}",
    )
