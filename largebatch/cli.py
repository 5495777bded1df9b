"""The command line: parse, call, print, exit code. The only module that prints.

Nothing here imports PyTorch before a command needs it, so `check`, `plan` and `explain` answer at
once and run where there is no GPU.

Exit codes: 0 done; 2 the user can fix it (one message, no traceback); 75 interrupted, `--resume`
goes on; 1 anything else.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from largebatch.errors import (
    BackendError,
    CheckpointError,
    LargebatchError,
    PeerLostError,
    PlanError,
    RecipeError,
    WorkerFailedError,
)
from largebatch.explain import explain
from largebatch.folder import check_folder, default_folder
from largebatch.loading import load_recipe
from largebatch.plan import build_schedule, make_plan
from largebatch.workers import launched_rank

if TYPE_CHECKING:
    from largebatch.runner import Options

DONE, FAILED, USER, INTERRUPTED = 0, 1, 2, 75


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words, argparse.Namespace(words=words))
    rank = _rank()
    try:
        code: int = args.call(args)
    except LargebatchError as error:
        if rank == 0:
            print(f"largebatch: {error}", file=sys.stderr)
        elif not isinstance(error, (RecipeError, PlanError)):  # which every worker finds alike
            print(f"largebatch: worker {rank}: {error}", file=sys.stderr)
        return USER
    except (PeerLostError, WorkerFailedError) as error:
        if rank == 0:
            print(f"largebatch: {error}", file=sys.stderr)
        return FAILED
    return code


def _rank() -> int:
    """Return this process's rank; one that is not among several workers is worker 0."""
    return launched_rank() or 0


def _train(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe, args.set)
    if args.resume and args.out is None:
        raise CheckpointError("--resume goes on with the run in --out DIR: say which")
    folder = args.out or default_folder(recipe)
    if args.backend == "horovod" and args.workers > 1 and launched_rank() is None:
        make_plan(recipe, workers=args.workers, device_batch=args.device_batch)
        check_folder(folder, resume=args.resume)
        _become_horovodrun(args)
    from largebatch.runner import run

    summary = run(
        recipe,
        workers=args.workers,
        out=folder,
        data=args.data,
        backend=args.backend,
        device_batch=args.device_batch,
        decoder=args.decoder,
        resume=args.resume,
        max_steps=args.max_steps,
    )
    if _rank() == 0:
        if summary.status == "interrupted":
            print(f"to go on: the same command with --resume --out {folder}")
        print(f"report: {folder / 'report.html'}")
    asked_to_stop = args.max_steps is not None and summary.steps >= args.max_steps
    return INTERRUPTED if summary.status == "interrupted" and not asked_to_stop else DONE


def _become_horovodrun(args: argparse.Namespace) -> NoReturn:
    """Replace this process by the same command as several workers under horovodrun."""
    beside = Path(sys.executable).parent
    program = shutil.which("horovodrun", path=str(beside)) or shutil.which("horovodrun")
    if program is None:
        raise BackendError(
            "--backend horovod needs horovod, which is not installed; build it with: "
            "launch/install_horovod.sh"
        )
    command = [program, "-np", str(args.workers), "--gloo", sys.executable, "-m", "largebatch"]
    words = [*args.words, "--workers", "1"]  # the last one counts
    os.execv(program, [*command, *words])  # noqa: S606 -- signals then reach horovodrun itself


def _evaluate(args: argparse.Namespace) -> int:
    from largebatch.saved import evaluate_checkpoint

    metrics = evaluate_checkpoint(args.checkpoint, _options(args, out=Path()))
    if _rank() == 0:
        print(
            f"top-1 {metrics.top1:.2%}  top-5 {metrics.top5:.2%}  loss {metrics.loss:.4f}  "
            f"({metrics.samples} samples)"
        )
    return DONE


def _polish(args: argparse.Namespace) -> int:
    from largebatch.saved import polish_checkpoint

    summary = polish_checkpoint(args.checkpoint, _options(args, out=args.out), samples=args.samples)
    if _rank() == 0:
        before, after = summary.stages
        for key in ("top1", "top5", "loss"):
            print(f"{key:>5}: {before[key]:.4f} -> {after[key]:.4f}")
        print(f"report: {args.out / 'report.html'}")
    return DONE


def _options(args: argparse.Namespace, *, out: Path) -> "Options":
    from largebatch.runner import Options

    return Options(
        out=out,
        data=args.data,
        backend=args.backend,
        device_batch=args.device_batch,
        decoder=args.decoder,
    )


def _plan(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe, args.set)
    plan = make_plan(recipe, workers=args.workers, device_batch=args.device_batch)
    rates = list(map(build_schedule(recipe), range(plan.steps)))
    peak = max(range(plan.steps), key=rates.__getitem__)
    polish = recipe.polish
    samples = polish.statistics_samples if polish else None
    spans = "no BatchNorm"
    if plan.bn_span:
        spans = f"{plan.bn_span} samples, {plan.device_batch // plan.bn_span} in a device batch"
    rows = {
        "recipe": recipe.name,
        "global batch": f"{plan.global_batch:,} = {plan.workers} workers x {plan.accumulation} "
        f"micro-batches x {plan.device_batch}",
        "BatchNorm span": spans,
        "data": f"{plan.train_samples:,} training, {plan.val_samples:,} validation samples",
        "an epoch": f"{plan.steps_per_epoch:.2f} steps",
        "steps": f"{plan.steps:,} = {plan.train_steps:,} augmented + {plan.clean_steps:,} clean",
        "samples seen": f"{plan.steps * plan.global_batch:,} ({plan.epoch(plan.steps):.2f} epochs)",
        "rate": f"from {rates[0]:g}, peak {rates[peak]:g} at step {peak} "
        f"(epoch {plan.epoch(peak):.2f}), last {rates[-1]:g}",
        "warm-up": f"{plan.warmup_steps:,} steps",
        "statistics": f"{samples:,} clean samples" if samples else "none",
        "evaluations": f"{len(plan.evaluate_after)} on the way, one after each stage",
    }
    for name, value in rows.items():
        print(f"{name:>15}  {value}")
    return DONE


def _check(args: argparse.Namespace) -> int:
    problems = []
    for path in args.recipes:
        try:
            recipe = load_recipe(path, args.set)
            make_plan(recipe, workers=1)
            build_schedule(recipe)
        except LargebatchError as error:
            problems.append(str(error))
        else:
            print(f"{path}: ok")
    if problems:
        raise LargebatchError("\n".join(problems))
    return DONE


def _explain(args: argparse.Namespace) -> int:
    print(explain(args.key))
    return DONE


def _index(args: argparse.Namespace) -> int:
    from largebatch.data.index import check_same_classes, load_or_read

    train, val = (load_or_read(args.folder, split) for split in ("train", "val"))
    check_same_classes(train, val)
    print(
        f"{args.folder}: {len(train.classes)} classes, {len(train)} training and {len(val)} "
        "validation pictures, all readable"
    )
    return DONE


def _report(args: argparse.Namespace) -> int:
    from largebatch.report import write_report

    for folder in args.runs:
        print(write_report(folder))
    return DONE


def _doctor(_: argparse.Namespace) -> int:
    from largebatch.doctor import examine

    for finding in examine():
        print(finding)
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="largebatch",
        description="Train image classifiers with very large mini-batches, then polish them.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, call: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(call=call)
        return added

    train = command("train", _train, "train, polish and evaluate as a recipe says")
    train.add_argument("recipe", type=Path)
    _add_set(train)
    train.add_argument("--workers", type=_count, default=1, metavar="N", help="local processes")
    _add_machine(train)
    train.add_argument("--out", type=Path, metavar="DIR", help="run folder (runs/<name>-<time>)")
    train.add_argument("--resume", action="store_true", help="go on with the run in --out")
    train.add_argument("--max-steps", type=_count, metavar="N", help="stop after N updates in all")

    evaluate = command("evaluate", _evaluate, "measure a checkpoint or the newest one of a run")
    evaluate.add_argument("checkpoint", type=Path)
    _add_machine(evaluate)

    polish = command("polish", _polish, "do the statistics pass on a checkpoint of any run")
    polish.add_argument("checkpoint", type=Path)
    polish.add_argument("--out", type=Path, required=True, metavar="DIR", help="new run folder")
    polish.add_argument("--samples", type=_count, metavar="N", help="pictures to measure (all)")
    _add_machine(polish)

    plan = command("plan", _plan, "print the arithmetic of a run")
    plan.add_argument("recipe", type=Path)
    _add_set(plan)
    plan.add_argument("--workers", type=_count, default=1, metavar="N")
    plan.add_argument("--device-batch", type=_count, metavar="N")

    check = command("check", _check, "validate recipes without running them")
    check.add_argument("recipes", type=Path, nargs="+", metavar="recipe")
    _add_set(check)

    explained = command("explain", _explain, "say what a key of a recipe means")
    explained.add_argument("key", nargs="?", default="", help="such as optimizer.eta")

    data = command("data", _index, "prepare data sets").add_subparsers(required=True)
    index = data.add_parser("index", help="read and verify every picture of DIR/{train,val}")
    index.add_argument("folder", type=Path, metavar="DIR")

    report = command("report", _report, "draw a run folder again")
    report.add_argument("runs", type=Path, nargs="+", metavar="run")

    command("doctor", _doctor, "say what is installed and works, and how to get the rest")
    return parser


def _count(text: str) -> int:
    """Read a number of things: 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override the recipe"
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    """Add what the machine decides about a run."""
    parser.add_argument("--backend", choices=["auto", "serial", "torch", "horovod"], default="auto")
    parser.add_argument(
        "--device-batch", type=_count, metavar="N", help="samples a worker holds at a time"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="DIR/{train,val}/<class>/*")
    parser.add_argument(
        "--decoder", choices=["dali", "torchvision"], help="instead of the recipe's"
    )
