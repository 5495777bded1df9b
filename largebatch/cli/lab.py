"""The commands below `lab`: questions that many runs answer, or none. They print."""

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter, Token

from largebatch.cli.data import show_index
from largebatch.cli.printing import interrupted, print_rows, wrapped
from largebatch.cli.recipe import write_planned
from largebatch.cli.study import study
from largebatch.cli.sweep import sweep
from largebatch.distributed.environment import own_rank
from largebatch.errors import (
    CheckpointError,
    LargebatchError,
    printable,
    shorten,
)
from largebatch.formatting import aligned, plural
from largebatch.lab.planner.draft import draft, suggested_name, words
from largebatch.lab.planner.suggest import IMAGENET, DataSet
from largebatch.lab.planner.suggest import suggest as suggest_recipe
from largebatch.recipe.arithmetic.describe import describe_division, describe_spans
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe, parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import recipe_name
from largebatch.runs.interrupts import InterruptedStudyError
from largebatch.runs.options import (
    NEW_FOLDER,
    Changes,
    Count,
    Folder,
    Given,
    Machine,
    Number,
    RecipeFile,
    chosen_folder,
)
from largebatch.tracking.events import LOG, REPORT

if TYPE_CHECKING:
    from largebatch.lab.measure.critical_batch import Critical
    from largebatch.lab.measure.rehearsal import Message, Rehearsal

_MONITOR = "monitor=noise_scale"

app = App(name="lab", help="Answer questions by many runs, or without any.")

for _command in (study, sweep):
    app.command(_command)


@app.command(name="range")
def range_(  # noqa: PLR0913 -- its options
    recipe: RecipeFile,
    /,
    *,
    low: Number | None = None,
    high: Number | None = None,
    steps: Count | None = None,
    seeds: Count = 3,
    out: Folder = NEW_FOLDER,
    options: Annotated[Machine, Given] = Machine(),
) -> int:
    """Range test: train while the learning rate rises, and find the usable rates.

    Args:
        low: First learning rate (peak_lr / 1000).
        high: Last learning rate (100 x peak_lr).
        steps: Updates from one to the other.
        seeds: Number of runs.
        out: Folder to write.
    """
    loaded = load_recipe(recipe, options.changes)
    from largebatch.lab.measure.lr_range import (
        CHART,
        choose_range,
        describe,
        read_range,
        train_range,
    )

    rates = choose_range(loaded, low=low, high=high, steps=steps, seeds=seeds)
    of_test = options.options(out=chosen_folder(out, loaded.name)).without_changes()
    try:
        train_range(loaded, of_test, rates, workers=options.workers)
    except InterruptedStudyError:
        return interrupted(of_test.out)
    if own_rank() == 0:
        for sentence in describe(read_range(loaded, of_test.out, rates)):
            print(wrapped(sentence))
        print(printable(f"figure: {of_test.out / CHART}"))
    return 0


def _sizes(_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    sizes = tokens[0].value.split(",")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"expected batches such as 32,64,128,256, got {tokens[0].value!r}")
    return tuple(map(int, sizes))


@app.command
def noise(
    recipe: RecipeFile,
    /,
    *,
    max_steps: Count | None = None,
    measure: Annotated[
        tuple[int, ...] | None, Parameter(converter=_sizes, n_tokens=1, metavar="B,B,...")
    ] = None,
    epochs: Number = 2.0,
    out: Folder = NEW_FOLDER,
    options: Annotated[Machine, Given] = Machine(),
) -> int:
    """Measure the gradient noise scale of a recipe, or read it from a run folder.

    Args:
        recipe: A recipe, or the folder of a run that measured it.
        max_steps: Stop after N updates.
        measure: The critical batch, from runs at these batches, four or more.
        epochs: Epochs of the smallest batch of --measure; the others train to its loss.
        out: Folder to write.
    """
    folder = recipe
    if folder.is_dir() and (measure is not None or not (folder / LOG).exists()):
        expected = "--measure takes a recipe" if measure else f"it holds no run: no {LOG}"
        raise LargebatchError(f"{folder}: this is a folder; {expected}")
    if measure is not None:
        if max_steps is not None:
            raise LargebatchError("--max-steps is for one run; --measure stops runs by --epochs")
        return _measure(recipe, measure, epochs, out, options)
    if not folder.is_dir():
        loaded = load_recipe(recipe, [*options.changes, _MONITOR])
        _require_updates(loaded, options.workers, max_steps)
        from largebatch.runs.run import start

        folder = chosen_folder(out, loaded.name)
        of_run = options.options(out=folder).without_changes()
        summary = start(loaded, replace(of_run, resume="auto", max_steps=max_steps))
        if summary.status == "interrupted":
            return interrupted(folder)
    if own_rank() == 0:
        _show_noise(folder)
    return 0


def _require_updates(recipe: Recipe, workers: int, max_steps: int | None) -> None:
    """Raise LargebatchError if a run has fewer updates than a noise scale needs."""
    from largebatch.report.noise import BOUNDED, LEAST

    planned = make_plan(recipe, workers=workers).steps
    found, remedy = f"duration has {planned:,} updates", f"train for {BOUNDED} or more"
    if max_steps is not None and max_steps < planned:
        planned = max_steps
        found, remedy = f"--max-steps {planned}", f"give --max-steps {BOUNDED} or more"
    if planned < LEAST:
        raise LargebatchError(
            f"{found}: the noise scale needs at least {LEAST} updates, and so few often leave it "
            f"without an upper bound; {remedy}"
        )


def _show_noise(folder: Path) -> None:
    """Print the noise scale of each part of a run, and what it means."""
    from largebatch.report.noise import LEAST, course, describe_noise, measured, samples
    from largebatch.report.run import read_run

    record = read_run(folder)
    parts = course(record)
    number = len(measured(record))
    if not number:
        raise CheckpointError(f"{folder}: holds no noise scale; train with --set {_MONITOR}")
    if not parts:
        raise CheckpointError(
            f"{folder}: holds the noise scale of {number} updates, expected {LEAST} or more; "
            "train longer"
        )
    rows = [("steps", "noise scale", "95 %")]
    for part in parts:
        found = part.found
        value = "unknown" if math.isnan(found.value) else samples(found.value)
        interval = f"{samples(found.low)} to {samples(found.high)}"
        rows.append((f"{part.first:,}-{part.last:,}", value, interval))
    print(aligned(rows, right=(0, 1)))
    print(describe_noise(record))
    if (folder / REPORT).exists():
        print(printable(f"report: {folder / REPORT}"))


def _measure(path: Path, batches: Sequence[int], epochs: float, out: Path, options: Machine) -> int:
    recipe = load_recipe(path, options.changes)
    from largebatch.lab.measure.critical_batch import Critical, measure_critical

    of_runs = options.options(out=chosen_folder(out, recipe.name)).without_changes()
    results = measure_critical(recipe, of_runs, batches, epochs=epochs, workers=options.workers)
    try:
        for result in results:
            if isinstance(result, Critical):
                _show_critical(result)
                print(printable(f"runs: {of_runs.out}"))
            else:
                steps = "not reached" if result.steps is None else f"{result.steps:,.1f} steps"
                print(f"batch {result.batch:,}, rate {result.rate:g}: {steps}", flush=True)
    except InterruptedStudyError:
        return interrupted(of_runs.out)
    return 0


def _show_critical(found: "Critical") -> None:
    from largebatch.report.noise import MORE_STEPS, samples

    print(f"\nto a training loss of {found.target:.4f}:")
    rows = [("batch", "rate", "steps", "samples", "above linear scaling (fit)")]
    for trial in found.best:
        size, steps = trial.batch, trial.steps or 0
        numbers = (f"{size:,}", f"{trial.rate:g}", f"{steps:,.1f}", f"{steps * size:,.0f}")
        rows.append((*numbers, f"{found.more(size):.0%}"))
    print(aligned(rows, right=range(5)))
    noise = found.noise
    low, high = samples(MORE_STEPS * noise.low), samples(MORE_STEPS * noise.high)
    print(
        f"critical batch ({MORE_STEPS:.0%} more steps than linear scaling), in samples\n"
        f"   measured: {samples(found.measured)} (95 %: {samples(found.low)} to "
        f"{samples(found.high)})\n"
        f"  predicted: {samples(found.predicted)} (95 %: {low} to {high}), "
        f"a fifth of the noise scale of batch {found.best[0].batch:,}"
    )


@app.command
def suggest(  # noqa: PLR0913 -- its options
    recipe: Path | None = None,
    /,
    *,
    batch: Count,
    data: Path | None = None,
    model: str | None = None,
    epochs: Count | None = None,
    samples: Count | None = None,
    val_samples: Count | None = None,
    classes: Count | None = None,
    image_size: Count | None = None,
    out: Path | None = None,
) -> None:
    """Write a recipe for a batch between published ones.

    Args:
        recipe: A recipe whose images and network are kept.
        batch: Global batch.
        data: Images instead of a recipe, which are measured as by `init`.
        model: Network (resnet50, or the recipe's).
        epochs: Length of the run (by the epoch law).
        samples: Training images, if not ImageNet's; then also --val-samples and --classes.
        val_samples: Validation images.
        classes: Number of classes.
        image_size: Side in pixels (224).
        out: Recipe to write (<name>.yaml).
    """
    if model is not None:
        from largebatch.models import require_known

        require_known(model)
    numbers = {"--samples": samples, "--val-samples": val_samples, "--classes": classes,
               "--image-size": image_size}  # fmt: skip
    base = _base(recipe, data, model, numbers)
    data_set = _data_set(numbers) if base is None else _data_of(base)
    network = model or (base.model.name if base else "resnet50")
    found = suggest_recipe(batch, data=data_set, model=network, epochs=epochs)
    out = out or Path(f"{suggested_name(found)}.yaml")
    write_planned(out, draft(found, base=base))
    for line in words(found, base=base):
        print(wrapped(line))
    print(printable(f"recipe: {out}\nlook at it: largebatch plan {shlex.quote(str(out))}"))


def _base(
    path: Path | None, data: Path | None, model: str | None, numbers: dict[str, int | None]
) -> Recipe | None:
    """Return the recipe that is given, or that of the images; None without either."""
    if path is None and data is None:
        return None
    given = [option for option, number in numbers.items() if number is not None]
    if path is not None and data is not None:
        given.insert(0, "--data")
    if given:
        raise LargebatchError(f"{', '.join(given)}: {path or data} has these already; leave it out")
    if path is not None:
        recipe = load_recipe(path)
    else:
        assert data is not None
        from largebatch.lab.measure.initial import draft as first_draft
        from largebatch.lab.measure.initial import survey

        name = recipe_name(data.resolve().name, otherwise="own-data")
        recipe = parse_recipe(first_draft(survey(*show_index(data)), name=name))
    if model is None:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_validate({"name": model})})


def _data_of(recipe: Recipe) -> DataSet:
    images = recipe.data
    return DataSet(
        samples=images.train_split,
        val_samples=images.val_split,
        classes=images.classes,
        image_size=images.image_size,
    )


def _data_set(numbers: dict[str, int | None]) -> DataSet:
    """Return the data set of the options; one other than ImageNet takes three numbers."""
    if not any(numbers.values()):
        return IMAGENET
    size = numbers["--image-size"] or IMAGENET.image_size
    required = {option: number for option, number in numbers.items() if option != "--image-size"}
    missing = [option for option, number in required.items() if number is None]
    if missing:
        raise LargebatchError(f"another data set than ImageNet needs {', '.join(missing)} too")
    samples, val_samples, classes = (number or 0 for number in required.values())
    return DataSet(samples=samples, val_samples=val_samples, classes=classes, image_size=size)


@app.command
def rehearse(
    recipe: RecipeFile,
    /,
    *,
    workers: Count = 1,
    rank: int = 0,
    cluster: str | None = None,
    changes: Annotated[Changes, Given] = Changes(),
) -> None:
    """Print the work of one worker of a job, without the job's machines.

    Args:
        workers: Workers of the job.
        rank: Rank of the worker.
        cluster: The cluster it will run on: a name or a file.
    """
    from largebatch.data.datasets.own import import_own
    from largebatch.lab.measure.rehearsal import rehearse as rehearsal
    from largebatch.lab.planner.cluster import load_cluster
    from largebatch.lab.planner.prediction import FIXED_BYTES, HELP

    for module in changes.imports:
        import_own(module)
    loaded = load_recipe(recipe, changes.changes)
    place = load_cluster(cluster) if cluster else None
    result = rehearsal(loaded, workers=workers, rank=rank, cluster=place)
    where = f" on {place.name}: GPU {result.local_rank} of node {result.node}" if place else ""
    rows = {
        "recipe": loaded.name,
        "worker": f"{result.rank:,} of {result.plan.workers:,}, numbered from 0{where}",
        **_work(result),
        **_memory(result),
        **_messages(result),
        **_files(loaded, result),
    }
    print_rows(rows)
    if not result.fits:
        assert result.available is not None
        raise LargebatchError(
            f"an update takes {_size(result.memory.total)} on each worker, libraries some "
            f"{_size(FIXED_BYTES)}, and the GPU has {_size(result.available)}; give "
            f"{HELP['memory']}"
        )


def _work(result: "Rehearsal") -> dict[str, str]:
    plan = result.plan
    positions = plan.positions(0, 0, result.rank)
    samples = shorten([str(sample) for sample in result.first_samples], most=6)
    return {
        "global batch": describe_division(plan),
        "BatchNorm span": describe_spans(plan),
        "first samples": f"{samples} (positions {positions.start:,} to {positions.stop - 1:,})",
    }


def _memory(result: "Rehearsal") -> dict[str, str]:
    """Return rows on the memory of an update, named as the fields of Memory."""
    rows = asdict(result.memory) | {"together": result.memory.total}
    sizes = {name: _size(number) for name, number in rows.items() if number}
    if result.available is not None:
        sizes["together"] += f" of {_size(result.available)}, libraries not counted"
    return sizes


def _messages(result: "Rehearsal") -> dict[str, str]:
    """Return a row on the messages of an update, by the number of workers in each."""
    by_workers: dict[int, list[Message]] = {}
    for message in result.messages if result.plan.workers > 1 else ():
        by_workers.setdefault(message.workers, []).append(message)
    described = []
    for workers, messages in sorted(by_workers.items(), reverse=True):
        kinds = Counter(message.kind for message in messages)
        kind = " and ".join(plural(number, kind) for kind, number in kinds.items())
        size = _size(sum(message.num_bytes for message in messages))
        described.append(f"{kind} over {workers:,} workers, {size}")
    return {"an update": "; ".join(described) or "sends nothing"}


def _files(recipe: Recipe, result: "Rehearsal") -> dict[str, str]:
    """Return a row on the files that the worker writes."""
    written = []
    if result.rank == 0:
        kept = recipe.execution.checkpoints.keep_last + 1
        size = _size(result.memory.checkpoint)
        written.append(
            f"the run folder: log, summary, report, and {kept} checkpoints of {size} or fewer"
        )
        if recipe.data.source == "folder":
            written.append("an index beside the images, unless there is one")
    if recipe.execution.cache is not None and result.local_rank in {0, None}:
        written.append("decoded images in the cache folder of its machine")
    return {"writes": "; ".join(written) or "nothing"}


def _size(num_bytes: float) -> str:
    """Format a number of bytes with three digits.

    >>> [_size(number) for number in (24, 6_376, 102_228_128, 1.6e10)]
    ['24 bytes', '6.38 kB', '102 MB', '16.0 GB']
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            number = num_bytes / size
            return f"{number:.{max(0, 2 - len(str(int(number))) + 1)}f} {unit}"
    return f"{num_bytes:.0f} bytes"
