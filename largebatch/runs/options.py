"""What the machine and the moment decide about a run, beside its recipe."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from largebatch.distributed.agreement import Facts
from largebatch.distributed.environment import TIMEOUT_SECONDS, BackendName

Resume = bool | Literal["auto"]
"""auto: go on where something is saved, else begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the machine and the moment decide about a run; none of it is in the recipe."""

    out: Path
    """The run folder."""

    data: Path | None = None
    """The images, for a recipe whose data.source is folder."""

    dataset: str | None = None
    """The images, for such a recipe: module:function, which returns data sets (train, val)."""

    imports: tuple[str, ...] = ()
    """Modules that every worker imports first, such as one that registers models with timm."""

    backend: BackendName = "auto"
    overrides: tuple[str, ...] = ()
    """Changes to the recipe of a checkpoint, or of weights, such as execution.device_batch=64."""

    resume: Resume = False
    """Go on from the newest checkpoint in `out`; auto: where there is one."""

    max_steps: int | None = None
    """Stop, resumable, when this many updates have been made in all."""

    time_limit: float | None = None
    """Seconds before which the run stops, resumable."""

    profile: tuple[int, int] | None = None
    """Write a trace of the updates from the first number to the second into `out`, of worker 0;
    both are included, and counted from 1."""

    allow: tuple[str, ...] = ()
    """What may differ from the run that is resumed: keys of the recipe, and `data.index`."""

    report: bool = True
    """Draw the report at the end; `largebatch report` draws it later."""

    timeout: float = TIMEOUT_SECONDS
    """How many seconds a worker waits for another one that does nothing."""

    @property
    def shared(self) -> Facts:
        """What every worker must be given alike; only worker 0 uses the run folder."""
        own = {
            name: value
            for name, value in asdict(self).items()
            if name not in {"out", "backend", "report"}
        }
        return {f"--{name.replace('_', '-')}": value for name, value in own.items()}
