"""Studies of LeNet-5 on the digits that take seconds, and records of runs that were not made."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from largebatch.lab.studies.namespaces import lacking
from largebatch.lab.studies.runner import Runs, kind_of
from largebatch.lab.studies.store import Store
from largebatch.lab.studies.study import RATE, Cell, StudyMachine, load_study
from largebatch.lab.studies.trained import CellResults, TrainedCell, results_of

Json = dict[str, Any]

needs_hosts = pytest.mark.skipif(bool(lacking()), reason=f"this machine lacks {lacking()}")
"""Namespaces, that is."""

SETTINGS: Json = {
    "duration": {"steps": 12},
    "schedule.warmup": {"steps": 2},
    "evaluation": {},
    "polish": None,
    "data.image_size": 16,
    "execution.cache": "memory",
    "model.name": "lenet5",
    "model.arguments": {},
    "batch.bn_span": None,
}
PLAIN: Json = {
    **SETTINGS,
    "duration": {"steps": 6},
    "schedule": {"peak_lr": 0.02, "warmup": None, "decay": {"kind": "constant"}},
    "batch": {"global_batch": 32, "bn_span": None},
    "optimizer": {"kind": "sgd", "momentum": 0.9, "weight_decay": 1e-4},
}
del PLAIN["schedule.warmup"], PLAIN["batch.bn_span"]
NORMED: Json = {
    "model.name": "resnet18",
    "model.arguments": {"layers": [1, 1, 1, 1], "channels": [4, 4, 4, 4]},
    "batch": {"global_batch": 32, "bn_span": 8},
    "polish": {"clean": {"steps": 2}, "statistics": {"samples": 64}},
}
DIGITS: Json = {"digits": {"recipe": "digits_96", "set": SETTINGS}}

POLICIES: Json = {
    "name": "tiny",
    "recipes": DIGITS,
    "policies": {
        "fall": {"decay": {"kind": "polynomial", "power": 1.0}},
        "flat": {"decay": {"kind": "constant"}},
    },
    "search": {"trials": 3, "held_out": 300},
    "seeds": 2,
}
VARIED: Json = {
    "name": "tiny",
    "recipes": DIGITS,
    "settings": {
        "own": {},
        "large": {"set": {"batch.global_batch": 192}},
        "threads": {"threads": 2},
    },
    "seeds": 2,
}
GRID: Json = {
    "recipes": ["plain"], "times": ["usual"], "sigma": [0, "lambda"], "mu": [8], "learners": [4]
}  # fmt: skip
STALENESS: Json = {
    "name": "tiny",
    "seeds": 2,
    "recipes": {
        "plain": {"recipe": "digits_96", "set": PLAIN},
        "polished": {"recipe": "digits_96", "set": {**PLAIN, **NORMED}},
    },
    "staleness": {
        "machines": {"overhead": 0.01, "sample": 0.001, "link": {"bandwidth": 1e9}},
        "times": {
            "usual": {"kind": "lognormal", "median": 1.0, "sigma": 0.1},
        },
        "grids": [GRID],
    },
}
RECIPES_ON_HOSTS: Json = {
    "lenet5": {
        "recipe": "digits_96",
        "set": {**PLAIN, "duration": {"steps": 40}},
        "on_hosts": {
            "workers": [2],
            "mini_batch": 16,
            "compute": {"overhead": 0.01, "sample": 0.001, "computed": 2},
            "warm_up": 1,
            "updates": 4,
        },
    }
}
SERVERS: Json = {
    "name": "tiny",
    "seeds": 1,
    "servers": {
        "megabits": 1000,
        "layouts": {
            "central": {"centralised": 1},
            "beside": "decentralised",
            "ring": "torch",
        },
    },
    "recipes": RECIPES_ON_HOSTS,
}
SCALING: Json = {
    "name": "tiny",
    "seeds": 1,
    "scaling": {"megabits": 1000, "workers": [2]},
    "recipes": RECIPES_ON_HOSTS,
}


def write_study(folder: Path, study: Json = POLICIES, **changes: Any) -> Path:  # noqa: ANN401 -- any part of a study
    """Write a study with other parts; return its file. JSON is YAML.

    A change of KEY__INNER is one within a section; None removes a key.
    """
    tree = json.loads(json.dumps(study))
    for key, value in changes.items():
        *sections, last = key.split("__")
        section = tree
        for name in sections:
            section = section[name]
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    path = folder / "study.yaml"
    path.write_text(json.dumps(tree))
    return path


def cells_in(folder: Path, study: Json = POLICIES, **changes: Any) -> list[Cell]:  # noqa: ANN401 -- any part of a study
    """Return the cells of a study with other parts."""
    given = load_study(write_study(folder, study, **changes))
    return list(kind_of(given).cells_of(given, folder))


def opened(folder: Path, study: Json = POLICIES, **changes: Any) -> Runs:  # noqa: ANN401 -- any part of a study
    """Return the runs of a study with other parts, in the folder `out`."""
    cells = cells_in(folder, study, **changes)
    return Runs(cells=cells, store=Store(folder / "out"), machine=StudyMachine())


def undisturbed(seed: int, *, cell: str = "digits/one", place: int | None = None) -> Json:
    """Return the common part of the record of a run of 12 s on a quiet machine of four cores.

    The runs of a cell follow each other; `place` is that of the run, else its seed.
    """
    recipe, _, variant = cell.partition("/")
    begun = 1e9 + 1000 * sum(cell.encode()) + 20 * (seed if place is None else place)
    return {
        "recipe": recipe, "variant": variant, "seed": seed, "commit": "0" * 40, "host": "node-7",
        "hardware": "x86_64", "begun": begun, "ended": begun + 12, "cores": 4, "other_cores": 0.02,
    }  # fmt: skip


def a_record(top1: float, *, seed: int, evaluations: Sequence[tuple[int, float]] = ()) -> Json:
    """Return the record of a run of 12 updates of a second, evaluated after these updates."""
    return {
        **undisturbed(seed),
        "values": {},
        "top1": top1,
        "top5": min(1.0, top1 + 0.05),
        "average_confidence": 0.5 + top1 / 4,
        "confidence_deviation": 0.25 - top1 / 8,
        "class_confidence_deviation": 0.125 - top1 / 16,
        "loss": 1 - top1,
        "usage": {"train_seconds": 6.0, "update_seconds": 0.5},
        "folder": f"/runs/seed-{seed}",
        "evaluations": [
            {"step": step, "seconds": float(step), "top1": found} for step, found in evaluations
        ],
    }


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is measured of a policy, in updates of a second each."""

    reached: Sequence[int | None]
    """By seed from 1 on, after how many updates top-1 is 0.9; None: never."""

    top1: Sequence[float]
    """At the end, by seed."""

    trials: Mapping[float, float] = field(default_factory=lambda: {0.5: 0.8, 0.2: 0.5, 1.25: 0.6})
    """Accuracies of the search, by rate: the recipe's own, then 0.4 and 2.5 times it."""

    scaled: Mapping[float, float] = field(default_factory=dict)
    """Top-1 of every seed at multiples of the rate."""

    diverged: Sequence[int] = ()
    """Seeds."""


def records_of(cell: TrainedCell, policy: Policy) -> dict[str, Json]:
    """Return the records of a policy by the names of runs."""
    best = max(policy.trials, key=lambda rate: policy.trials[rate])
    records = {}
    for slot in cell.slots:
        if slot.trial:
            rate = list(policy.trials)[slot.trial - 1]
            record = {**a_record(policy.trials[rate], seed=100), "values": {RATE: rate}}
        else:
            top1, reached = policy.top1[slot.seed - 1], policy.reached[slot.seed - 1]
            if slot.scale != 1:
                top1, reached = policy.scaled[slot.scale], None
            steps = [] if reached is None else [(reached - 1, 0.85), (reached, 0.9)]
            record = a_record(top1, seed=slot.seed, evaluations=steps)
            record |= {"values": {RATE: best}, "scale": slot.scale}
            if slot.seed in policy.diverged:
                record["diverged"] = "the loss is infinite"
        records[slot.name] = record
    return records


def measured(
    folder: Path,
    policies: Mapping[str, Policy],
    /,
    *,
    recorded: bool = False,
    **changes: Any,  # noqa: ANN401 -- parts of a study
) -> list[CellResults]:
    """Return the results of policies of which this was measured; `recorded`: also in the folder."""
    seeds = max(len(one.top1) for one in policies.values())
    parts: Json = {
        "policies": {
            name: {"decay": {"kind": "constant"}, "warmup": {"steps": 1 + number}}
            for number, name in enumerate(policies)
        },
        "search": {"trials": 3, "held_out": 300},
        "seeds": seeds,
        "robustness_seeds": seeds if any(one.scaled for one in policies.values()) else 0,
        **changes,
    }
    cells = cells_in(folder, **parts)
    found = []
    for cell in cells:
        assert isinstance(cell, TrainedCell)
        records = records_of(cell, policies[cell.variant])
        found.append(results_of(cell, records))
        if recorded:
            store = Store(folder)
            store.define([cell])
            for slot in cell.slots:
                store.write(cell, slot, records[slot.name])
    return found
