"""What a process did in each of its updates: written by observed runs, read by the comparison.

A run of W workers leaves a file of JSON lines for each worker. Tensors are recorded as digests of
their bits and, in the updates that are compared, as linear sketches, from which the distance of two
tensors can be estimated without either of them.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SKETCH = 16
"""Numbers of a sketch: a distance estimated from these has a standard deviation of 18 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a record keeps of a tensor."""

    digest: str
    """Digest of type, shape and bits: equal tensors have equal ones."""

    norm: float
    """Euclidean norm."""

    sketch: tuple[float, ...] = ()
    """Sums of the elements at fixed random places with fixed random signs; empty if there is
    none."""

    def distance(self, other: "Trace") -> float:
        """Estimate the relative distance of two tensors: 0 for equal bits, NaN without sketches."""
        if self.digest == other.digest:
            return 0.0
        if not self.sketch or len(self.sketch) != len(other.sketch):
            return math.nan
        scale = max(self.norm, other.norm)
        return math.dist(self.sketch, other.sketch) / scale if scale else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch that the training loop read."""

    loader: int
    """Number of the loader, in the order in which the process first read from each; -1 for inputs
    of the model that no DataLoader gave."""

    epoch: int
    """Number of earlier iterations over this loader in this process."""

    position: int
    """Number of batches that this iteration gave before."""

    indices: tuple[int, ...] | None = None
    """Sample numbers in the data set, also of a Subset in the whole one; None if the loader's
    sampler does not draw them."""

    samples: tuple[str, ...] = ()
    """Digest of each sample's inputs, as the loop got them: after augmentation."""

    labels: tuple[str, ...] = ()
    """Digest of each sample's label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """An update of an optimizer, and the state of the process just before it."""

    number: int
    """Number of earlier updates of this process, of all of its optimizers."""

    optimizer: int = 0
    """Number of the optimizer, in the order of their first updates."""

    batches: tuple[Batch, ...] = ()
    """Batches read since the update before, by training loops: several with accumulation."""

    epoch: int | None = None
    """Last epoch that was passed to a sampler's or data set's `set_epoch`; None without a call."""

    rates: tuple[float, ...] = ()
    """Learning rate of each parameter group."""

    settings: tuple[Mapping[str, float], ...] = ()
    """Other numbers of each parameter group: momentum, weight_decay, betas.0."""

    sizes: tuple[int, ...] = ()
    """Number of tensors in each parameter group."""

    schedules: tuple[int, ...] = ()
    """`last_epoch` of each of torch's schedulers, in the order in which they were made."""

    schedule_moves: int = 0
    """Calls of schedulers' `step` since the update before."""

    scale: float | None = None
    """Loss scale of torch's GradScaler; None without one."""

    scale_growth: int | None = None
    """GradScaler's number of updates without an overflow; None without one."""

    loss: float | None = None
    """Last loss on which `backward` was called, if it is a number; None if it was not seen."""

    weights: Mapping[str, Trace] = field(default_factory=dict)
    """Parameters of the model by name, without prefixes of wrappers (module., _orig_mod.);
    `group 0.3` for a tensor of the optimizer that is in no module that was called."""

    gradients: Mapping[str, Trace] = field(default_factory=dict)
    """Gradients that the optimizer uses, by parameter."""

    buffers: Mapping[str, Trace] = field(default_factory=dict)
    """Buffers of the model by name, before the update's first forward pass: running statistics."""

    state: Mapping[str, Trace | float] = field(default_factory=dict)
    """State of the optimizer: `parameter:key`, for example `conv1.weight:momentum_buffer`."""

    averages: Mapping[str, Trace] = field(default_factory=dict)
    """Weights of averaged copies of the model (EMA, SWA): `number:name`."""

    averaged_updates: int | None = None
    """Updates that the average counts (`n_averaged`); None without a count."""

    generators: Mapping[str, str] = field(default_factory=dict)
    """Digests of the states of random generators before the update's first forward pass: python,
    numpy, torch, cuda:0; without those that were never seeded nor drawn from."""

    masks: tuple[str, ...] = ()
    """Digests of what decides the masks of dropout layers (state of the generator, shape and
    probability), in the order of their calls since the update before."""

    saved: tuple[str, ...] = ()
    """Names of the files, without their folders, that torch.save wrote in the loop's thread since
    the update before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The record of a process: what it is, and its updates."""

    rank: int
    size: int
    """Number of workers."""

    workers_of_loader: int = 0
    """Loader processes of the training loader."""

    resumed_from: tuple[str, ...] = ()
    """Names of the files that torch.load read before the first update, without their folders."""

    saved_aside: tuple[str, ...] = ()
    """Names of the files that torch.save wrote in other threads, where chance decides the update.
    """

    missing_keys: tuple[str, ...] = ()
    """Keys of the model that `load_state_dict(strict=False)` did not find, without a message."""

    unexpected_keys: tuple[str, ...] = ()
    """Keys of the file that such a call did not use."""

    updates: tuple[Update, ...] = ()

    end: Update | None = None
    """State after the last update, without batches; None if the process ended before it."""


Run = tuple[Worker, ...]
"""The records of a run's workers, by rank."""


def write_line(update: Update) -> str:
    """Return an update as a line of JSON."""
    return json.dumps(asdict(update), separators=(",", ":"))


def read_update(line: str) -> Update:
    """Return the update of a line that `write_line` wrote."""
    fields: dict[str, Any] = json.loads(line)
    for name in ("weights", "gradients", "buffers", "state", "averages"):
        fields[name] = {key: _trace_or_number(value) for key, value in fields[name].items()}
    fields["batches"] = tuple(_tuples(Batch, it) for it in fields["batches"])
    for name in ("rates", "settings", "sizes", "schedules", "masks", "saved"):
        fields[name] = tuple(fields[name])
    return Update(**fields)


def read_updates(path: Path) -> Iterator[Update]:
    """Yield the updates of a worker's file, without a line that was cut off."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield read_update(line)


def _trace_or_number(value: Any) -> Trace | float:  # noqa: ANN401 -- of JSON
    if not isinstance(value, dict):
        return float(value)
    return Trace(digest=value["digest"], norm=value["norm"], sketch=tuple(value["sketch"]))


def _tuples(kind: type[Batch], fields: Mapping[str, Any]) -> Batch:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return kind(**values)
