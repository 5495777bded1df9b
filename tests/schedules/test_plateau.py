"""The rate after a metric has stopped improving: torch's rule, LRBench's rule, workers, resume."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_forked_workers import on_forked_workers
from short_runs import SMALL
from torch.optim.optimizer import register_optimizer_step_pre_hook

from largebatch import load_recipe, run
from largebatch.distributed.environment import launched_rank
from largebatch.errors import RecipeError
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.schedule import Plateau
from largebatch.schedules.plateau import Reading, plateau_level
from largebatch.tracking.events import Summary


def level(section: Plateau, losses: list[float], *, every: int = 10, steps: int = 1000) -> float:
    readings = [Reading(every * (n + 1), loss, -loss) for n, loss in enumerate(losses)]
    return plateau_level(section, readings, steps=steps)


@given(
    losses=st.lists(st.integers(0, 12).map(lambda tenths: tenths / 10), max_size=40),
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 3),
    threshold=st.sampled_from([0.0, 0.1, 0.25]),
    metric=st.sampled_from(["loss", "top1"]),
)
def test_it_is_reduce_lr_on_plateau_of_torch(
    losses: list[float], patience: int, cooldown: int, threshold: float, metric: str
) -> None:
    section = Plateau.model_validate(
        {
            "metric": metric,
            "levels": tuple(0.5**power for power in range(41)),
            "patience": patience,
            "cooldown": cooldown,
            "threshold": threshold,
        }
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        mode="max" if metric == "top1" else "min",
        factor=0.5,
        patience=patience,
        threshold=threshold,
        threshold_mode="abs",
        cooldown=cooldown,
        eps=0.0,
    )
    for number, loss in enumerate(losses, 1):
        theirs.step(-loss if metric == "top1" else loss)
        assert level(section, losses[:number]) == optimizer.param_groups[0]["lr"]


def test_a_plateau_raises_the_rate_early_and_lowers_it_late() -> None:
    """LRBench's ChangeLROnPlateau goes up its list before 0.8 of a run, and down after."""
    section = Plateau(levels=(1.0, 0.1, 0.01), first=1, patience=0, back_until=0.8)
    flat = [1.0] * 12
    levels = [level(section, flat[:n], every=100, steps=1000) for n in range(12)]
    assert levels == [0.1, 0.1, *[1.0] * 6, 0.1, 0.01, 0.01, 0.01]


def test_a_loss_that_is_no_number_is_no_improvement() -> None:
    section = Plateau(patience=1)
    assert level(section, [1.0, float("nan")]) == 1.0
    assert level(section, [1.0, float("nan"), float("nan")]) == 0.1


LEVELS = [0.5**power for power in range(9)]
CHANGES = [
    *("duration.epochs=2", "polish={clean: {epochs: 1}}", "schedule.warmup=null"),
    "evaluation.every_epochs=0.5",
    *("schedule.decay={kind: constant}", "schedule.peak_lr=4.0", *SMALL),
    f"schedule.plateau={{levels: {LEVELS}, patience: 0, threshold: 10.0}}",  # all are plateaus
]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [record for record in records if record["event"] == name]


def rates(folder: Path) -> dict[int, float]:
    return {event["step"]: event["lr"] for event in events(folder, "step")}


def torchs_rates(folder: Path, steps: Iterable[int]) -> dict[int, float]:
    """The rates that torch's ReduceLROnPlateau has at these steps after the run's evaluations."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=4.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs", eps=0.0
    )
    left, found = events(folder, "evaluation"), {}
    for step in sorted(steps):
        while left and left[0]["step"] <= step:
            theirs.step(left.pop(0)["loss"])
        found[step] = optimizer.param_groups[0]["lr"]
    return found


def resumed_run(out: Path, recipe: Recipe) -> Summary:
    run(recipe, out=out, max_steps=14)
    return run(recipe, out=out, resume="auto")


def test_a_resumed_run_has_the_rates_and_the_end_of_one_that_was_not(tmp_path: Path) -> None:
    recipe = load_recipe("digits_96", CHANGES)
    whole = run(recipe, out=tmp_path / "whole")
    parts = resumed_run(tmp_path / "parts", recipe)
    assert (parts.top1, parts.loss) == (whole.top1, whole.loss)
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        ours = rates(folder)
        assert ours == torchs_rates(folder, ours)
        assert len(set(ours.values())) > 1


def note_the_rates(recipe: Recipe, folder: Path) -> None:
    noted: list[float] = []
    register_optimizer_step_pre_hook(
        lambda optimizer, *_: noted.append(optimizer.param_groups[0]["lr"])
    )
    run(recipe, out=folder / "run", backend="torch")
    (folder / f"worker{launched_rank()}.json").write_text(json.dumps(noted))


@pytest.mark.long
def test_every_worker_leaves_a_level_in_the_same_step(tmp_path: Path) -> None:
    on_forked_workers(note_the_rates, load_recipe("digits_96", CHANGES), tmp_path, workers=2)
    first, second = (json.loads((tmp_path / f"worker{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first[-1] < first[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["evaluation={}"], "schedule.plateau reads the evaluations on the way"),
        (["schedule.plateau.first=9"], r"first \(9\) must be one of the 9 levels"),
        (["schedule.plateau.levels=[1.0]"], "schedule.plateau.levels"),
        (
            ["optimizer={kind: schedule-free, weight_decay: 5e-5}"],
            "leave schedule.plateau out",
        ),
    ],
)
def test_a_plateau_that_cannot_be_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("digits_96", [*CHANGES, *changes])
