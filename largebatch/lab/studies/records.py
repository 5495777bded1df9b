"""What the records of all kinds of studies hold: whose they are, where, when and beside what.

A record counts for one run only: the recipe, the variant, the seed and the definition of its cell
are written into it and checked whenever it is read, so a file that was copied or renamed is
refused. What else ran on the machine is measured during each run, since a finding about time
rests on a quiet machine (`doubts.py`).
"""

import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import to_json

from largebatch import accelerator
from largebatch.distributed.environment import available_cores
from largebatch.errors import StudyError
from largebatch.optional import require_psutil
from largebatch.report.run import first_problem
from largebatch.tracking.environment import source_commit, versions
from largebatch.tracking.events import Measured

Json = dict[str, Any]

Share = Annotated[float, Field(ge=0, le=1)]
"""A fraction of 1."""

Count = Annotated[int, Field(ge=0, le=2**53)]
"""A number of things that float64 has exactly."""

Duration = Annotated[float, Field(ge=1e-9, le=1e9)]
"""Seconds of an update: neither below a clock's resolution nor beyond 30 years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """A run of a study of any kind; each kind adds its results."""

    recipe: str
    variant: str
    seed: int
    commit: str | None
    """Commit of the source tree, with `+` if it had changes; None outside a git checkout."""

    host: str
    hardware: str
    begun: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    ended: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Start and end of the run, or of its last part, in seconds since 1970."""

    cores: Annotated[Count, Field(ge=1)]
    """Number of cores that the run could use."""

    other_cores: Measured
    """Mean number of these cores that other programs used during the run."""

    diverged: str | None = None
    """Reason of the divergence; None if the run did not diverge."""

    late: Share = 0.0
    """Fraction of gradients that took longer than their set time; 0 where none is set."""


R = TypeVar("R", bound=StudyRecord)


_ADAPTERS: dict[
    type[StudyRecord], TypeAdapter[Any]
] = {}  # building one takes as long as 100 records


def read_as(kind: type[R], record: Mapping[str, Any], *, source: str) -> R:
    """Return a record with its types; raise StudyError if a field is missing or of another type."""
    try:
        if kind not in _ADAPTERS:
            _ADAPTERS[kind] = TypeAdapter(kind)
        result: R = _ADAPTERS[kind].validate_json(json.dumps(record), strict=True)
    except ValidationError as error:
        raise StudyError(f"{source}: {first_problem(error)}; remove the file") from None
    return result


def watched(make: Callable[[], Json]) -> Json:
    """Make a run; return its results, and where, when and beside what it was made.

    Other programs are all but this process and its children that have ended.
    """
    busy = require_psutil().cpu_times
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    def of_others() -> float:
        every = busy(percpu=True)
        # In a container the numbers of cores may exceed what psutil lists; then all are counted.
        own = [every[core] for core in cores] if cores and max(cores) < len(every) else every
        used = sum(
            core.user + getattr(core, "nice", 0.0) + core.system + getattr(core, "steal", 0.0)
            for core in own
        )
        return float(used - sum(os.times()[:4]))

    begun = time.time()
    begun_monotonic = time.monotonic()
    others_before = of_others()
    results = make()
    seconds = time.monotonic() - begun_monotonic
    # Clock ticks of the two counters are not read at the same time: the difference may be below 0.
    others = max(0.0, of_others() - others_before) / seconds if seconds > 0 else math.nan
    threads = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {
        **results,
        "host": platform.node(),
        "hardware": next(iter(accelerator.names()), threads),
        "commit": source_commit(),
        "versions": versions(),
        "begun": begun,
        "ended": time.time(),
        "cores": available_cores(),
        "other_cores": others,
    }


def as_json(record: Mapping[str, Any]) -> Json:
    """Return a record as JSON has it; a number that is not finite becomes None."""
    content: Json = json.loads(to_json(record, inf_nan_mode="null"))
    return content
