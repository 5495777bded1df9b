"""The command `train`: train, polish and evaluate a recipe. It prints."""

import argparse
from pathlib import Path

from largebatch.cli.arguments import (
    INTERRUPTED,
    Command,
    add_execution,
    add_machine,
    add_recipe,
    add_workers,
    count,
    machine_of,
    out_folder,
    seconds,
    updates,
)
from largebatch.distributed.environment import own_rank
from largebatch.errors import CheckpointError, printable
from largebatch.recipe.loading import load_recipe
from largebatch.runs.interrupts import describe_saved
from largebatch.tracking.events import REPORT, Status


def add_commands(command: Command) -> None:
    """Add the command `train`."""
    train = command("train", _train, "train, polish and evaluate a recipe")
    add_recipe(train)
    add_execution(train)
    add_workers(train, dest="workers")
    add_machine(train)
    train.add_argument("--out", type=out_folder, metavar="DIR", help="folder (runs/<name>-<time>)")
    train.add_argument(
        "--resume",
        choices=("yes", "auto"),
        metavar="auto",
        nargs="?",
        help="continue the run in --out; auto: if there is one, else start one",
    )
    train.add_argument(
        "--restarts",
        type=count,
        default=0,
        metavar="N",
        help="restart --workers that died, at most N times",
    )
    train.add_argument(
        "--min-workers",
        type=count,
        metavar="M",
        help="fewest workers to continue with, if a restart fails",
    )
    train.add_argument("--max-steps", type=count, metavar="N", help="stop after N updates in total")
    train.add_argument(
        "--time-limit", type=seconds, metavar="T", help="stop before: 90m, 8h or seconds"
    )
    train.add_argument(
        "--profile",
        type=updates,
        metavar="FROM:TO",
        help="write trace.json of these updates, and add a table of it to the report",
    )
    train.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that may differ from the resumed run, such as schedule.peak_lr or data.index",
    )


def _train(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe, args.set)
    if args.resume and args.out is None:
        raise CheckpointError("--resume continues the run in --out DIR; pass --out")
    from largebatch.runs.folder import default_folder
    from largebatch.runs.run import run

    folder = args.out or default_folder(recipe)
    try:
        summary = run(
            recipe,
            workers=args.workers,
            out=folder,
            **machine_of(args),
            resume="auto" if args.resume == "auto" else args.resume is not None,
            max_steps=args.max_steps,
            time_limit=args.time_limit,
            profile=args.profile,
            allow=args.allow,
            restarts=args.restarts,
            min_workers=args.min_workers,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(describe_saved(folder)) from None
    if own_rank() == 0:
        _print_end(summary.status, folder, max_steps=args.max_steps)
    return INTERRUPTED if summary.status == "interrupted" else 0


def _print_end(status: Status, folder: Path, *, max_steps: int | None) -> None:
    """Print how to resume a run that was stopped, and where its report is."""
    if status in {"interrupted", "paused"}:
        resume = f"to resume: the same command with --resume --out {folder}"
        if status == "paused":
            resume = f"--max-steps {max_steps} is reached; {resume} and without --max-steps"
        print(printable(resume))
    page = folder / REPORT
    report = f"report: {page}"
    if status == "interrupted" or not page.exists():  # an existing page is from an earlier part
        report = f"to draw the report: largebatch report {folder}"
    print(printable(report))
