"""The commands below `lab`, and `batch`: questions that many runs answer, or none. They print."""

import shlex
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from rich.filesize import decimal

from largebatch.address import Place, place_of
from largebatch.cli.printing import INTERRUPTED, interrupted, print_rows, wrapped
from largebatch.cli.recipe import ClusterName, write_planned, write_recipe
from largebatch.distributed.environment import TIMEOUT_SECONDS, own_rank, worker_rank
from largebatch.errors import CheckpointError, LargebatchError, printable, shorten
from largebatch.formatting import MISSING, plural, table
from largebatch.lab.planner.cluster import installed_clusters, load_cluster
from largebatch.recipe.arithmetic.plan import describe_division, describe_spans, make_plan
from largebatch.recipe.loading import load_recipe
from largebatch.runs.interrupts import InterruptedStudyError
from largebatch.runs.options import (
    NEW_FOLDER,
    Changes,
    Count,
    Folder,
    Given,
    Imports,
    MachineOptions,
    Number,
    Options,
    RecipeFile,
    Resume,
    Seconds,
    chosen_folder,
)
from largebatch.tracking.events import LOG, REPORT, write_json

if TYPE_CHECKING:
    from largebatch.lab.measure.rehearsal import Message, Rehearsal

_MONITOR = "monitor=noise_scale"
RESULT = "batch.json"

app = App(name="lab", help="Answer questions by many runs, or without any.")


@app.command
def study(  # noqa: PLR0913 -- its options
    file: Path,
    /,
    *,
    out: Folder | None = None,
    jobs: Count = 1,
    data: Annotated[tuple[str, ...], Parameter(metavar="[RECIPE=]DIR")] = (),
    dataset: Annotated[str | None, Parameter(metavar="M:F")] = None,
    imports: Imports = (),
    timeout: Seconds = TIMEOUT_SECONDS,
    dry_run: bool = False,
    page: bool = False,
) -> int:
    """Carry out a study, or resume it; print its table and draw its page.

    Args:
        file: A YAML file, or an installed study: lrbench, gtdlbench, rudra, jaeger, dell, and small
            ones: digits-policies, digits-settings, digits-staleness, digits-servers.
        out: Folder of the records (runs/<name>), which several machines may fill at once.
        jobs: Number of runs at a time.
        data: Folder of images, or RECIPE=DIR for one recipe of the study.
        dataset: Instead: what module M's function F returns, (train, val).
        imports: Modules to import first.
        timeout: Seconds to wait for a worker that does nothing.
        dry_run: Print the runs that are left, and how long they take, by a few updates of some.
        page: Start nothing; draw what is recorded, and simulations.
    """
    from largebatch.lab.studies import runner
    from largebatch.lab.studies.study import StudyMachine

    folders: dict[str, Place] = {}
    for data_set in data:
        # A bare folder is that of all recipes: its name is empty.
        name, folder = data_set.split("=", 1) if "=" in data_set else ("", data_set)
        if name in folders:
            raise LargebatchError(
                f"--data {data_set}: give one folder, or RECIPE=DIR for each recipe"
            )
        folders[name] = place_of(folder)
    run_options = Options(dataset=dataset, imports=tuple(imports), timeout=timeout)
    machine = StudyMachine(data=folders, options=run_options)

    done = runner.study(
        file, out=out, jobs=jobs, dry_run=dry_run, page=page, machine=machine,
        report=lambda line: print(printable(line), flush=True),
    )  # fmt: skip
    return 0 if done else INTERRUPTED


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
    options: Annotated[MachineOptions, Given] = MachineOptions(),
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
    from largebatch.lab.measure.lr_range import CHART, describe, plan_range, train_range

    rates = plan_range(loaded, low=low, high=high, steps=steps, seeds=seeds)
    of_test = options.options(out=chosen_folder(out, loaded.name)).without_changes()
    try:
        test = train_range(rates, of_test, workers=options.workers)
    except InterruptedStudyError:
        return interrupted(of_test.out)
    if test is not None:
        for sentence in describe(test):
            print(wrapped(sentence))
        print(printable(f"figure: {of_test.out / CHART}"))
    return 0


@app.command
def noise(
    recipe: RecipeFile,
    /,
    *,
    max_steps: Count | None = None,
    out: Folder = NEW_FOLDER,
    options: Annotated[MachineOptions, Given] = MachineOptions(),
) -> int:
    """Measure the gradient noise scale: the batch, in samples, above which a larger one pays less.

    A batch of a fifth of it takes 20 % more epochs than small batches. A recipe is trained to
    measure it; with --out a run there is resumed. Of a run folder it is read.

    Args:
        recipe: A recipe, or the folder of a run with monitor: noise_scale.
        max_steps: Stop after N updates.
        out: Folder to write.
    """
    from largebatch.report.noise import BOUNDED, LEAST, describe_noise, measured
    from largebatch.report.run import read_run

    folder = recipe
    if folder.is_dir() and not (folder / LOG).exists():
        raise LargebatchError(f"{folder}: this is a folder; it holds no run: no {LOG}")
    if not folder.is_dir():
        loaded = load_recipe(recipe, [*options.changes, _MONITOR])
        planned = make_plan(loaded, workers=options.workers).steps
        from largebatch.runs.run import start

        if min(planned, max_steps or planned) < LEAST:
            setting = (
                f"--max-steps {max_steps}"
                if max_steps
                else f"duration has {plural(planned, 'update')}"
            )
            raise LargebatchError(
                f"{setting}: the noise scale needs at least {LEAST} updates, and so few often "
                f"leave it without an upper bound; train for {BOUNDED} or more"
            )
        folder = chosen_folder(out, loaded.name)
        resume: Resume = "auto" if out != NEW_FOLDER else False
        of_run = options.options(out=folder).without_changes()
        summary = start(loaded, replace(of_run, resume=resume, max_steps=max_steps))
        if summary.status == "interrupted":
            return interrupted(folder)
    if own_rank() == 0:
        record = read_run(folder)
        if len(measured(record)) < LEAST:
            raise CheckpointError(
                f"{folder}: holds the noise scale of {len(measured(record))} updates, expected "
                f"{LEAST} or more; train longer, with --set {_MONITOR}"
            )
        print(describe_noise(record))
        if (folder / REPORT).exists():
            print(printable(f"its course: {folder / REPORT}"))
    return 0


@app.command
def suggest(
    recipe: Path | None = None,
    /,
    *,
    batch: Count,
    epochs: Count | None = None,
    out: Path | None = None,
) -> None:
    """Write a recipe with LARS for a batch, between published ones: from 1,632 on ImageNet.

    For other images the batch is compared by updates in an epoch; smaller ones are for SGD.

    Args:
        recipe: A recipe whose images and network are kept (ResNet-50 on ImageNet).
        batch: Global batch.
        epochs: Length of the run (by the epoch law).
        out: Recipe to write (<name>.yaml).
    """
    from largebatch.lab.planner.suggest import suggest as suggest_recipe

    base = None if recipe is None else load_recipe(recipe)
    suggestion = suggest_recipe(batch, base=base, epochs=epochs)
    out = out or Path(f"{suggestion.recipe.name}.yaml")
    write_planned(out, suggestion.text)
    print(wrapped(suggestion.source))
    print(printable(f"recipe: {out}\nlook at it: largebatch plan {shlex.quote(str(out))}"))


@app.command
def clusters() -> None:
    """List the installed clusters, for --cluster of plan, batch, launch and lab rehearse."""
    rows = [("cluster", "nodes", "GPUs of a node", "", "GB/s between nodes", "cores of a node")]
    for name, spec in installed_clusters().items():
        gpu = spec.gpu.name if spec.gpu else MISSING
        network = spec.network_gigabytes_per_second
        size = f"{spec.nodes:,}", f"{spec.gpus_per_node}"
        rows.append((name, *size, gpu, f"{network or MISSING}", f"{spec.cpu_cores}"))
    print(table(rows, right=(1, 2, 4, 5)))


@app.command
def rehearse(
    recipe: RecipeFile,
    /,
    *,
    workers: Count = 1,
    rank: int = 0,
    cluster: ClusterName | None = None,
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
    from largebatch.lab.planner.prediction import FIXED_BYTES, HELP

    for module in changes.imports:
        import_own(module)
    loaded = load_recipe(recipe, changes.changes)
    target = load_cluster(cluster) if cluster else None
    result = rehearsal(loaded, workers=workers, rank=rank, cluster=target)
    plan = result.plan
    where = ""
    if target is not None:
        # Ranks are numbered node by node, as every launcher numbers them.
        node, gpu = divmod(rank, target.gpus_per_node)
        where = f" on {target.name}: GPU {gpu} of node {node}"
    positions = plan.positions(0, 0, rank)
    samples = shorten([str(sample) for sample in result.first_samples], most=6)
    sizes = result.memory | {"together": result.total}
    of = f" of {_size(result.available)}" if result.available is not None else ""
    rows = {
        "recipe": loaded.name,
        "worker": f"{rank:,} of {plan.workers:,}, numbered from 0{where}",
        "global batch": describe_division(plan),
        "BatchNorm span": describe_spans(plan),
        "first samples": f"{samples} (positions {positions.start:,} to {positions.stop - 1:,})",
        **{name: _size(number) for name, number in sizes.items() if number},
        "an update": _messages(result),
    }
    rows["together"] += f"{of}, libraries not counted"
    print_rows(rows)
    if result.available is not None and result.total + FIXED_BYTES > result.available:
        raise LargebatchError(
            f"an update takes {_size(result.total)} on each worker, libraries some "
            f"{_size(FIXED_BYTES)}, and the GPU has{of.removeprefix(' of')}; give {HELP['memory']}"
        )


def _messages(result: "Rehearsal") -> str:
    by_workers: dict[int, list[Message]] = {}
    for message in result.messages if result.plan.workers > 1 else ():
        by_workers.setdefault(message.workers, []).append(message)
    described = []
    for workers, messages in sorted(by_workers.items(), reverse=True):
        kinds = Counter(message.kind for message in messages)
        kind = " and ".join(plural(number, kind) for kind, number in kinds.items())
        size = _size(sum(message.num_bytes for message in messages))
        described.append(f"{kind} over {plural(workers, 'worker')}, {size}")
    return "; ".join(described) or "sends nothing"


def _size(num_bytes: float) -> str:
    return decimal(int(num_bytes), precision=2)


def batch(
    recipe: RecipeFile,
    /,
    *,
    minutes: Number = 10.0,
    cluster: ClusterName | None = None,
    price: Number | None = None,
    out: Folder = NEW_FOLDER,
    options: Annotated[MachineOptions, Given] = MachineOptions(),
) -> int:
    """Measure how large a batch pays on your images, and write the recipe for it.

    Args:
        minutes: Time of the measurements.
        cluster: The cluster it will run on: a name or a file.
        price: Price of a GPU hour there.
        out: Folder to write.
    """
    target = None
    if cluster is not None:
        target = load_cluster(cluster)
        if price is not None:
            target = target.model_copy(update={"price_per_gpu_hour": price})
    elif price is not None:
        raise LargebatchError("--price is of a GPU hour of a cluster: give --cluster NAME too")
    loaded = load_recipe(recipe, options.changes)
    from largebatch.data.datasets.own import import_own
    from largebatch.lab.measure.batch import Question, advise, describe, draft

    # Each of its measurements is a run of its own, with its own workers.
    if worker_rank() is not None:
        raise LargebatchError("batch starts its workers itself: give --workers N, no launcher")
    for module in options.imports:
        import_own(module)
    out = chosen_folder(out, loaded.name)
    question = Question(
        recipe=loaded,
        options=options.options(out=out).without_changes(),
        minutes=minutes,
        cluster=target,
    )
    try:
        advice = advise(question)
    except InterruptedStudyError:
        print(printable(f"stopped before the end; start again with another --out than {out}"))
        return INTERRUPTED
    for line in describe(advice):
        print(wrapped(line))
    result = dict(zip(("critical", "low", "high"), advice.critical, strict=True)) | {
        "noise": asdict(advice.noise),
        "rows": [asdict(row) for row in advice.rows],
        "chosen": advice.chosen.batch,
        "rate": advice.rate,
    }
    write_json(out / RESULT, result)
    path = out / f"{advice.advised.name}.yaml"
    write_recipe(path, draft(advice))
    where = f" --data {shlex.quote(str(options.data))}" if options.data else ""
    print(printable(f"recipe: {path}\ntrain it: largebatch train {shlex.quote(str(path))}{where}"))
    return 0
