"""Policy databases through the queues that studies fill, with results that were not measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage
from short_studies import a_record, write_study

from largebatch.lab.studies.queue.cells import cells_of
from largebatch.lab.studies.queue.database import Queue, open_storage
from largebatch.lab.studies.queue.owners import Owners
from largebatch.lab.studies.queue.phases import Bench, Progress
from largebatch.lab.studies.queue.study import RATE, load_study
from largebatch.lab.studies.queue.trial import Machine

FLAT = {"decay": {"kind": "constant"}}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is measured of a policy, in updates of a second and 96 images each."""

    reached: Sequence[int | None]
    """By seed from 1 on, after how many updates top-1 is 0.9; None: never."""

    top1: Sequence[float]
    """At the end, by seed."""

    trials: Mapping[float, float] = field(default_factory=lambda: {0.5: 0.8, 0.2: 0.5, 1.25: 0.6})
    """Accuracies of the search, by rate: the recipe's own, then 0.4 and 2.5 times it."""

    scaled: Mapping[float, float] = field(default_factory=dict)
    """Top-1 of seed 1 at multiples of the rate."""

    diverged: Sequence[int] = ()
    """Seeds."""

    left: int = 0
    """Seeds, of those at the end, that are not done."""


def fill(folder: Path, measured: Mapping[str, Policy], **changes: Any) -> str:  # noqa: ANN401 -- parts of a study
    """Fill a database in a file; return its URL."""
    url = f"sqlite:///{folder}/study.db"
    with open_storage(url) as storage:
        fill_storage(storage, folder, measured, **changes)
    return url


def fill_storage(
    storage: BaseStorage,
    folder: Path,
    measured: Mapping[str, Policy],
    **changes: Any,  # noqa: ANN401 -- parts of a study
) -> None:
    """Fill a storage; one in memory takes the least time. The folder holds the study file."""
    seeds = max(len(one.top1) for one in measured.values())
    scales = {scale for one in measured.values() for scale in one.scaled}
    study = load_study(
        write_study(
            folder,
            **{
                "policies": {
                    name: {**FLAT, "warmup": {"steps": 1 + number}}
                    for number, name in enumerate(measured)
                },
                "search": {"trials": 3, "held_out": 300, "prune": False},
                "seeds": seeds,
                "robustness_seeds": int(bool(scales)),
                **({"robustness_scales": sorted(scales)} if scales else {}),
                **changes,
            },
        )
    )
    cells = tuple(cells_of(study, folder))
    bench = Bench(study=study, cells=cells, out=folder, machine=Machine())
    progress = Progress(bench, storage)
    for number, cell in enumerate(cells):
        _search(progress.phases()[2 * number].queue, measured[cell.variant])
        _seeds(progress.phases()[2 * number + 1].queue, measured[cell.variant])


def _search(queue: Queue, policy: Policy) -> None:
    owners = Owners()
    while (claim := queue.claim(owners)) is not None:
        rate = round(claim.trial.suggest_float(RATE, 0.01, 100.0, log=True), 6)
        record = a_record(policy.trials[rate], seed=100)
        queue.finish(claim, {"values": {RATE: rate}, **record}, value=policy.trials[rate])


def _seeds(queue: Queue, policy: Policy) -> None:
    owners = Owners()
    best = max(policy.trials, key=lambda rate: policy.trials[rate])
    for _ in range(len(queue.slots) - policy.left):
        claim = queue.claim(owners)
        assert claim is not None
        about = queue.slots[claim.slot].about
        seed, scale = int(about["seed"]), about["scale"]
        if scale == 1:
            top1, reached = policy.top1[seed - 1], policy.reached[seed - 1]
        else:
            top1, reached = policy.scaled[scale], None
        steps = [] if reached is None else [(reached - 1, 0.85), (reached, 0.9)]
        record = a_record(top1, seed=seed, evaluations=steps)
        if seed in policy.diverged:
            record |= {"diverged": "the loss is infinite"}
        queue.finish(claim, {"values": {RATE: best}, **record}, value=top1)
