"""The options of a run that are not in its recipe, declared once.

The command line reads their names, help and types here, and local workers get them as JSON. `run`
writes the same options out as keywords; a test holds the three together.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal, Self

from cyclopts import Group, Parameter, Token
from pydantic import PlainSerializer, PlainValidator

from largebatch.address import Address, Place, place_of
from largebatch.distributed.environment import TIMEOUT_SECONDS, BackendName
from largebatch.errors import DataError, LargebatchError
from largebatch.recipe.installed import installed

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext

Resume = bool | Literal["auto"]
"""auto: resume if there is a checkpoint, else start."""

NEW_FOLDER = Path("runs/<name>-<time>")
"""Default of `out`, in place of which a run gets a folder of its recipe's name and the time."""

_SCALE = {"s": 1, "m": 60, "h": 3600}


def chosen_folder(out: Path, name: str) -> Path:
    """Return `out`; in place of its default a folder of a recipe's name and the time."""
    return Path(f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}") if out == NEW_FOLDER else out


def _seconds(_: object, tokens: Sequence[Token]) -> float:
    text = tokens[0].value
    digits, unit = (text[:-1], text[-1]) if text[-1:] in _SCALE else (text, "s")
    try:
        value = float(digits) * _SCALE[unit]
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"expected seconds, or a number with s, m or h, such as 5m, got {text!r}")
    return value


def _updates(_: object, tokens: Sequence[Token]) -> tuple[int, int]:
    first, colon, last = tokens[0].value.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise ValueError(f"expected a first and a last update as 100:110, got {tokens[0].value!r}")
    return int(first), int(last)


def _positive(_: object, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ValueError("Expected a number above 0.")


def _require_utf8(path: Path, option: str) -> None:
    """Raise LargebatchError unless options.json and the log can hold a path."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise LargebatchError(
            f"--{option} {path}: the name of a folder on this path is not UTF-8, so that no record "
            "can hold it; rename it, or pass a link to it: ln -s FOLDER NAME"
        ) from None


def _place(_: object, tokens: Sequence[Token]) -> Place:
    return place_of(tokens[0].value)


def require_cached_address(
    data: Place | None, cache_dir: Path | None, cache_gb: float | None
) -> None:
    """Raise LargebatchError for a cache of images that are not read from an address."""
    if cache_dir is not None and not isinstance(data, Address):
        raise LargebatchError(
            f"--cache-dir {cache_dir}: keeps what is read from an address, such as --data "
            "s3://bucket/birds; leave it out"
        )
    if cache_gb is not None and cache_dir is None:
        raise LargebatchError(f"--cache-gb {cache_gb:g}: name the folder: --cache-dir DIR")


DataPlace = Annotated[
    Place,
    PlainValidator(place_of),
    PlainSerializer(str),
    Parameter(converter=_place, n_tokens=1, accepts_keys=False, metavar="DIR"),
]
"""A folder, or an address in a bucket; JSON has its text."""


def address_of(text: str | Address) -> Address:
    """Return an address; raise DataError for a folder of this machine, and as place_of."""
    address = place_of(text)
    if isinstance(address, Path):
        raise DataError(
            f"--mirror {address}: expected an address such as s3://bucket/runs, or "
            "file:///folder for a folder"
        )
    return address


def _address(_: object, tokens: Sequence[Token]) -> Address:
    return address_of(tokens[0].value)


MirrorAddress = Annotated[
    Address,
    PlainValidator(address_of),
    PlainSerializer(str),
    Parameter(converter=_address, n_tokens=1, accepts_keys=False, metavar="ADDRESS"),
]
"""An address below which run folders are copied; JSON has its text."""

RunPlace = Annotated[
    Place, Parameter(converter=_place, n_tokens=1, accepts_keys=False, metavar="RUN")
]
"""A run folder, or the address of its copy."""

Count = Annotated[int, Parameter(validator=_positive, metavar="N")]
Number = Annotated[float, Parameter(validator=_positive)]
Folder = Annotated[Path, Parameter(metavar="DIR")]
Seconds = Annotated[float, Parameter(converter=_seconds, metavar="TIME")]
Given = Parameter(name="*")
"""Marks a dataclass of options: each field is an option of the command."""

OPTIONS = Group("Options", sort_key=1)
"""The panel of --help for a command's own options; the others are shared, and follow in order."""

OF_RECIPE = Parameter(group=Group("Recipe", sort_key=2))
OF_DATA = Parameter(group=Group("Data", sort_key=3))
OF_FOLDER = Parameter(group=Group("Run folder and end of the run", sort_key=4))
OF_WORKERS = Parameter(group=Group("Workers", sort_key=5))


def completing(
    suffix: str, names: Callable[[], Iterable[str]] = tuple
) -> Callable[["CompletionContext"], list[str]]:
    """Return a function that completes names, folders, and files with a suffix."""

    def complete(context: "CompletionContext") -> list[str]:
        above = context.incomplete[: context.incomplete.rfind("/") + 1]
        candidates = [*names()]
        for path in Path(above or ".").iterdir():
            if path.name.startswith(".") or not (path.is_dir() or path.suffix == suffix):
                continue
            name = f"{above}{path.name}/" if path.is_dir() else f"{above}{path.name}"
            if quote(name) == name:  # bash would quote the others twice
                candidates.append(name)
        return candidates

    return complete


_HELP = "A YAML file, or the name of an installed recipe."
RecipeFile = Annotated[Path, Parameter(completer=completing(".yaml", installed), help=_HELP)]
Overrides = Annotated[
    tuple[str, ...],
    OF_RECIPE,
    Parameter(
        name="--set",
        metavar="KEY=VALUE",
        help="Override a key of the recipe, such as seed=3; may be repeated.",
    ),
]
Imports = Annotated[tuple[str, ...], OF_RECIPE, Parameter(name="--import", metavar="MODULE")]
AsJson = Annotated[bool, Parameter(name="--json", help="Print the result as JSON, and only that.")]


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Local workers and their connection."""

    workers: Annotated[Count, OF_WORKERS] = 1
    """Number of worker processes to start on this machine."""

    backend: Annotated[BackendName, OF_WORKERS] = "auto"
    """Library that sums gradients; auto: the launcher's."""

    timeout: Annotated[Seconds, OF_WORKERS] = TIMEOUT_SECONDS
    """Seconds, or such as 5m, to wait for a worker (six times as long until the first update)."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What is changed in a recipe, and what it needs to be imported."""

    overrides: Overrides = ()
    """Changes to the recipe, as KEY=VALUE."""

    device_batch: Annotated[int | None, OF_RECIPE, Parameter(metavar="N")] = None
    """Samples a worker holds at a time: --set execution.device_batch=N."""

    decoder: Annotated[str | None, OF_RECIPE, Parameter(metavar="NAME")] = None
    """dali or torchvision: --set execution.decoder=NAME."""

    imports: Imports = ()
    """Module to import first: it may register models with timm; may be repeated."""

    @property
    def changes(self) -> list[str]:
        """All changes to the recipe, as KEY=VALUE."""
        changes = [*self.overrides]
        if self.device_batch is not None:
            changes.append(f"execution.device_batch={self.device_batch}")
        if self.decoder is not None:
            changes.append(f"execution.decoder={self.decoder}")
        return changes


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Changes, Workers):
    """Options that depend on the machine, and that all runs of one study share."""

    data: Annotated[DataPlace | None, OF_DATA] = None
    """Images for data.source: folder, as DIR/{train,val}/<class>/* or *.tar, or s3:// of shards."""

    cache_dir: Annotated[Path | None, OF_DATA, Parameter(metavar="DIR")] = None
    """Folder on each host that keeps what it reads from the address of --data, for all its runs."""

    cache_gb: Annotated[Number | None, OF_DATA, Parameter(metavar="N")] = None
    """Bytes that a run keeps in --cache-dir on a host, in 10^9 (all)."""

    dataset: Annotated[str | None, OF_DATA, Parameter(metavar="M:F")] = None
    """Images instead from module:function, which returns data sets (train, val)."""

    def __post_init__(self) -> None:
        """Raise LargebatchError for images that no record can name."""
        if isinstance(self.data, Path):
            _require_utf8(self.data, "data")
        require_cached_address(self.data, self.cache_dir, self.cache_gb)

    def options(self, *, out: Path) -> "Options":
        """Return the options of a run in `out` on this machine, all changes among its overrides."""
        as_words = {"overrides": tuple(self.changes), "device_batch": None, "decoder": None}
        return Options(**(vars(self) | as_words), out=out)


@dataclass(frozen=True, kw_only=True)
class Options(MachineOptions):
    """All options of a run."""

    out: Annotated[Folder, OF_FOLDER] = NEW_FOLDER
    """Run folder."""

    mirror: Annotated[MirrorAddress | None, OF_FOLDER] = None
    """Copy the run folder below this address, such as s3://bucket/runs, while it is written."""

    resume: Annotated[Resume, OF_FOLDER, Parameter(metavar="yes|auto", show_choices=False)] = False
    """yes: continue the run in --out; auto: if it has a checkpoint, else start it."""

    restarts: Annotated[int, OF_WORKERS, Parameter(metavar="N")] = 0
    """Restart --workers that died, at most N times."""

    min_workers: Annotated[Count | None, OF_WORKERS] = None
    """Fewest workers to continue with, if a restart fails."""

    max_steps: Annotated[Count | None, OF_FOLDER] = None
    """Stop after N updates in total; the run can be resumed."""

    time_limit: Annotated[Seconds | None, OF_FOLDER] = None
    """Stop before this time is over, such as 90m or 8h; the run can be resumed."""

    whole_limit: Annotated[float | None, Parameter(parse=False)] = None
    """`time_limit` of the command in seconds, set where a restart leaves less of it."""

    profile: Annotated[
        tuple[int, int] | None,
        OF_FOLDER,
        Parameter(converter=_updates, n_tokens=1, metavar="FROM:TO"),
    ] = None
    """Write trace.json, of these updates, counted from 1."""

    allow: Annotated[tuple[str, ...], OF_FOLDER, Parameter(metavar="KEY")] = ()
    """Key that may differ from the resumed run, such as schedule.peak_lr; may be repeated."""

    report: Annotated[bool, Parameter(parse=False)] = True
    """True to draw the report at the end; `largebatch report` draws it later."""

    def __post_init__(self) -> None:
        """Raise LargebatchError for folders that no record can name."""
        super().__post_init__()
        _require_utf8(self.out, "out")

    @property
    def shared(self) -> dict[str, object]:
        """The options that all workers must share; only worker 0 uses the run folder."""
        # All others are equal: a worker with another --time-limit would stop alone.
        of_one_worker = {"out", "mirror", "backend", "report", "workers", "restarts", "min_workers"}
        return {
            f"--{name.replace('_', '-')}": value
            for name, value in vars(self).items()
            if name not in of_one_worker
        }

    @property
    def without_limits(self) -> Self:
        """The options of the whole run, without changes, limits and what one command does."""
        unlimited = replace(
            self, max_steps=None, time_limit=None, whole_limit=None, profile=None, allow=()
        )
        return unlimited.without_changes()

    def continued(self, *, seconds: float) -> Self:
        """Return the options with which a run is started again, `seconds` after these.

        The time limit is the command's, not each start's.
        """
        # `auto`, because the run may have died before its first checkpoint.
        limit = self.time_limit
        if limit is None:
            return replace(self, resume="auto")
        left = max(0.0, limit - seconds)
        whole_limit = self.whole_limit or limit
        return replace(self, resume="auto", time_limit=left, whole_limit=whole_limit)

    def without_changes(self) -> Self:
        """Return the options for a recipe to which the changes have been applied."""
        return replace(self, overrides=(), device_batch=None, decoder=None)
