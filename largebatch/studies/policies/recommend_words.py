"""A recommendation as sentences and as JSON, each number with its interval and its runs."""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pydantic_core import to_json

from largebatch.formatting import plural
from largebatch.recipe.writing import dump_yaml
from largebatch.studies.metrics import CONFIDENCE, Interval, Ratio
from largebatch.studies.policies.recommend import (
    Recommendation,
    Standing,
    describe_ends,
    describe_points,
    describe_ratio,
    good_values,
)
from largebatch.studies.queue.results import CellResults, Result
from largebatch.studies.queue.study import RATE


def sentences(found: Recommendation) -> Iterator[str]:
    """Yield what is recommended and why, what is to be avoided, and what is not known."""
    group = found.group
    seeds = max(len(cell.seeds) for cell in group.cells)
    policies = plural(len(group.cells), "policy", "policies")
    yield (
        f"{group.described}: {policies} x {plural(seeds, 'seed')}{_by(found)}; "
        f"intervals are at {CONFIDENCE:.0%}, those of comparisons together"
    )
    for missing in found.too_little:
        yield f"knows too little: {missing}"
    if found.first is not None:
        yield from _leader(found, found.first)
    for one in found.standings:
        if one.avoid:
            yield f"avoid {one.cell.policy}: {'; '.join(one.avoid)}"


def _by(found: Recommendation) -> str:
    return f", by {found.by}" + ("" if found.target is None else f" to {found.target:.2%}")


def _leader(found: Recommendation, first: Standing) -> Iterator[str]:
    cell = first.cell
    head = "tentative" if found.too_little else "recommended"
    yield f"{head}: {cell.policy}, {_values(cell)}"
    yield from _numbers(first)
    behind = found.standings[1:]
    if behind:
        yield f"next: {behind[0].cell.policy}, {_comparison(behind[0], first)}"
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


def _numbers(first: Standing) -> Iterator[str]:
    found = first.costs
    if found is not None and found.updates and found.images and found.seconds:
        yield (
            f"the target after {_mean(found.updates, '{:,.0f}')} updates, "
            f"{found.images.mean:,.0f} images, {found.seconds.mean:,.1f} s, by {found.reached} of "
            f"{found.runs} seeds; accuracy is measured at evaluations and nowhere between"
        )
    if first.top1 is not None:
        updates = first.cell.seeds[0].updates
        yield f"top-1 at the end {_mean(first.top1, '{:.2%}')}, after {updates:,} updates"


def _mean(found: Interval, number: str) -> str:
    return f"{number.format(found.mean)}{describe_ends(found, number)}"


def _comparison(one: Standing, first: Standing) -> str:
    """Return how a policy compares with the first one."""
    level = ": within the noise" if one.is_level else ""
    match one.against:
        case Ratio(interval=Interval() as times) as both:
            seeds = f"by {both.reached} of {both.seeds} seeds"
            return f"{describe_ratio(times)} the updates of {first.cell.policy}, {seeds}{level}"
        case Ratio(reached=reached, seeds=seeds):
            return f"which reached the target with {reached or 'none'} of {seeds} seeds{level}"
        case Interval() as points:
            return f"{describe_points(points)} below {first.cell.policy}{level}"
        case _:
            return "; ".join(one.avoid) or "not measured"


def schedule_yaml(cell: CellResults) -> str:
    """Return the sections of a recipe that hold what was found; other keys as comments."""
    recipe = cell.cell.at(cell.values)
    others = (f"# {key}: {value:g}\n" for key, value in cell.values.items() if key != RATE)
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
