"""The commands that read recipes and train none: check, plan, explain, recipes. They print."""

import os
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from largebatch.cli.printing import print_json, print_rows
from largebatch.errors import LargebatchError, RecipeError, printable
from largebatch.formatting import duration, plural, table, three_digits
from largebatch.lab.planner.cluster import installed_clusters, load_cluster
from largebatch.recipe.arithmetic.plan import (
    describe_batch_changes,
    describe_division,
    describe_protocol,
    describe_spans,
    make_plan,
)
from largebatch.recipe.explain import explain as explain_key
from largebatch.recipe.installed import by_data_set, installed, origin, read_installed
from largebatch.recipe.loading import load_recipe, parse_recipe
from largebatch.recipe.optimizers import LARS, Optimizer
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_tree
from largebatch.runs.options import (
    AsJson,
    Changes,
    Count,
    DataPlace,
    Given,
    Overrides,
    RecipeFile,
    completing,
)
from largebatch.schedules.build import build_schedule, follow
from largebatch.storage import write_whole, writing

if TYPE_CHECKING:
    from largebatch.rules import Finding

BREAKS_RULES = 1  # exit code of `check --mlperf-closed` for a recipe of the open division

By = Literal["epoch", "step", "samples"]
Installed = Annotated[str, Parameter(completer=lambda _: list(installed()))]
ClusterName = Annotated[
    str, Parameter(completer=completing(".yaml", installed_clusters), metavar="NAME")
]

recipes = App(name="recipes", help="List the installed recipes, or copy one to edit.")


def check(
    recipe: RecipeFile,
    /,
    *recipes: RecipeFile,
    overrides: Overrides = (),
    mlperf_closed: bool = False,
    json: AsJson = False,
) -> int:
    """Validate recipes without running them.

    Args:
        mlperf_closed: List the rules of MLPerf's closed division that they break.
    """
    problems = []
    broken = False
    checked = list[dict[str, object]]()
    for path in (recipe, *recipes):
        result: dict[str, object] = {"recipe": str(path), "ok": False, "problems": []}
        checked.append(result)
        try:
            loaded = load_recipe(path, overrides)
            build_schedule(loaded.schedule, make_plan(loaded.mathematics))
            _require_device_batch(loaded)
        except LargebatchError as error:
            problems.append(str(error))
            head, *details = str(error).splitlines()
            result["problems"] = [line.strip() for line in details] or [head]
            continue
        if mlperf_closed:
            from largebatch.lab.mlperf.rules import broken_rules

            rules = broken_rules(loaded)
            verdict = _describe(rules, loaded.optimizer)
            broken = broken or bool(rules)
            listed = [
                {"setting": rule.check, "found": rule.text, "rule": rule.remedy} for rule in rules
            ]
            result |= {"ok": not rules, "mlperf_closed": listed}
        else:
            verdict = "ok"
            result["ok"] = True
            if loaded.tracking.remark:
                verdict += f"; {loaded.tracking.remark}"
                result["remark"] = loaded.tracking.remark
        if not json:
            print(printable(f"{path}: {verdict}"))
    if json:
        print_json(checked)
    if problems:
        raise LargebatchError("\n".join(problems))
    return BREAKS_RULES if broken else 0


def _require_device_batch(recipe: Recipe) -> None:
    """Raise RecipeError if no number of workers can use the recipe's device batch."""
    device_batch = recipe.execution.device_batch or 1
    for key, size in recipe.batch.by_key.items():
        if size % device_batch:
            raise RecipeError(
                f"execution.device_batch: {device_batch} does not divide {key} ({size}), so no "
                "number of workers can use it; give a divisor, or leave it out"
            )
    if recipe.data.mix is not None and device_batch % 2 and recipe.execution.device_batch:
        raise RecipeError(
            f"execution.device_batch: {device_batch} must be even, because data.mix mixes pairs of "
            "images; give an even divisor, or leave it out"
        )


def _describe(rules: "Sequence[Finding]", optimizer: Optimizer) -> str:
    from largebatch.lab.mlperf.rules import LARS_REMARK, ROUND

    division = f"MLPerf's closed division (Training {ROUND}, ResNet)"
    if not rules:
        remark = f"; {LARS_REMARK}" if isinstance(optimizer, LARS) else ""
        return f"keeps the rules of {division}{remark}"
    broken = table([(rule.check, rule.text, rule.remedy) for rule in rules])
    count = plural(len(rules), "rule")
    return f"breaks {count} of {division}\n{textwrap.indent(broken, '  ')}"


def plan(  # noqa: PLR0913 -- its options
    recipe: RecipeFile,
    /,
    *,
    workers: Count = 1,
    cluster: ClusterName | None = None,
    json: bool = False,
    calibrate: bool = False,
    data: DataPlace | None = None,
    out: Path | None = None,
    changes: Annotated[Changes, Given] = Changes(),
) -> None:
    """Print the arithmetic of a run, and measure the time of a step on this machine.

    Args:
        workers: Number of workers to plan for.
        cluster: Predict the time there instead: a name of `lab clusters`, or a file.
        json: Print the prediction as JSON.
        calibrate: Measure this machine instead, and write a cluster file.
        data: Images for --calibrate.
        out: File of --calibrate.
    """
    if calibrate and (cluster or workers != 1):
        raise LargebatchError("--calibrate measures a worker; leave out --cluster and --workers")
    if not calibrate and (out or data):
        raise LargebatchError("--out and --data are for a measurement: give --calibrate too")
    if json and not cluster:
        raise LargebatchError("--json is for a prediction: give --cluster NAME too")
    loaded = load_recipe(recipe, changes.changes)
    if calibrate:
        from largebatch.lab.measure.calibrate import calibrate as measure

        if out is None:
            raise LargebatchError("--calibrate writes a cluster file: give --out FILE.yaml")
        measure(loaded, out, data=data)
        print(printable(f"cluster file: {out}"))
        return
    if not cluster:
        _plan(loaded, workers, changes.imports)
        return
    from largebatch.lab.planner.prediction import describe, predict, workload

    prediction = predict(workload(loaded, workers=workers), load_cluster(cluster))
    if json:
        print_json(asdict(prediction))
    else:
        print_rows(describe(prediction))


def _plan(recipe: Recipe, workers: int, imports: Sequence[str]) -> None:
    protocol = recipe.protocol
    if protocol is not None:
        if workers != 1:
            protocol.require_workers(workers)
        workers = protocol.workers
    plan = make_plan(recipe, workers=workers)
    division = {"global batch": describe_division(plan)}
    if protocol:
        division = {"protocol": describe_protocol(protocol, global_batch=plan.global_batch)}
    rows = {
        "recipe": recipe.name,
        **division,
        **describe_batch_changes(plan),
        "BatchNorm span": describe_spans(plan),
        "data": f"{plan.train_samples:,} training, {plan.val_samples:,} validation samples"
        + (", held out of the training images" if recipe.data.held_out else ""),
        **follow(recipe.schedule, plan).facts(),
        "evaluations": f"{len(plan.evaluate_after)} on the way, one after each stage",
    }
    if plan.steps_per_epoch < 1:
        times = plan.global_batch / plan.train_samples
        rows["batch"] = f"larger than an epoch: each image occurs {times:.2f} times in it"
    if plan.sizes:
        parts = [f"{piece.image_size} until step {piece.end:,}" for piece in plan.sizes]
        rows["image size"] = f"{', '.join(parts)}; clean and evaluation {recipe.data.image_size}"
    repeats = recipe.data.repeats
    if repeats > 1:
        rows["repeats"] = (
            f"every image {repeats} times in {repeats} epochs; one epoch has 1/{repeats} of them"
        )
    if recipe.data.order is not None:
        rows["order"] = recipe.data.order.describe(
            images=recipe.train_samples, batch=plan.global_batch
        )
    if recipe.data.mix is not None:
        rows["mixed images"] = f"{recipe.data.mix.describe()}, before step {plan.mix_steps:,}"
    if recipe.polish:
        polish = recipe.polish.model_dump(mode="json", exclude_unset=True)
        rows["polish"] = dump_tree(polish, flow=True).strip()
    print_rows(rows)
    # Only now: torch takes seconds to import, and the arithmetic above is printed at once.
    from largebatch.data.datasets.own import import_own
    from largebatch.lab.measure.estimate import estimate

    for module in imports:
        import_own(module)
    cost = estimate(recipe, plan)
    machine = (
        f"{three_digits(1000 * cost.step_seconds)} ms a step of one worker on {cost.device} in "
        f"{cost.precision}, {duration(cost.run_seconds)} for all; "
        f"{cost.memory_bytes / 2**30:.2g} GiB; measured on {plural(cost.samples, 'sample')}"
    )
    rows = {"this machine": machine, "included": "forward, backward and update of every step"}
    if cost.sums:
        sizes = ", ".join(three_digits(size / 1e6) for size in cost.sums)
        rows["gradients"] = f"summed in {plural(len(cost.sums), 'group')} of {sizes} MB"
    print_rows(rows)


def explain(
    *names: str,
    schedule: bool = False,
    by: By = "epoch",
    overrides: Overrides = (),
    out: Path | None = None,
) -> None:
    """Explain a key of a recipe, or draw the learning rates of recipes with --schedule.

    Args:
        names: A key, such as optimizer.eta; with --schedule recipes, or run folders.
        schedule: Draw the learning rates of recipes in one figure, and print their peaks.
        by: Axis of the figure.
        out: Figure, a PNG (learning-rates.png).
    """
    if schedule:
        if not names:
            raise LargebatchError("--schedule draws learning rates: give a recipe")
        _draw_schedules([Path(name) for name in names], by, overrides, out)
        return
    is_recipe = any(name.endswith(".yaml") or name in installed() for name in names)
    if len(names) > 1 or overrides or out is not None or is_recipe:
        raise LargebatchError("explain takes one key; to draw learning rates, add --schedule")
    print(explain_key(*(names or ("",))))


def _draw_schedules(
    paths: Sequence[Path], by: By, overrides: Sequence[str], out: Path | None
) -> None:
    recipes = [_recipe(path, overrides) for path in paths]
    from largebatch.report.rates import Rates, write_rates_of

    names = [recipe.name for recipe in recipes]
    rates = list[Rates]()
    for path, recipe in zip(paths, recipes, strict=True):
        label = recipe.name if names.count(recipe.name) == 1 else str(path)
        try:
            course = follow(recipe.schedule, make_plan(recipe.mathematics))
        except RecipeError as error:  # of several recipes: which?
            raise RecipeError(f"{path}: {error}") from None
        rates.append(Rates(label, recipe, course))
    figure = out or Path("learning-rates.png")
    write_rates_of(figure, rates, by=by)
    for recipe_rates in rates:
        print(printable(recipe_rates.legend))
        print_rows(recipe_rates.course.facts(), width=9)
    if len(rates) > 1:
        print("heights compare only with one optimizer, eta and convention of LARS")
    print(printable(f"drawn: {figure}"))


def _recipe(path: Path, overrides: Sequence[str]) -> Recipe:
    from largebatch.tracking.events import RECIPE

    of_run = path / RECIPE
    exists = os.path.exists(of_run)  # noqa: PTH110 -- False for a name that is too long
    return load_recipe(of_run if exists else path, overrides)


@recipes.default
def _list(*, json: AsJson = False) -> None:
    """Print a row for each installed recipe, by data set.

    Rows fit 80 columns; a wider terminal shows more of the source.
    """
    facts = sorted(_facts(), key=itemgetter("needs_data", "data_set"))
    if json:
        print_json(facts)
        return
    # 51 columns for the indent, the longest name, the two numbers and the spaces between.
    width = max(80, shutil.get_terminal_size().columns) - 51
    rows = [("recipe", "batch", "epochs", "measured here, or after whom")]
    for recipe in facts:
        source = f"after {recipe['after']}" if recipe["after"] else "not measured here"
        words = re.split(r" \(|, ", recipe["measured"] or "")[0] or source
        short = textwrap.shorten(words, width, placeholder="...")
        rows.append(
            (recipe["name"], f"{recipe['global_batch']:,}", f"{recipe['epochs']:.1f}", short)
        )
    # One table for all groups, so that their columns have equal widths.
    head, *lines = table(rows, right=(1, 2)).splitlines()
    print(f"  {head}")
    remaining_lines = iter(lines)
    for data_set, group in groupby(facts, key=itemgetter("data_set")):
        recipes = list(group)
        needs = "needs --data DIR" if recipes[0]["needs_data"] else "embedded, needs no --data"
        print(f"\n{data_set} ({needs})", *islice(remaining_lines, len(recipes)), sep="\n  ")
    print("\ntrain one: largebatch train NAME; edit one: largebatch recipes copy NAME")


def _facts() -> Iterator[dict[str, Any]]:
    """Yield what is known of each installed recipe, as --json prints it."""
    for data_set, texts in by_data_set().items():
        for name, text in texts.items():
            recipe = parse_recipe(text)
            after, measured = origin(text)
            plan = make_plan(recipe.mathematics)
            yield {
                "name": name,
                "data_set": data_set,
                "needs_data": recipe.data.source == "folder",
                "model": recipe.model.name,
                "optimizer": recipe.optimizer.kind,
                "global_batch": plan.global_batch,
                "steps": plan.steps,
                "epochs": plan.epoch(plan.steps),
                "measured": measured,
                "after": after,
            }


@recipes.command
def copy(name: Installed, /, *, out: Path | None = None) -> None:
    """Write an installed recipe to a file, which is not overwritten.

    Args:
        name: Name of the recipe.
        out: File to write (<name>.yaml).
    """
    out = out or Path(f"{name}.yaml")
    write_recipe(out, read_installed(name))
    print(printable(f"recipe: {out}"))


def write_planned(out: Path, text: str) -> None:
    """Write a generated recipe to a new file, after checking that it can be planned."""
    recipe = parse_recipe(text, source=str(out))
    build_schedule(recipe.schedule, make_plan(recipe, workers=1))
    write_recipe(out, text)


def write_recipe(out: Path, text: str) -> None:
    """Write a recipe to a new file; raise LargebatchError if that fails."""
    if out.exists():
        raise LargebatchError(f"{out}: exists already; choose another file with --out")
    with writing(out, error=LargebatchError):
        write_whole(out, text.encode())  # whole or not at all: a part would block the next try
