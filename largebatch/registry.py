"""The parts that a recipe chooses by name: those of this package, and those of installed packages.

A package adds a part by an entry point of one of the groups below, whose name is the word in a
recipe. Where a part has keys of its own, the entry point is its section (see `section.Choice`),
which names its builder. Nothing here imports PyTorch, or a builder before a run needs it.
"""

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, Literal, get_args

from largebatch.errors import LargebatchError, RecipeError, reason_of

Group = Literal[
    "optimizers",
    "schedules",
    "networks",
    "decoders",
    "trackers",
    "stages",
    "monitors",
    "protocols",
]
OWN = "largebatch"
"""Name of this package."""

PREFIX = f"{OWN}."
"""In the metadata of a package an entry point's group is this and a Group."""

OURS: Mapping[Group, Mapping[str, str]] = MappingProxyType(
    {
        "decoders": {
            "dali": "largebatch.data.decoders.dali:require_decoder",
            "torchvision": "largebatch.data.decoders.torchvision:require_decoder",
        },
        "trackers": {
            "wandb": "largebatch.tracking.wandb:Wandb.follow",
            "tensorboard": "largebatch.tracking.tensorboard:TensorBoard.follow",
            "mlflow": "largebatch.tracking.mlflow:MLflow.follow",
            "mlperf": "largebatch.lab.mlperf.logger:MLPerf.follow",
        },
    }
)
"""The parts of this package that have a name and no keys of their own, as `module:object`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry point of an installed package."""

    target: str
    """What it refers to, as `module:object`."""

    package: str
    version: str


@cache
def _installed() -> dict[Group, dict[str, list[Entry]]]:
    """Return the entry points of all packages by group and name.

    The metadata of all packages is read once, which takes 10 ms for 200 packages.
    """
    points = entry_points()
    groups: dict[Group, dict[str, list[Entry]]] = {group: {} for group in get_args(Group)}
    for group, entries in groups.items():
        for point in sorted(points.select(group=PREFIX + group), key=lambda point: point.name):
            assert point.dist is not None  # entry_points() reads them from packages
            if point.dist.name == OWN:  # an older version had some, and may be what is installed
                continue
            entry = Entry(point.value, point.dist.name, point.dist.version)
            entries.setdefault(point.name, []).append(entry)
    return groups


def installed(group: Group) -> list[str]:
    """Return the names that installed packages add to a group."""
    return list(_installed()[group])


def packages() -> list[str]:
    """Return the names of the installed packages that add parts."""
    names = {
        entry.package
        for entries in _installed().values()
        for owners in entries.values()
        for entry in owners
    }
    return sorted(names)


def load(group: Group, name: str, *, ours: Collection[str] | None = None) -> Any:  # noqa: ANN401 -- what the group's parts are
    """Import a part by its name; `ours` are the names of this package, by default those of OURS.

    Raises RecipeError if no package has it, several have it, or the one that has it is broken.
    """
    require_one_owner(group, name, ours=OURS.get(group, {}) if ours is None else ours)
    entries = _installed()[group].get(name)
    if entries is None:
        if name not in OURS.get(group, {}):
            raise RecipeError(missing(group, name))
        return resolve(OURS[group][name])
    (entry,) = entries
    return resolve(entry.target, package=f"{entry.package} {entry.version}")


def require_one_owner(group: Group, name: str, *, ours: Collection[str]) -> None:
    """Raise RecipeError if several packages have a part of this name."""
    owners = [f"{entry.package} {entry.version}" for entry in _installed()[group].get(name, [])]
    where = " and in ".join(owners)
    if owners and name in ours:
        raise RecipeError(f"{name!r} is in {OWN}, and in {where}: uninstall the latter")
    if len(owners) > 1:
        raise RecipeError(f"{name!r} is in {where}: uninstall all of these but one")


def missing(group: Group, name: str) -> str:
    """Return what to do about a name that no package has."""
    return (
        f"no installed package adds {name!r}: install the one with the entry point {name!r} of "
        f"{PREFIX}{group}"
    )


_refused: dict[tuple[Group, str], str] = {}


def refuse(group: Group, name: str, reason: str) -> None:
    """Keep the reason why a name cannot be used, for recipes that use it."""
    _refused[group, name] = reason


def trouble(group: Group, name: str) -> str | None:
    """Return the reason why a name cannot be used; None if it can, or if no package has it."""
    return _refused.get((group, name))


def resolve(target: str, *, package: str = OWN) -> Any:  # noqa: ANN401 -- any object
    """Import an object by `module:object`; raise RecipeError if another package is broken."""
    module, _, path = target.partition(":")
    if not path:
        raise RecipeError(f"{target} of {package} must be module:object; repair that package")
    try:
        value: Any = importlib.import_module(module)
        for name in path.split("."):
            value = getattr(value, name)
    except LargebatchError:  # such as that of an optional package: it says what to do
        raise
    except Exception as error:
        if package == OWN:  # a bug of ours, which needs its traceback
            raise
        raise RecipeError(
            f"{target} of {package} cannot be loaded: {type(error).__name__}: "
            f"{reason_of(error)}; repair or uninstall that package"
        ) from error
    return value
