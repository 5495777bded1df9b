"""The commands that only read recipes: plan, check, explain, recipes. They print."""

import argparse
import re
import shutil
import textwrap
from functools import partial
from pathlib import Path

from largebatch.cli import planning
from largebatch.cli.arguments import (
    Command,
    add_command,
    add_execution,
    add_imports,
    add_recipe,
    add_set,
    count,
)
from largebatch.cli.printing import print_rows
from largebatch.errors import LargebatchError, RecipeError, printable
from largebatch.formatting import aligned, duration, plural, three_digits
from largebatch.lab.mlperf.rules import LARS_REMARK, ROUND, BrokenRule, broken_rules
from largebatch.recipe.arithmetic.describe import (
    describe_decoding,
    describe_division,
    describe_protocol,
    describe_spans,
)
from largebatch.recipe.arithmetic.plan import Plan, make_plan, plan_updates, require_workers
from largebatch.recipe.explain import explain
from largebatch.recipe.installed import by_data_set, origin, read_installed
from largebatch.recipe.loading import load_recipe, parse_recipe
from largebatch.recipe.optimizers import LARS
from largebatch.recipe.polish import Polish
from largebatch.recipe.recipe import Recipe, require_backend
from largebatch.schedules.build import build_schedule, follow

BREAKS_RULES = 1
"""Exit code of `check --mlperf-closed` for a recipe of the open division."""


def add_commands(command: Command) -> None:
    """Add the commands."""
    plan = command("plan", _plan, "print the arithmetic of a run")
    add_recipe(plan)
    plan.add_argument("--workers", type=count, default=1, metavar="N")
    add_execution(plan)
    add_imports(plan)
    planning.add_options(plan)

    check = command("check", _check, "validate recipes without running them")
    check.add_argument("recipes", type=Path, nargs="+", metavar="recipe")
    add_set(check)
    check.add_argument(
        "--mlperf-closed",
        action="store_true",
        help="list the rules of MLPerf's closed division that they break",
    )

    explained = command("explain", _explain, "explain a key of a recipe, or draw its schedule")
    explained.add_argument("key", nargs="?", default="", help="such as optimizer.eta")
    explained.add_argument("recipe", nargs="?", type=Path, help="draw this one: explain schedule R")
    add_set(explained)
    explained.add_argument("--out", type=Path, metavar="PNG", help="<recipe name>-schedule.png")

    recipes = command("recipes", _recipes, "list the installed recipes, or copy one to edit")
    copy = partial(add_command, recipes.add_subparsers(metavar="copy"))
    copied = copy("copy", _copy, "write an installed recipe to a file, which is not overwritten")
    copied.add_argument("name")
    copied.add_argument("--out", type=Path, metavar="FILE", help="<name>.yaml")


def _workers(args: argparse.Namespace, recipe: Recipe) -> int:
    """Return the number of workers to plan for: the protocol's, if the recipe has one."""
    given: int = args.workers
    if recipe.protocol is None:
        return given
    if given != 1:
        require_workers(recipe, workers=given)
    return recipe.protocol.workers


def _plan(args: argparse.Namespace) -> int:
    if planning.wanted(args):
        return planning.plan_elsewhere(args)
    recipe = load_recipe(args.recipe, args.set)
    plan = make_plan(recipe, workers=_workers(args, recipe))
    course = follow(recipe.schedule, plan)
    rates, peak = course.rates, course.peak
    rows = {
        "recipe": recipe.name,
        **(
            {"protocol": describe_protocol(recipe)}
            if recipe.protocol
            else {"global batch": describe_division(plan)}
        ),
        **_batch_changes(plan),
        "BatchNorm span": describe_spans(plan),
        "data": f"{plan.train_samples:,} training, {plan.val_samples:,} validation samples"
        + (", held out of the training images" if recipe.data.held_out else ""),
        "images": describe_decoding(recipe),
        **_image_sizes(recipe, plan),
        "an epoch": _epoch(plan),
        "steps": f"{plan.steps:,} = {plan.train_steps:,} augmented + {plan.clean_steps:,} clean",
        "samples seen": f"{plan.position(plan.steps):,} ({plan.epoch(plan.steps):.2f} epochs)",
        "learning rate": f"from {rates[0]:g}, peak {rates[peak]:g} at step {peak} "
        f"(epoch {plan.epoch(peak):.2f}), last {rates[-1]:g}",
        "warm-up": f"{plan.warmup_steps:,} steps",
        **_polishing(recipe, plan),
        "evaluations": f"{len(plan.evaluate_after)} on the way, one after each stage",
    }
    print_rows(rows)
    from largebatch.data.datasets.own import import_own
    from largebatch.runs.reduction import describe_groups

    for module in args.imports:
        import_own(module)
    print_rows({"gradient groups": describe_groups(recipe)})  # last: this takes seconds
    included = {
        "this machine": _this_machine(recipe, plan),
        "included": "forward, backward and update of every step",
        "not included": "starting, reading images, sums over workers, evaluations, statistics, "
        "the report",
    }
    print_rows(included)
    return 0


def _batch_changes(plan: Plan) -> dict[str, str]:
    """Return a row for each change of the global batch."""
    later = zip(plan.batch_changes, plan.within(range(plan.steps))[1:], strict=True)
    return {
        f"from {piece.step:,}": f"{size:,} = {plan.workers} workers x {accumulation} micro-batches "
        f"x {plan.device_batch}, epoch {plan.epoch(piece.step):.2f}, learning rate of the schedule "
        f"x {piece.lr_factor:g}"
        for piece, (_, size, accumulation) in later
    }


def _image_sizes(recipe: Recipe, plan: Plan) -> dict[str, str]:
    """Return the row on the resolution schedule, if the recipe has one."""
    if not plan.sizes:
        return {}
    parts = [f"{piece.image_size} until step {piece.end:,}" for piece in plan.sizes]
    return {"image size": f"{', '.join(parts)}; clean and evaluation {recipe.data.image_size}"}


def _epoch(plan: Plan) -> str:
    """Describe the steps of an epoch, and a batch larger than an epoch."""
    sizes = [piece.global_batch for piece in plan.pieces]
    found = ", then ".join(f"{plan.train_samples / size:.2f}" for size in sizes) + " steps"
    if plan.steps_per_epoch < 1:
        times = plan.global_batch / plan.train_samples
        found += f": a batch is larger than an epoch and holds every image {times:.2f} times"
    return found


def _this_machine(recipe: Recipe, plan: Plan) -> str:
    """Describe the time and memory of one worker here, measured on a few samples."""
    from largebatch.lab.measure.estimate import estimate

    found = estimate(recipe, plan)
    step, run = found.step_seconds, found.run_seconds
    return (
        f"{three_digits(1000 * step)} ms a step of one worker on {found.device} in "
        f"{found.precision}, {duration(run)} for all; {found.memory_bytes / 2**30:.2g} GiB; "
        f"measured on {found.samples} samples"
    )


def _polishing(recipe: Recipe, plan: Plan) -> dict[str, str]:
    """Return the rows on the stages after the schedule."""
    polish = recipe.polish or Polish.model_construct()
    rows = {}
    if polish.ema:
        rows["EMA"] = f"over some {1 / (1 - polish.ema):,.0f} updates (ema {polish.ema:g})"
    if polish.swa:
        rows["SWA"] = (
            f"the mean of {len(plan.swa_after):,} states of the weights, every {plan.swa_every:,} "
            f"of the last {plan.swa_steps:,} steps"
        )
    if polish.affine:
        rows["affine"] = (
            f"{plan.affine_steps:,} steps more, learning rate from {polish.affine.lr:g} to 0"
        )
    samples = polish.statistics.samples if polish.statistics else 0
    rows["statistics"] = f"{samples:,} clean samples" if samples else "none"
    if polish.held_out:
        rows["held out"] = f"{polish.held_out:,} training samples, which decide on every stage"
    return rows


def _check(args: argparse.Namespace) -> int:
    problems, broken = [], False
    for path in args.recipes:
        try:
            recipe = load_recipe(path, args.set)
            build_schedule(recipe.schedule, plan_updates(recipe))
        except LargebatchError as error:
            problems.append(str(error))
        else:
            rules = broken_rules(recipe) if args.mlperf_closed else []
            broken = broken or bool(rules)
            verdict = _closed(recipe, rules) if args.mlperf_closed else f"ok{_hint(recipe)}"
            print(printable(f"{path}: {verdict}"))
    if problems:
        raise LargebatchError("\n".join(problems))
    return BREAKS_RULES if broken else 0


def _hint(recipe: Recipe) -> str:
    """Return why Horovod cannot train a valid recipe, and what can; empty if it can."""
    try:
        require_backend(recipe, "horovod")
    except RecipeError as error:
        return f"; {error}"
    return ""


def _closed(recipe: Recipe, rules: list[BrokenRule]) -> str:
    """Describe the rules of MLPerf's closed division that a recipe breaks, one per line."""
    division = f"MLPerf's closed division (Training {ROUND}, ResNet)"
    if not rules:
        remark = f"; {LARS_REMARK}" if isinstance(recipe.optimizer, LARS) else ""
        return f"keeps the rules of {division}{remark}"
    table = aligned([(rule.setting, rule.found, rule.rule) for rule in rules])
    return f"breaks {plural(len(rules), 'rule')} of {division}\n{textwrap.indent(table, '  ')}"


def _explain(args: argparse.Namespace) -> int:
    if args.recipe is None:
        if args.out or args.set:
            raise LargebatchError(
                "--out and --set are for `explain schedule RECIPE`: which recipe?"
            )
        print(explain(args.key))
        return 0
    if args.key != "schedule":
        raise LargebatchError(f"`explain {args.key}` takes no recipe, only `explain schedule` does")
    from largebatch.report.rates import write_rates

    recipe = load_recipe(args.recipe, args.set)
    course = follow(recipe.schedule, plan_updates(recipe))
    figure = args.out or Path(f"{recipe.name}-schedule.png")
    write_rates(figure, course, name=recipe.name)
    print_rows({**course.facts(), "drawn": figure}, width=9)
    return 0


def _recipes(_args: argparse.Namespace) -> int:
    """Print a row for each installed recipe, by data set; measured ones first.

    Rows fit 80 columns; a wider terminal shows more of the source.
    """
    width = max(80, shutil.get_terminal_size().columns) - 51
    groups = []
    for data_set, texts in by_data_set().items():
        found = {name: (parse_recipe(text), origin(text)) for name, text in texts.items()}
        embedded = any(recipe.data.source == "digits" for recipe, _ in found.values())
        measured = any(header.measured for _, header in found.values())
        groups.append((not embedded, not measured, data_set, found))
    rows, headings = [("recipe", "batch", "epochs", "measured here, or after whom")], {}
    for needs_data, _, data_set, found in sorted(groups, key=lambda group: group[:3]):
        where = "needs --data DIR" if needs_data else "embedded, needs no --data"
        headings[len(rows)] = f"\n{data_set} ({where})"
        for name in sorted(found, key=lambda name: not found[name][1].measured):
            recipe, header = found[name]
            plan = plan_updates(recipe)
            source = f"after {header.after}" if header.after else "not measured here"
            words = re.split(r" \(|, ", header.measured)[0] or source
            short = textwrap.shorten(words, width, placeholder="...")
            epochs = f"{plan.epoch(plan.steps):.1f}"
            rows.append((name, f"{plan.global_batch:,}", epochs, short))
    for place, line in enumerate(aligned(rows, right=(1, 2)).splitlines()):
        if place in headings:
            print(headings[place])
        print(f"  {line}")
    print("\ntrain one: largebatch train NAME; edit one: largebatch recipes copy NAME")
    return 0


def _copy(args: argparse.Namespace) -> int:
    out = args.out or Path(f"{args.name}.yaml")
    text = read_installed(args.name)
    write_recipe(out, text)
    print(printable(f"recipe: {out}"))
    return 0


def write_planned(out: Path, text: str) -> None:
    """Write a generated recipe to a new file, after checking that it can be planned."""
    recipe = parse_recipe(text, source=str(out))
    build_schedule(recipe.schedule, make_plan(recipe, workers=1))
    write_recipe(out, text)


def write_recipe(out: Path, text: str) -> None:
    """Write a recipe to a new file; raise LargebatchError if that fails."""
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        other = "; choose another file with --out" if isinstance(error, FileExistsError) else ""
        raise LargebatchError(f"{out}: cannot write the recipe: {error.strerror}{other}") from None
