"""Checkpoints: a recipe and the state of its run between two updates, as files.

A checkpoint is one file of safetensors: the tensors, and in its metadata one JSON of everything
that is not a tensor and the CRC-32 of both. It contains no code. A file gets its name when it is
complete and on the disk. A thread writes it while training continues with the next update.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import safetensors.torch
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn

from largebatch.data.pipeline import Pipeline
from largebatch.distributed.agreement import require_same_bits
from largebatch.distributed.backend import Backend
from largebatch.errors import CheckpointError, RecipeError, printable, shorten
from largebatch.formatting import plural
from largebatch.optim.schedule_free import is_averaging
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_yaml
from largebatch.storage import checksum, whole_path
from largebatch.tracking.events import StageResult
from largebatch.training.state import Progress, TrainState
from largebatch.training.step_log import Requests

FORMAT = 7

CONTENT, CHECKSUM = "largebatch", "crc32"
"""Keys, in the metadata, of the JSON and of the checksum in hexadecimal digits."""

_TENSOR = "$tensor"
"""Key, in the JSON, of the name of a tensor."""

_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_LOG = logging.getLogger(__name__)
_PARTS = ("model", "optimizer", "scaler", "ema", "snapshot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Origin of the state of a checkpoint."""

    data: dict[str, Any] = field(default_factory=dict)
    """Identifies the images, by split."""

    classes: list[str] = field(default_factory=list)
    """Names by label."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint file."""

    recipe: Recipe
    progress: Progress
    stages: list[StageResult]
    """Stages that had ended."""

    state: dict[str, Any]
    """The whole state, as returned by TrainState.state_dict."""

    origin: Origin = Origin()

    @classmethod
    def of(cls, recipe: Recipe, state: dict[str, Any], origin: object = Origin()) -> Self:
        """Return a checkpoint; raise KeyError, TypeError or ValueError for an incomplete state."""
        for key in _PARTS:
            if not isinstance(state[key], dict):
                raise TypeError(f"{key} must be a mapping")
        progress = _PROGRESS.validate_json(json.dumps(state["progress"]), strict=True)
        stages = _STAGES.validate_python(state["stages"])
        return cls(recipe, progress, stages, state, _ORIGIN.validate_python(origin))

    def model(self, *, source: Path) -> dict[str, Tensor]:
        """Return the weights and statistics to evaluate.

        Raises CheckpointError, which begins with `source`, for a Schedule-Free run before the end
        of its schedule: the model to evaluate is an average, and its statistics need images.
        """
        if is_averaging(self.state["optimizer"]["param_groups"]):
            raise CheckpointError(
                f"{source}: holds a Schedule-Free run before the end of its schedule, without its "
                f"average: resume it, or run `largebatch polish {source} --out DIR`"
            )
        weights: dict[str, Tensor] = self.state["model"]
        return weights


_PROGRESS = TypeAdapter(Progress)
_STAGES = TypeAdapter(list[StageResult])
_ORIGIN = TypeAdapter(Origin)


def write_checkpoint(
    folder: Path, checkpoint: Checkpoint, *, constants: Mapping[str, Tensor] = MappingProxyType({})
) -> Path:
    """Write `folder/step-<step>.safetensors` atomically; `constants` are those of `constants_of`.

    Raises CheckpointError if it cannot be written; an earlier file of this name then stays.
    """
    path = folder / f"step-{checkpoint.progress.step:08d}.safetensors"
    tensors: dict[str, Tensor] = {}
    content = {
        "format": FORMAT,
        "recipe": dump_yaml(checkpoint.recipe),
        "origin": asdict(checkpoint.origin),
        "state": _plain(checkpoint.state, tensors),
    }
    # A stage with a snapshot may be rolled back: then only the snapshot has to be finite.
    snapshot = {name: value for name, value in tensors.items() if name.startswith("/snapshot/")}
    known = {f"/model/{name}": places for name, places in constants.items()}
    known |= {f"/snapshot{name}": places for name, places in known.items()}
    require_finite(snapshot or tensors, known, source=f"{path}: not written")
    text = json.dumps(content)
    metadata = {CONTENT: text, CHECKSUM: _checksum(text, tensors)}
    try:
        with whole_path(path) as partial:
            safetensors.torch.save_file(tensors, partial, metadata)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{path}: cannot be written: {reason}; free disk space and resume with --resume"
        ) from None
    return path


class Writer:
    """Writes checkpoints into a folder in the background, one at a time; worker 0 only.

    The `keep_last` newest ones stay on the disk, besides the one with the best accuracy.
    `constants` are those of `constants_of`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int,
        constants: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._constants = constants
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None
        self.before: Callable[[], object] = _nothing
        """Called in the thread before a checkpoint is written."""

        self.after: Callable[[], object] = _nothing
        """Called in the thread when a checkpoint is on the disk."""

        self.seconds = 0.0
        """Processor seconds of the last file that was written, which training may have lacked."""

    def write(self, checkpoint: Checkpoint) -> None:
        """Start to write a checkpoint, whose tensors must not change any more.

        Raises CheckpointError if the previous one could not be written.
        """
        self.wait()
        self._under_way = self._pool.submit(self._write, checkpoint)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk; raise CheckpointError if that fails."""
        under_way = self._under_way
        self._under_way = None
        if under_way is not None:
            under_way.result()

    def _write(self, checkpoint: Checkpoint) -> None:
        if not self._folder.parent.is_dir():
            raise CheckpointError(f"{self._folder.parent}: was removed while the run wrote to it")
        self.before()
        begin = time.thread_time()
        write_checkpoint(self._folder, checkpoint, constants=self._constants)
        self.seconds = time.thread_time() - begin
        for path in _newest_first(self._folder)[self._keep_last :]:
            if _step(path) != checkpoint.progress.best_step:
                path.unlink(missing_ok=True)
        self.after()


def _nothing() -> None:
    """Do nothing: no one follows the checkpoints of a writer."""


def load_checkpoint(path: Path) -> Checkpoint:
    """Load a checkpoint to the CPU. Raises CheckpointError if it cannot be read."""
    return parse_checkpoint(_read(path), source=str(path))


def parse_checkpoint(content: bytes, *, source: str) -> Checkpoint:
    """Read a checkpoint from the bytes of its file; `source` begins every message.

    Raises CheckpointError if it is damaged, incomplete or of another version.
    """
    unrelated = CheckpointError(
        f"{source}: not a checkpoint of largebatch: it does not hold the state of a run"
    )
    # A file of safetensors is the length of its header, 8 bytes, and the header, a JSON object.
    if content[8:10] != b'{"':
        raise unrelated
    try:
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length])["__metadata__"]
        text = metadata[CONTENT]
        expected = metadata[CHECKSUM]
        tensors = safetensors.torch.load(content)
    except KeyError:
        raise unrelated from None
    except (SafetensorError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: damaged: {error}"[:500]) from None
    if _checksum(text, tensors) != expected:
        raise CheckpointError(f"{source}: damaged: its checksum does not match its content")
    try:
        header = json.loads(text)
        if header["format"] != FORMAT:
            raise CheckpointError(
                f"{source}: not a checkpoint of this version of largebatch: it has format "
                f"{header['format']!r:.20}, expected {FORMAT}; use the version that wrote it"
            )
        if not isinstance(header["recipe"], str):
            raise TypeError("recipe must be a text")
        recipe = parse_recipe(header["recipe"], source="its recipe")
        state = _unpack(header["state"], tensors)
        model = state["model"]
        is_named = isinstance(model, dict)
        if not is_named or not all(isinstance(value, Tensor) for value in model.values()):
            raise TypeError("model must hold tensors by name")
        if not isinstance(state["optimizer"]["param_groups"], list):
            raise TypeError("param_groups must be a list")
        state["optimizer"]["state"] = {
            int(number): entry for number, entry in state["optimizer"]["state"].items()
        }
        return Checkpoint.of(recipe, state, header["origin"])
    except ValidationError as error:
        reason = f"{'.'.join(map(str, error.errors()[0]['loc']))}: {error.errors()[0]['msg']}"
    except (KeyError, TypeError, ValueError, RecursionError, AttributeError, RecipeError) as error:
        reason = str(error)
    raise CheckpointError(f"{source}: not a complete checkpoint: {reason}")


class NewestCheckpoint(NamedTuple):
    """The newest readable checkpoint of a folder."""

    path: Path
    checkpoint: Checkpoint
    content: bytes
    """The file, for workers that do not read it."""


def newest_checkpoint(folder: Path) -> NewestCheckpoint | None:
    """Return the newest readable checkpoint; None if the folder has no checkpoint.

    Logs a warning for each newer one that cannot be read; raises CheckpointError if none can.
    """
    problems: list[str] = []
    for path in _newest_first(folder):
        try:
            content = _read(path)
            checkpoint = parse_checkpoint(content, source=str(path))
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            _LOG.warning("%s; going back to %s", problem, path.name)
        return NewestCheckpoint(path, checkpoint, content)
    if problems:
        raise CheckpointError("\n".join(problems))
    return None


def set_aside_damaged(folder: Path, *, step: int) -> None:
    """Rename the checkpoints after `step`, the newest one that can be read.

    Otherwise retention would count them in place of new ones.
    """
    for path in _newest_first(folder):
        if _step(path) > step:
            path.rename(path.with_name(f"damaged-{path.name}"))


def _newest_first(folder: Path) -> list[Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _plain(value: Any, tensors: dict[str, Tensor], name: str = "") -> Any:  # noqa: ANN401 -- JSON
    """Return JSON values with each tensor replaced by its name; add the tensors to `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, tensors, f"{name}/{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, tensors, f"{name}/{key}") for key, item in enumerate(value)]
    return value


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401 -- JSON
    """Return the values with the tensors back in place; the inverse of `_plain`."""
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        return {key: _unpack(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    return value


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the CRC-32 of the JSON and of the names, types, shapes and bytes of the tensors."""
    pieces: list[bytes | memoryview] = [text.encode()]
    for name, tensor in sorted(tensors.items()):
        # Two tensors may have the same bytes, in another type or shape.
        pieces.append(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        pieces.append(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    return checksum(pieces).hex()


def copy_state(value: Any) -> Any:  # noqa: ANN401 -- a tree of tensors and plain values
    """Return a copy on the CPU that training does not change."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()  # sync: a checkpoint is due
    if isinstance(value, Mapping):
        return {key: copy_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copy_state(item) for item in value]
    return value


def require_storable(model: nn.Module, name: str) -> None:
    """Raise RecipeError if a checkpoint cannot store a model's state, or load it again.

    Found before the run: the first checkpoint may be hours away, and the first load a crash later.
    """
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            reason = "is not a tensor, so a checkpoint cannot store it; make it a buffer"
        elif value.layout is not torch.strided:
            reason = "is sparse, so a checkpoint cannot store it; register its to_dense()"
        elif not _is_storable(value.dtype):
            reason = f"has type {value.dtype}, which a checkpoint cannot store; convert it"
        elif value.numel() and _overlaps(value):
            reason = (
                "has elements that share memory, as expand() makes them, so no checkpoint can be "
                "loaded into it; register its clone()"
            )
        else:
            continue
        raise RecipeError(f"model.name: {name}: {key} {reason}")


def _is_storable(dtype: torch.dtype) -> bool:
    try:
        safetensors.torch.load(safetensors.torch.save({"empty": torch.empty(0, dtype=dtype)}))
    except (KeyError, RuntimeError, SafetensorError):
        return False
    return True


def _overlaps(tensor: Tensor) -> bool:
    """Return True if two elements of a tensor may be at one place in memory."""
    end = 0  # largest distance of two elements along the axes so far, from the smallest stride
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= end:
                return True
            end += (size - 1) * stride
    return False


def constants_of(model: nn.Module) -> dict[str, Tensor]:
    """Return where a new model is not finite, by the names of its tensors.

    These are constants, such as the -inf of a causal mask: they may be stored. What was finite in
    the new model and is not any more is an error.
    """
    constants: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        infinite = ~_is_finite(tensor).cpu()  # sync: once, before the run
        if infinite.any():
            constants[name] = infinite
    return constants


def require_finite(
    tensors: Mapping[str, Tensor], constants: Mapping[str, Tensor], *, source: str
) -> None:
    """Raise CheckpointError, which begins with `source`, unless all but constants is finite.

    `constants` are those of `constants_of`; the tensors are on the CPU.
    """
    bad = []
    for name, tensor in tensors.items():
        lost = ~_is_finite(tensor)
        if name in constants and constants[name].shape == lost.shape:
            lost &= ~constants[name]
        if lost.any():
            bad.append(name.lstrip("/"))
    if bad:
        raise CheckpointError(
            f"{source}: {plural(len(bad), 'tensor has', 'tensors have')} values that are not "
            f"finite: {shorten(bad, most=3)}"
        )


def _is_finite(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() and tensor.element_size() == 1:
        tensor = tensor.float()  # torch has no isfinite for types of 8 bits
    return tensor.isfinite()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such checkpoint or run folder") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the checkpoint: {error.strerror}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """Writes the state of a run into its checkpoints, and reads it."""

    recipe: Recipe
    """Written into every checkpoint."""

    state: TrainState
    backend: Backend
    pipeline: Pipeline
    requests: Requests
    writer: Writer

    def is_due(self, *, since: int) -> bool:
        """Return True if a checkpoint is due; `since` is the update of the previous call."""
        every = self.recipe.execution.checkpoints.every_steps
        return self._is_due(every, since=since) or self.requests.save_due

    def comparison_is_due(self, *, since: int) -> bool:
        """Return True if the weights of the workers are to be compared; `since` is as above."""
        return self._is_due(self.recipe.execution.compare_every, since=since)

    def _is_due(self, every: int | None, *, since: int) -> bool:
        return every is not None and self.state.progress.step // every > since // every

    def save(self) -> None:
        """Start to write a checkpoint of the state, which must be the same on every worker.

        Raises CheckpointError on worker 0, which writes, if the previous checkpoint could not be
        written; DesynchronizedError as `compare`.
        """
        begin = time.perf_counter()
        if self.recipe.execution.compare_every is not None:
            self.compare()
        if self.backend.rank == 0:
            checkpoint = Checkpoint.of(
                self.recipe,
                copy_state(self.state.state_dict()),
                Origin(
                    data=self.pipeline.splits,
                    classes=list(map(printable, self.pipeline.classes)),
                ),
            )
            self.writer.write(checkpoint)
        seconds = time.perf_counter() - begin + self.writer.seconds
        self.requests.note_saved(seconds=seconds)

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk; raises as `save` does."""
        self.writer.wait()

    def compare(self) -> None:
        """Raise DesynchronizedError on every worker unless all have the same weights."""
        tensors = self.state.model.state_dict().values()
        when = f"step {self.state.progress.step}"
        require_same_bits(tensors, self.backend, self.backend.device, when=when)

    def restore(self, checkpoint: Checkpoint, *, source: str = "the checkpoint") -> None:
        """Load the state of a checkpoint.

        Raises CheckpointError, which begins with `source`, if the checkpoint is of another run.
        """
        if checkpoint.progress.step > self.pipeline.plan.steps:
            self.state.begin_affine()
        with require_fit(source):
            _require_types(self.state.model, checkpoint.state["model"])
            self.state.load_state_dict(checkpoint.state)
        self.state.progress = replace(checkpoint.progress)
        self.state.stages = list(checkpoint.stages)


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], *, source: str) -> None:
    """Load the weights of a checkpoint into a new model.

    Raises CheckpointError, which begins with `source`, if they do not fit or are not finite.
    """
    require_finite(weights, constants_of(model), source=source)
    with require_fit(source):
        _require_types(model, weights)
        model.load_state_dict(weights)


def _require_types(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise TypeError if weights would be converted: int8 to zeros, 1e300 to infinity."""
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or name not in weights:
            continue
        if weights[name].dtype != tensor.dtype:
            raise TypeError(f"{name} has type {weights[name].dtype}, expected {tensor.dtype}")


@contextmanager
def require_fit(source: str) -> Iterator[None]:
    """Raise CheckpointError, which begins with `source`, if a saved state cannot be loaded."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{source}: does not fit this run: {type(error).__name__}: {reason[:500]}"
        ) from None
