"""The command line: parse, call, print, exit code. Only it and the modules beside it print.

Nothing here imports PyTorch before a command needs it, so `check` and `explain` answer at once, and
`plan` has printed all but its last row by then.

Exit codes: 0 done; 2 the user can fix it (one message, no traceback); 75 interrupted, `--resume`
goes on; 130 stopped at once; 141 the output is no longer read; 143 a `data` command was
terminated; 1 anything else.
"""

import argparse
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch import __version__
from largebatch.cli import bench as cli_bench
from largebatch.cli import data as cli_data
from largebatch.cli import init as cli_init
from largebatch.cli import launch as cli_launch
from largebatch.cli import lr as cli_lr
from largebatch.cli import noise as cli_noise
from largebatch.cli import polish as cli_polish
from largebatch.cli import recipe as cli_recipe
from largebatch.cli import referee as cli_referee
from largebatch.cli import rehearse as cli_rehearse
from largebatch.cli import study as cli_study
from largebatch.cli import suggest as cli_suggest
from largebatch.cli import sweep as cli_sweep
from largebatch.cli.arguments import (
    INTERRUPTED,
    Call,
    add_backend,
    add_command,
    add_execution,
    add_imports,
    add_machine,
    add_processes,
    add_set,
    count,
    machine_of,
    options_of,
    out_folder,
    seconds,
    updates,
)
from largebatch.cli.parser import Parser, cut, print_overview
from largebatch.distributed.environment import (
    LAUNCHER,
    join_slurm,
    let_threads_sleep,
    noting_start,
    own_rank,
    worker_rank,
)
from largebatch.errors import (
    BackendError,
    CheckpointError,
    LargebatchError,
    MismatchError,
    PeerLostError,
    PlanError,
    RecipeError,
    WorkerFailedError,
    clip,
    printable,
)
from largebatch.recipe.loading import load_recipe
from largebatch.tracking.events import REPORT

if TYPE_CHECKING:
    from largebatch.recipe.task import Task
    from largebatch.training.evaluation import Metrics

DONE, FAILED, USER, STOPPED, UNREAD = 0, 1, 2, 130, 141

_FOUND_ALIKE = (RecipeError, PlanError, MismatchError)
"""What every worker finds and worker 0 prints."""

_LONGEST_MESSAGE = 1900
"""Characters of a message that are printed: what it quotes may be of any length."""

_HEAD_START = 1.0
"""Seconds that it has for that: launchers end all workers when the first one has ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    join_slurm()
    let_threads_sleep()
    args = make_parser().parse_args(_with_resume(words))
    try:
        with noting_start(of_process=argv is None):
            code = _call(args, words)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return UNREAD
    return code


def _with_resume(words: Sequence[str]) -> list[str]:
    """Give a --resume without a word its own, so that it takes no recipe that follows for it."""
    after = [*words, ""][1:]
    bare = [word == "--resume" and nxt != "auto" for word, nxt in zip(words, after, strict=True)]
    return ["--resume=yes" if alone else word for word, alone in zip(words, bare, strict=True)]


def _on_workers(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Do a command here, or start the same command as each of its local workers.

    `train` starts its workers by itself, in `run`.
    """
    call: Call = args.call
    workers = getattr(args, "processes", 1)
    if workers == 1:
        return call(args)
    from largebatch.runs.launch import reporting_errors, start_workers

    if LAUNCHER in os.environ:  # this is one of them
        with reporting_errors():
            return call(args)
    if worker_rank() is not None:
        raise BackendError(
            f"this process is already one of several workers; leave --workers {workers} out"
        )
    horovod = args.backend == "horovod"
    start_workers(["-m", "largebatch", *words], workers=workers, horovod=horovod)
    return DONE


def _call(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Do what was asked; print what the user can fix, and what befell other workers."""
    rank = own_rank()
    try:
        code = _on_workers(args, words)
    except LargebatchError as error:
        if rank == 0:
            _show(str(error))
        elif isinstance(error, _FOUND_ALIKE):
            time.sleep(_HEAD_START)
        else:
            _show(f"worker {rank}: {error}")
        return USER
    except KeyboardInterrupt as stop:
        if rank == 0:
            _show("; ".join(["stopped at once", *stop.args]))
        return STOPPED
    except (PeerLostError, WorkerFailedError) as error:
        if rank == 0:
            print(f"largebatch: {printable(str(error))}", file=sys.stderr)
        return FAILED
    return code


def _show(message: str) -> None:
    """Print what the user can mend, however long or strange is what it quotes."""
    lines = map(cut, printable(message).splitlines())
    print(f"largebatch: {clip(chr(10).join(lines), _LONGEST_MESSAGE)}", file=sys.stderr)


def _reader_is_gone() -> bool:
    """Return whether the output is a closed pipe; if so, drop what is still to be written."""
    out, poll = sys.stdout.fileno(), select.poll()
    poll.register(out, select.POLLOUT)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)
    return gone


def _train(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe, args.set)
    if args.resume and args.out is None:
        raise CheckpointError("--resume continues the run in --out DIR; pass --out")
    from largebatch.runs.folder import default_folder
    from largebatch.runs.interrupts import describe_saved
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
        if summary.status in {"interrupted", "paused"}:
            again = f"to go on: the same command with --resume --out {folder}"
            if summary.status == "paused":
                again = f"--max-steps {args.max_steps} is reached; {again} and without --max-steps"
            print(printable(again))
        page = folder / REPORT
        drawn = f"report: {page}"
        if summary.status == "interrupted" or not page.exists():  # a page there is from before
            drawn = f"to draw it: largebatch report {folder}"
        print(printable(drawn))
    return INTERRUPTED if summary.status == "interrupted" else DONE


def _evaluate(args: argparse.Namespace) -> int:
    from largebatch.runs.checkpoints import evaluate_checkpoint

    found = evaluate_checkpoint(
        args.checkpoint, options_of(args), training=args.training, test=args.test
    )
    if own_rank() == 0:
        metrics, training, task = found.metrics, found.training, found.task
        print(f"{_scores(task, metrics)}  {found.path}, after {found.step:,} updates")
        if metrics.classes_never_correct is not None:
            print(_confidence(metrics))
        if training is not None:
            print(f"training {task.data}: {_scores(task, training)}")
            print(f"validation loss - training loss: {metrics.loss - training.loss:+.4f}")
        if found.test is not None:
            print(f"test {task.data}: {_scores(task, found.test)}")
    return DONE


def _confidence(metrics: "Metrics") -> str:
    never = metrics.classes_never_correct
    return (
        f"confidence of the correct: average {metrics.average_confidence:.4f} (AC), deviation "
        f"{metrics.confidence_deviation:.4f} (CD), deviation of the classes' averages "
        f"{metrics.class_confidence_deviation:.4f} (CDAC)"
        + (f", without {never} classes of which none is correct" if never else "")
    )


def _scores(task: "Task", metrics: "Metrics") -> str:
    scores = (f"{each.name} {each.text(metrics)}{each.unit}" for each in task.metrics)
    return f"{'  '.join(scores)}  loss {metrics.loss:.4f}  ({metrics.samples} {task.labelled})"


def _export(args: argparse.Namespace) -> int:
    from largebatch.runs.export import export

    for path in export(args.checkpoint, args.out, onnx=args.onnx, imports=args.imports):
        print(printable(str(path)))
    return DONE


def _report(args: argparse.Namespace) -> int:
    from largebatch.report import write_comparison, write_report

    if len(args.runs) == 1:
        print(printable(str(write_report(args.runs[0], args.out))))
        return DONE
    page, comparison = write_comparison(args.runs, args.out or Path())
    for unread in comparison.unread:
        _show(f"left out: {unread.reason}")
    print(printable(str(page)))
    return DONE


def _doctor(args: argparse.Namespace) -> int:
    from largebatch.cli.doctor import examine, examine_network

    if not args.network:
        for finding in examine():
            print(finding)
        return DONE
    from largebatch.distributed.connection import connect

    backend = connect(args.backend)
    for finding in examine_network(backend):
        if backend.rank == 0:
            print(printable(finding), flush=True)
    backend.close()
    return DONE


def _overview(parser: argparse.ArgumentParser, _: argparse.Namespace) -> int:
    print_overview(parser)
    return DONE


def _add_doctor(command: Callable[[str, Call, str], argparse.ArgumentParser]) -> None:
    doctor = command("doctor", _doctor, "show what is installed and works, or how fast hosts meet")
    doctor.add_argument(
        "--network", action="store_true", help="measure sums between the workers and their hosts"
    )
    add_backend(doctor)
    add_processes(doctor)


def _add_evaluate(command: Callable[[str, Call, str], argparse.ArgumentParser]) -> None:
    evaluate = command("evaluate", _evaluate, "measure a checkpoint or the newest one of a run")
    evaluate.add_argument("checkpoint", type=Path, help="a .safetensors file or a run folder")
    evaluate.add_argument(
        "--training", action="store_true", help="the training images too, for the loss difference"
    )
    evaluate.add_argument("--test", action="store_true", help="the test part of a text too")
    add_set(evaluate)
    add_execution(evaluate)
    add_processes(evaluate)
    add_machine(evaluate)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of every command; what a command does is `call` of its arguments."""
    parser: argparse.ArgumentParser = Parser(
        prog="largebatch",
        description="Train image classifiers with very large mini-batches, then polish them.",
    )
    parser.add_argument("--version", action="version", version=f"largebatch {__version__}")
    parser.set_defaults(call=partial(_overview, parser))
    commands = parser.add_subparsers(metavar="COMMAND")
    command = partial(add_command, commands)

    train = command("train", _train, "train, polish and evaluate a recipe")
    train.add_argument("recipe", type=Path, help="a YAML file, or the name of an installed recipe")
    add_set(train)
    add_execution(train)
    train.add_argument("--workers", type=count, default=1, metavar="N", help="local processes")
    add_machine(train)
    train.add_argument("--out", type=out_folder, metavar="DIR", help="folder (runs/<name>-<time>)")
    train.add_argument(
        "--resume",
        choices=("yes", "auto"),
        metavar="auto",
        nargs="?",
        help="go on with the run in --out; auto: if there is one, else begin",
    )
    train.add_argument(
        "--restarts", type=count, default=0, metavar="N", help="start --workers that died again"
    )
    train.add_argument(
        "--min-workers", type=count, metavar="M", help="at least, where a start fails again"
    )
    train.add_argument("--max-steps", type=count, metavar="N", help="stop after N updates in all")
    train.add_argument(
        "--time-limit", type=seconds, metavar="T", help="stop before: 90m, 8h or seconds"
    )
    train.add_argument(
        "--profile",
        type=updates,
        metavar="FROM:TO",
        help="write trace.json of these updates, and a table of it into the report",
    )
    train.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="KEY",
        help="what may differ from the run resumed, such as schedule.peak_lr or data.index",
    )

    _add_evaluate(command)

    exported = command("export", _export, "write a saved model for timm, and as ONNX")
    exported.add_argument("checkpoint", type=Path, help="a .safetensors file or a run folder")
    exported.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="new folder")
    exported.add_argument("--onnx", action="store_true", help="model.onnx besides")
    add_imports(exported)

    for module in (
        *(cli_polish, cli_recipe, cli_init, cli_suggest, cli_noise, cli_referee, cli_sweep),
        *(cli_launch, cli_rehearse),
    ):
        module.add_commands(command)

    cli_bench.add_settings_commands(command)

    data = commands.add_parser("data", help="prepare and look at data sets")
    cli_data.add_commands(data)

    cli_lr.add_commands(commands.add_parser("lr", help="compare, draw and measure learning rates"))
    cli_study.add_commands(commands.add_parser("study", help="measure what not waiting costs"))

    report = command("report", _report, "draw a run folder again, or compare several in one page")
    report.add_argument("runs", type=Path, nargs="+", metavar="run", help="one; or all to compare")
    report.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="the folder of the report (the run folder), or the comparison (compare.html)",
    )

    _add_doctor(command)
    return parser
