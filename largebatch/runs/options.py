"""The settings of a run that are not in its recipe."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypedDict

from largebatch.distributed.agreement import Facts
from largebatch.distributed.environment import TIMEOUT_SECONDS, BackendName

Resume = bool | Literal["auto"]
"""auto: resume if there is a checkpoint, else start."""


class Machine(TypedDict):
    """Settings of where a run is, as keyword arguments of Options and `run`."""

    data: Path | None
    dataset: str | None
    imports: tuple[str, ...]
    backend: BackendName
    timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of one start of a run, such as its machine; none of them is in the recipe."""

    out: Path
    """The run folder."""

    data: Path | None = None
    """The images, for a recipe whose data.source is folder."""

    dataset: str | None = None
    """The images, for such a recipe, as module:function that returns data sets (train, val)."""

    imports: tuple[str, ...] = ()
    """Modules that every worker imports first, such as one that registers models with timm."""

    backend: BackendName = "auto"
    overrides: tuple[str, ...] = ()
    """Changes to the recipe of a checkpoint or of weights, such as execution.device_batch=64."""

    resume: Resume = False
    """Resume from the newest checkpoint in `out`; auto: if there is one."""

    max_steps: int | None = None
    """Total number of updates after which the run stops, resumable."""

    time_limit: float | None = None
    """Seconds within which the run stops, resumable."""

    profile: tuple[int, int] | None = None
    """First and last update, counted from 1, of the trace that worker 0 writes into `out`."""

    allow: tuple[str, ...] = ()
    """Keys of the recipe, and `data.index`, that may differ from the resumed run."""

    report: bool = True
    """True to draw the report at the end; `largebatch report` draws it later."""

    timeout: float = TIMEOUT_SECONDS
    """Seconds that a worker waits for another one that does nothing."""

    @property
    def machine(self) -> Machine:
        """The settings that runs of one study have in common."""
        return {
            "data": self.data,
            "dataset": self.dataset,
            "imports": self.imports,
            "backend": self.backend,
            "timeout": self.timeout,
        }

    @property
    def shared(self) -> Facts:
        """The options that all workers must share; only worker 0 uses the run folder."""
        own = {
            name: value
            for name, value in asdict(self).items()
            if name not in {"out", "backend", "report"}
        }
        return {f"--{name.replace('_', '-')}": value for name, value in own.items()}
