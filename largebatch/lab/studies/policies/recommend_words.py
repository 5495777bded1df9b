"""A recommendation as sentences, a table and JSON."""

import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from pydantic_core import to_json

from largebatch.formatting import plural
from largebatch.lab.studies.metrics import CONFIDENCE, Interval, Ratio
from largebatch.lab.studies.policies.recommend import (
    Recommendation,
    Standing,
    describe_points,
    describe_ratio,
    good_values,
)
from largebatch.lab.studies.queue.results import CellResults, Result
from largebatch.recipe.writing import dump_yaml
from largebatch.report.interactive import Table, columns_over


def sentences(found: Recommendation) -> Iterator[str]:
    """Yield what is recommended, what to avoid and why, and what is not known."""
    group = found.group
    seeds = max(len(cell.seeds) for cell in group.cells)
    policies = plural(len(group.cells), "policy", "policies")
    yield (
        f"{group.described}: {policies} x {plural(seeds, 'seed')}{_by(found)}; "
        f"intervals are at {CONFIDENCE:.0%}, those of comparisons together"
    )
    for missing in found.too_little:
        yield f"insufficient data: {missing}"
    if found.first is not None:
        yield from _leader(found, found.first)
    for one in found.standings:
        if one.avoid:
            yield f"avoid {one.cell.policy}: {'; '.join(one.avoid)}"


def _by(found: Recommendation) -> str:
    to = "" if found.target is None else f" to {found.target:.2%} (at the first evaluation there)"
    return f", by {found.by}{to}"


def _leader(found: Recommendation, first: Standing) -> Iterator[str]:
    cell = first.cell
    head = "tentative" if found.too_little else "recommended"
    yield f"{head}: {cell.policy}, {_values(cell)}"
    if first.robustness is not None:
        rates = (
            f"{scale:g} times: {interval.mean:.2%}"
            for scale, interval in first.robustness.by_scale.items()
        )
        yield (
            f"top-1 at multiples of the rate: {', '.join(rates)}; "
            f"{100 * first.robustness.worst_drop:.2f} points lost at the worst of them"
        )


def _values(cell: CellResults) -> str:
    """Return the values found, and the range of those as good in the search."""
    good = good_values(cell)
    found, ranges = [], []
    for key, value in cell.values.items():
        name = key.rpartition(".")[2]
        low, high = good.ranges.get(key, (value, value))
        found.append(f"{name} {value:g}")
        ranges.append(f"{name} {low:g} to {high:g}")
    return (
        f"{', '.join(found)}; within the noise of the best in its search: {', '.join(ranges)} "
        f"({good.number} of {good.trials} trials)"
    )


def policies_table(found: Recommendation) -> Table:
    """Return a row for each policy, the best first; costs are means over the seeds that have it."""
    column = columns_over(found.standings)

    def mean(unit: str) -> Callable[[Standing], float | None]:
        def value(one: Standing) -> float | None:
            cost: Interval | None = getattr(one.costs, unit, None)
            return cost and cost.mean

        return value

    columns = [
        column("policy", lambda one: one.cell.policy, None),
        column("top-1, %", lambda one: one.top1 and 100 * one.top1.mean, ".2f"),
        column("±", lambda one: one.top1 and one.top1.scaled(100).reach, ".2f"),
        column("updates", mean("updates"), ",.0f"),
        column(
            "±", lambda one: one.costs and one.costs.updates and one.costs.updates.reach, ",.0f"
        ),
        column("images", mean("images"), ",.0f"),
        column("seconds", mean("seconds"), ",.1f"),
        column(
            "reached", lambda one: one.costs and f"{one.costs.reached} of {one.costs.runs}", None
        ),
        column(f"against {found.standings[0].cell.policy}", _comparison, None),
        column("within noise", lambda one: one.against and ("yes" if one.is_level else "no"), None),
        column("worst drop", lambda one: one.robustness and 100 * one.robustness.worst_drop, ".2f"),
        column("seeds", lambda one: len(one.cell.seeds), "d"),
        column("diverged", lambda one: one.cell.diverged, "d"),
    ]
    return Table(name="policies", columns=columns)


def _comparison(one: Standing) -> str | None:
    """Return how a policy compares with the first one; None if it does not."""
    match one.against:
        case Ratio(interval=Interval() as times):
            return f"{describe_ratio(times)} the updates"
        case Interval() as points:
            return f"{describe_points(points)} below"
        case _:
            return None


def schedule_yaml(cell: CellResults) -> str:
    """Return the sections of a recipe that hold what was found; other keys as comments."""
    recipe = cell.cell.at(cell.values)
    others = (f"# {key}: {value:g}\n" for key, value in cell.values.items()
              if not key.startswith("schedule."))  # fmt: skip
    return f"{''.join(others)}schedule:\n" + textwrap.indent(dump_yaml(recipe.schedule), "  ")


def runs_behind(found: Recommendation) -> Iterator[str]:
    """Yield the runs of the first policy: folders, and what made them."""
    if found.first is None:
        return
    runs = found.first.cell.seeds
    made = sorted(
        {", ".join(filter(None, (f"commit {one.commit}", one.hardware, one.host))) for one in runs}
    )
    yield f"runs: study {found.group.name} in {found.group.storage}; {'; '.join(made)}"
    yield from (f"  {one.folder}" for one in runs)


def as_json(found: Recommendation) -> dict[str, Any]:
    """Return all of it for another program; numbers that are not finite are null."""
    first, group = found.first, found.group
    content = {
        "storage": group.storage,
        "study": group.cells[0].study,
        "configuration": group.cells[0].configuration,
        "recipe": group.recipe.name,
        "model": group.recipe.model.name,
        "batch": group.batch,
        "optimizer": group.recipe.optimizer.kind,
        "by": found.by,
        "target": found.target,
        "recommended": None if first is None or found.too_little else first.cell.policy,
        "first": first and first.cell.policy,
        "level": [one.cell.policy for one in found.level],
        "avoid": {one.cell.policy: one.avoid for one in found.standings if one.avoid},
        "too_little": found.too_little,
        "policies": [_standing(one) for one in found.standings],
    }
    return json.loads(to_json(content, inf_nan_mode="null"))  # type: ignore[no-any-return]


def _standing(one: Standing) -> dict[str, Any]:
    cell = one.cell
    found = cell.cell.at(cell.values).schedule.model_dump(mode="json") if cell.values else None
    return {
        "policy": cell.policy,
        "finished": cell.finished,
        "values": cell.values,
        "good_values": asdict(good_values(cell)),
        "edges": cell.edges,
        "schedule": found,
        "top1": _interval(one.top1),
        "costs": one.costs
        and {
            "reached": one.costs.reached,
            "runs": one.costs.runs,
            "updates": _interval(one.costs.updates),
            "images": _interval(one.costs.images),
            "seconds": _interval(one.costs.seconds),
        },
        "worst_drop": one.robustness and one.robustness.worst_drop,
        "area": one.robustness and one.robustness.area,
        "against_first": _interval(
            one.against.interval if isinstance(one.against, Ratio) else one.against
        ),
        "within_the_noise": one.is_level,
        "diverged": cell.diverged,
        "runs": [_run(each) for each in cell.seeds],
    }


def _interval(found: Interval | None) -> dict[str, float] | None:
    return None if found is None else found._asdict()


def _run(one: Result) -> dict[str, Any]:
    return {
        "seed": one.seed,
        "top1": one.top1,
        "folder": one.folder,
        "host": one.host,
        "hardware": one.hardware,
        "commit": one.commit,
        "weights_sha256": one.weights_sha256,
    }
