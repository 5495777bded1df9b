"""Checkpoints: a recipe and the state of its run between two updates, as files.

A checkpoint is one file of safetensors: the tensors, a header of plain JSON values, and the CRC-32
of everything before it. It contains no code. A file gets its name when it is complete and on the
disk. A thread of its own writes it while training continues with the next update.
"""

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import safetensors.torch
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from largebatch.errors import CheckpointError, RecipeError
from largebatch.optim.schedule_free import is_averaging
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_recipe
from largebatch.storage import CHECKSUM_BYTES, checksum, whole_file
from largebatch.tracking.events import StageResult
from largebatch.training.state import Progress

FORMAT = 5

HEADER, CHECKSUM = "~header", "~~crc32"
"""Names of two arrays of bytes, which safetensors puts last, in the order of their names."""

_TENSOR = "$tensor"
"""Key, in the header, of the name of a tensor."""

_BYTES = {"bool": torch.bool, "int8": torch.int8}
"""Types of one byte, saved as plain bytes, because the checksum must be the last array."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
}
"""Names of the types of tensors in safetensors."""

_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_LOG = logging.getLogger(__name__)
_PARTS = ("model", "optimizer", "scaler", "ema", "snapshot", "extra")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint file."""

    recipe: Recipe
    progress: Progress
    stages: list[StageResult]
    """Stages that had ended."""

    state: dict[str, Any]
    """The whole state, as returned by TrainState.state_dict."""

    origin: dict[str, Any] = field(default_factory=dict)
    """Origin of the state: `plan`, `data` (identifies the images), `classes` (names by label),
    `versions`, `trackers` (ids of the run)."""

    @classmethod
    def of(cls, recipe: Recipe, state: dict[str, Any], **origin: object) -> Self:
        """Return a checkpoint; raise KeyError, TypeError or ValueError for an incomplete state."""
        _require_types(state)
        if not isinstance(origin.get("trackers", {}), dict):
            raise TypeError("trackers is no mapping")
        _CLASSES.validate_python(origin.get("classes", []), strict=True)
        progress = _PROGRESS.validate_json(json.dumps(state["progress"]), strict=True)
        stages = _STAGES.validate_python(state["stages"])
        return cls(recipe, progress, stages, state, origin)

    def model(self, *, source: Path) -> dict[str, Tensor]:
        """Return the weights and statistics to evaluate.

        Raises CheckpointError, which begins with `source`, for a Schedule-Free run before the end
        of its schedule: the model to evaluate is an average, and its statistics need images.
        """
        if is_averaging(self.state["optimizer"]["param_groups"]):
            raise CheckpointError(
                f"{source}: holds a Schedule-Free run before the end of its schedule, and so not "
                f"the average that is evaluated: `largebatch polish {source} --out DIR` writes it "
                "with its BatchNorm statistics; or resume the run to its end"
            )
        weights: dict[str, Tensor] = self.state["model"]
        return weights


_PROGRESS = TypeAdapter(Progress)
_STAGES = TypeAdapter(list[StageResult])
_CLASSES = TypeAdapter(list[str])


class Retention(NamedTuple):
    """The checkpoints of a run that stay on the disk, besides the one with the best accuracy."""

    last: int
    every: int | None
    """Number of updates whose multiples are retained; None: no others."""

    def superseded(self, paths: Iterable[Path], *, best: int | None) -> list[Path]:
        """Return the paths that may be deleted."""
        steps = {path: int(found[1]) for path in paths if (found := _NAME.fullmatch(path.name))}
        newest = sorted(steps, key=steps.__getitem__)[-self.last :]
        return [
            path
            for path, step in steps.items()
            if path not in newest and step != best and not (self.every and step % self.every == 0)
        ]


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `folder/step-<step>.safetensors` atomically.

    Raises CheckpointError if it cannot be written; an earlier file of this name then stays.
    """
    path = folder / f"step-{checkpoint.progress.step:08d}.safetensors"
    try:
        _require_finite(checkpoint.state)
    except ValueError as error:
        raise CheckpointError(f"{path}: not written: {error}") from None
    parts = _pack(checkpoint)
    try:
        with whole_file(path) as file:
            for part in parts:
                file.write(part)
            file.write(checksum(parts))
    except OSError as error:
        there = "the checkpoints before it are as they were: make room and go on with --resume"
        if not _newest_first(folder):
            there = "there is no checkpoint before it: make room; --resume begins the run again"
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}; {there}") from None
    return path


class Writer:
    """Writes checkpoints into a folder in the background, one at a time; worker 0 only."""

    def __init__(self, folder: Path, retention: Retention) -> None:
        self._folder, self._retention = folder, retention
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=_give_way_to_training
        )
        self._under_way: Future[None] | None = None

    def write(self, checkpoint: Checkpoint) -> None:
        """Start to write a checkpoint, whose tensors must not change any more.

        Raises CheckpointError if the previous one could not be written.
        """
        self.wait()
        self._under_way = self._pool.submit(self._write, checkpoint)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk; raise CheckpointError if that fails."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _write(self, checkpoint: Checkpoint) -> None:
        if not self._folder.parent.is_dir():
            raise CheckpointError(f"{self._folder.parent}: was removed while the run wrote to it")
        write_checkpoint(self._folder, checkpoint)
        best = checkpoint.progress.best_step
        for path in self._retention.superseded(self._folder.iterdir(), best=best):
            path.unlink(missing_ok=True)


def _give_way_to_training() -> None:
    """Run this thread at the lowest priority, on Linux only."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def load_checkpoint(path: Path) -> Checkpoint:
    """Load a checkpoint to the CPU. Raises CheckpointError if it cannot be read."""
    return parse_checkpoint(_read(path), source=str(path))


def parse_checkpoint(content: bytes, *, source: str) -> Checkpoint:
    """Read a checkpoint from the bytes of its file; `source` begins every message.

    Raises CheckpointError if it is damaged, incomplete or of another version.
    """
    body = memoryview(content)
    if content[8:10] != b'{"':
        raise CheckpointError(f"{source}: not a checkpoint of this version of largebatch")
    if checksum([body[:-CHECKSUM_BYTES]]) != body[-CHECKSUM_BYTES:]:
        raise CheckpointError(f"{source}: damaged: its checksum does not match its content")
    try:
        tensors = safetensors.torch.load(content)
        header = json.loads(tensors.pop(HEADER).numpy().tobytes())
        del tensors[CHECKSUM]
        if header["format"] not in {4, FORMAT}:
            raise CheckpointError(f"{source}: not a checkpoint of this version of largebatch")
        if not isinstance(header["recipe"], str):
            raise TypeError("recipe is not a text")
        recipe = parse_recipe(header["recipe"], source="its recipe")
        state = _unpack(header["state"], tensors)
        _upgrade(state, version=header["format"])
        state["optimizer"]["state"] = {
            int(number): entry for number, entry in state["optimizer"]["state"].items()
        }
        _require_finite(state)
        return Checkpoint.of(recipe, state, **header["origin"])
    except ValidationError as error:
        reason = f"{'.'.join(map(str, error.errors()[0]['loc']))}: {error.errors()[0]['msg']}"
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError, AttributeError) as e:
        reason = str(e)
    except RecipeError as error:
        reason = str(error)
    raise CheckpointError(f"{source}: not a complete checkpoint: {reason}")


class Found(NamedTuple):
    """The newest readable checkpoint of a folder."""

    path: Path
    content: bytes
    skipped: tuple[str, ...]
    """Errors of newer checkpoints, which cannot be read."""

    def warn(self) -> None:
        """Log a warning for each newer checkpoint that cannot be read."""
        for problem in self.skipped:
            _LOG.warning("%s; going back to %s", problem, self.path.name)


def newest_checkpoint(folder: Path) -> Found | None:
    """Return the newest readable checkpoint; None if the folder has no checkpoint.

    Raises CheckpointError if there are checkpoints and none can be read.
    """
    problems: list[str] = []
    for path in _newest_first(folder):
        try:
            content = _read(path)
            parse_checkpoint(content, source=str(path))
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return Found(path, content, tuple(problems))
    if problems:
        raise CheckpointError("\n".join(problems))
    return None


def set_aside_damaged(folder: Path, *, step: int) -> None:
    """Rename the checkpoints after `step`, the newest one that can be read.

    Otherwise retention would count them in place of new ones.
    """
    for path in _newest_first(folder):
        found = _NAME.fullmatch(path.name)
        if found and int(found[1]) > step:
            path.rename(path.with_name(f"damaged-{path.name}"))


def _newest_first(folder: Path) -> list[Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), reverse=True)


def _pack(checkpoint: Checkpoint) -> list[bytes | memoryview]:
    """Return the content of a file, in parts, without its checksum.

    The bytes are those of safetensors, whose own `save` copies all tensors three times: for
    ResNet-50 that delayed training by two thirds of an update.
    """
    tensors: dict[str, Tensor] = {}
    header = {
        "format": FORMAT,
        "recipe": dump_recipe(checkpoint.recipe),
        "origin": checkpoint.origin,
        "state": _plain(checkpoint.state, tensors),
    }
    text = json.dumps(header).encode()
    tensors[HEADER] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    tensors[CHECKSUM] = torch.zeros(CHECKSUM_BYTES, dtype=torch.uint8)
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    entries, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        kind, shape = _DTYPES[tensor.dtype], list(tensor.shape)
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    words = json.dumps(entries, separators=(",", ":")).encode()
    words += b" " * (-len(words) % 8)
    arrays = [tensor.detach().contiguous().flatten() for _, tensor in ordered[:-1]]
    contents = [array.view(torch.uint8).numpy().data for array in arrays]
    return [len(words).to_bytes(8, "little") + words, *contents]


def _plain(value: Any, tensors: dict[str, Tensor], name: str = "") -> Any:  # noqa: ANN401 -- JSON
    """Return JSON values with each tensor replaced by its name; add the tensors to `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = value
        if value.dtype in _BYTES.values():
            tensors[name] = value.view(torch.uint8)
            return {_TENSOR: name, "dtype": str(value.dtype).removeprefix("torch.")}
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): _plain(each, tensors, f"{name}/{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, tensors, f"{name}/{key}") for key, each in enumerate(value)]
    return value


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401 -- JSON
    """Return the values with the tensors back in place; the inverse of `_plain`."""
    if isinstance(value, dict):
        if _TENSOR in value:
            tensor = tensors[value[_TENSOR]]
            return tensor.view(_BYTES[value["dtype"]]) if "dtype" in value else tensor
        return {key: _unpack(each, tensors) for key, each in value.items()}
    if isinstance(value, list):
        return [_unpack(each, tensors) for each in value]
    return value


def _upgrade(state: dict[str, Any], *, version: int) -> None:
    """Move the state of a protocol in format 4 to the state of extensions, as in format 5."""
    if version == FORMAT:
        return
    momentum, progress = state.pop("protocol", {}), state["progress"]
    counts = {name: progress.pop(name, []) for name in ("gradients", "lost")}
    state["extra"] = {"protocol": {"momentum": momentum, **counts}}


def copy_state(value: Any) -> Any:  # noqa: ANN401 -- a tree of tensors and plain values
    """Return a copy on the CPU that training does not change."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()  # sync: a checkpoint is due
    if isinstance(value, Mapping):
        return {key: copy_state(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [copy_state(each) for each in value]
    return value


def _require_types(state: Mapping[str, Any]) -> None:
    """Raise TypeError unless the parts of a state are what those who load them expect."""
    for key in _PARTS:
        if not isinstance(state[key], dict):
            raise TypeError(f"{key} is no mapping")
    for key in ("model", "ema"):
        for name, value in state[key].items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{key}/{name} is not a tensor")
    groups = state["optimizer"]["param_groups"]
    if not (isinstance(groups, list) and all(isinstance(group, dict) for group in groups)):
        raise TypeError("optimizer/param_groups is not a list of mappings")


def _require_finite(state: Mapping[str, Any]) -> None:
    """Raise ValueError if weights are not finite; a stage with a snapshot may be rolled back."""
    tensors: dict[str, Tensor] = {}
    _plain(state["snapshot"] or state, tensors)
    bad = [
        name.lstrip("/")
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
    if bad:
        raise ValueError(f"{bad[0]} holds values that are not finite ({len(bad)} tensors in all)")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such checkpoint or run folder") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the checkpoint: {error.strerror}") from None
