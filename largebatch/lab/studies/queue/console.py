"""Output of a study: a line after every run, and the estimate of a dry run."""

import sys
from datetime import timedelta

from largebatch.errors import printable
from largebatch.lab.measure.estimate import estimate
from largebatch.lab.studies.budget import describe_total
from largebatch.lab.studies.queue.cells import Values
from largebatch.lab.studies.queue.database import Claim
from largebatch.lab.studies.queue.phases import Bench, Phase, Progress, seed_slots, trial_updates
from largebatch.lab.studies.queue.trial import Result as Record
from largebatch.recipe.arithmetic.plan import make_plan


def print_run(progress: Progress, phase: Phase, claim: Claim, result: Record) -> None:
    """Print the result of a run, how many are done, and the time left."""
    ended = f"top-1 {result['top1']:.2%}"
    if "diverged" in result:
        ended = "diverged"
    elif "pruned_after" in result:
        ended += f", stopped after {result['pruned_after']:,} updates"
    left = progress.remaining_seconds()
    rest = "" if left is None else f"; {timedelta(seconds=round(left))} left"
    values = describe_values(result["values"])
    line = (
        f"{progress.num_done}/{progress.bench.num_runs}  {phase.cell.name} {claim.slot}"
        f"{', ' * bool(values)}{values}: {ended}{rest}"
    )
    sys.stdout.write(f"{printable(line)}\n")
    sys.stdout.flush()


def describe_values(values: Values) -> str:
    """Format values by the last word of their keys.

    >>> describe_values({"schedule.peak_lr": 0.5, "optimizer.weight_decay": 1e-4})
    'peak_lr 0.5, weight_decay 0.0001'
    """
    return ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in values.items())


def describe_budget(bench: Bench, *, processes: int) -> str:
    """Describe the number of runs of a study, their updates and an estimate of their time here.

    The estimate is of forward, backward and update alone, from a few samples trained on now;
    trials that are stopped early take less.
    """
    lines, total = [], 0.0
    seeds = len(seed_slots(bench.study))
    for cell in bench.cells:
        searched, trials = "", 0
        if bench.study.search is not None:
            number = bench.study.search.trials
            trials = number * trial_updates(cell)
            around = describe_values({key: cell.own(key) for key in cell.ranges})
            searched = f"{number} trials of {trial_updates(cell):,} updates around {around}, then "
        plan = make_plan(cell.recipe, workers=1)
        lines.append(f"{cell.name}: {searched}{seeds} runs of {plan.updates:,} updates")
        each = estimate(cell.recipe, plan).run_seconds / plan.updates
        total += each * (trials + seeds * plan.updates)
    lines.append(describe_total(f"{bench.num_runs} runs", total, processes=processes))
    return "\n".join(lines)
