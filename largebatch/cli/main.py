"""The command line: parse, call, print, exit code. Only this folder prints.

PyTorch is imported only when a command needs it, so `check` and `explain` take a fraction of a
second, and `plan` prints most of its rows before.

Exit codes: 0 done; 2 the user can fix it (one message, no traceback); 75 interrupted and resumable
with `--resume`; 130 stopped at once; 141 the output is no longer read; 143 a `data` command was
terminated; 1 anything else.
"""

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch import __version__
from largebatch.cli import (
    batch,
    bench,
    data,
    diagnose,
    init,
    launch,
    lr,
    noise,
    polish,
    recipe,
    referee,
    rehearse,
    study,
    suggest,
    sweep,
    train,
)
from largebatch.cli.arguments import (
    Call,
    Command,
    add_backend,
    add_command,
    add_execution,
    add_imports,
    add_machine,
    add_set,
    add_workers,
    options_of,
    out_folder,
)
from largebatch.cli.parser import Parser, cut, print_overview
from largebatch.cli.printing import print_rows
from largebatch.distributed.environment import (
    LAUNCHER,
    configure_libraries,
    join_slurm,
    noting_start,
    own_rank,
    require_alone,
)
from largebatch.errors import (
    BackendError,
    LargebatchError,
    MismatchError,
    PeerLostError,
    PlanError,
    RecipeError,
    WorkerFailedError,
    clip,
    printable,
)
from largebatch.runs.interrupts import Requests

if TYPE_CHECKING:
    from largebatch.training.evaluation import Metrics

DONE, FAILED, USER, STOPPED, UNREAD = 0, 1, 2, 130, 141

_INTERRUPTS = Requests()
"""Ctrl-C while no command handles it."""

_SAME_ON_ALL_WORKERS = (RecipeError, PlanError, MismatchError)
"""Errors that every worker raises and only worker 0 prints."""

_LONGEST_MESSAGE = 1900
"""Longest message in characters: what it quotes may be of any length."""

_HEAD_START = 1.0
"""Seconds that worker 0 has to print: launchers end all workers when the first one ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        join_slurm()
    except BackendError as error:  # which rank this is cannot be known
        _show(str(error))
        return USER
    configure_libraries()
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


def _interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt at the first Ctrl-C; end the process at once at a later one."""
    first = not _INTERRUPTS.any
    _INTERRUPTS.add()
    if _INTERRUPTS.again:
        os._exit(STOPPED)
    if first:
        raise KeyboardInterrupt


def _with_resume(words: Sequence[str]) -> list[str]:
    """Write a bare --resume as --resume=yes, so that it does not consume a recipe after it."""
    after = [*words, ""][1:]
    own = {"auto", "yes"}
    bare = [word == "--resume" and nxt not in own for word, nxt in zip(words, after, strict=True)]
    return ["--resume=yes" if alone else word for word, alone in zip(words, bare, strict=True)]


def _on_workers(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run a command in this process, or start local workers that each run it.

    `train` starts its workers itself, in `run`.
    """
    call: Call = args.call
    workers = getattr(args, "processes", 1)
    if workers == 1:
        return call(args)
    from largebatch.runs.launch import reporting_errors, start_workers

    if LAUNCHER in os.environ:  # this process is one of these workers
        with reporting_errors():
            return call(args)
    require_alone(workers)
    horovod = args.backend == "horovod"
    start_workers(["-m", "largebatch", *words], workers=workers, horovod=horovod)
    return DONE


def _call(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run a command; print what the user can fix, and errors of other workers."""
    rank = own_rank()
    try:
        return _on_workers(args, words)
    except LargebatchError as error:
        _show_refusal(error, rank)
        return USER
    except KeyboardInterrupt as stop:
        if rank == 0:
            _show("; ".join(["stopped at once", *stop.args]))
        return STOPPED
    except (PeerLostError, WorkerFailedError) as error:
        if rank == 0:
            print(f"largebatch: {printable(str(error))}", file=sys.stderr)
        return FAILED
    except Exception:
        if not _INTERRUPTS.any:
            raise
        _show("stopped at once")  # an interrupted import may raise an error of its own
        return STOPPED


def _show_refusal(error: LargebatchError, rank: int) -> None:
    if rank == 0:
        _show(str(error))
    elif isinstance(error, _SAME_ON_ALL_WORKERS):
        time.sleep(_HEAD_START)
    else:
        _show(f"worker {rank}: {error}")


def _show(message: str) -> None:
    """Print a message to the user, shortened and with unprintable characters escaped."""
    lines = map(cut, printable(message).splitlines())
    print(f"largebatch: {clip(chr(10).join(lines), _LONGEST_MESSAGE)}", file=sys.stderr)


def _reader_is_gone() -> bool:
    """Return True if the output is a closed pipe; then discard the rest of the output."""
    out, poll = sys.stdout.fileno(), select.poll()
    poll.register(out, select.POLLOUT)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)
    return gone


def _evaluate(args: argparse.Namespace) -> int:
    from largebatch.runs.checkpoints import evaluate_checkpoint

    found = evaluate_checkpoint(args.checkpoint, options_of(args), training=args.training)
    if own_rank() == 0:
        metrics, training = found.metrics, found.training
        print(f"{_scores(metrics)}  {found.path}, after {found.step:,} updates")
        if training is not None:
            print(f"training images: {_scores(training)}")
            print(f"validation loss - training loss: {metrics.loss - training.loss:+.4f}")
    return DONE


def _scores(metrics: "Metrics") -> str:
    scores = f"top-1 {100 * metrics.top1:.2f}%  top-5 {100 * metrics.top5:.2f}%"
    return f"{scores}  loss {metrics.loss:.4f}  ({metrics.samples} images)"


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
    for reason in comparison.left_out:
        _show(f"left out: {reason}")
    print(printable(str(page)))
    return DONE


def _doctor(args: argparse.Namespace) -> int:
    from largebatch.cli.doctor import examine, examine_network

    if not args.network:
        for name, finding in examine():
            print_rows({name: finding}, width=12)
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


def _add_doctor(command: Command) -> None:
    doctor = command(
        "doctor", _doctor, "check the installation, or measure the network between hosts"
    )
    doctor.add_argument(
        "--network",
        action="store_true",
        help="measure the network between the workers and between their hosts",
    )
    add_backend(doctor)
    add_workers(doctor)


def _add_evaluate(command: Command) -> None:
    evaluate = command("evaluate", _evaluate, "measure a checkpoint or the newest one of a run")
    evaluate.add_argument("checkpoint", type=Path, help="a .safetensors file or a run folder")
    evaluate.add_argument(
        "--training",
        action="store_true",
        help="evaluate the training images too, for the loss difference",
    )
    add_set(evaluate)
    add_execution(evaluate)
    add_workers(evaluate)
    add_machine(evaluate)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; `call` of the parsed arguments runs one."""
    parser: argparse.ArgumentParser = Parser(
        prog="largebatch",
        description="Train image classifiers with very large mini-batches, then polish them.",
    )
    parser.add_argument("--version", action="version", version=f"largebatch {__version__}")
    parser.set_defaults(call=partial(_overview, parser))
    commands = parser.add_subparsers(metavar="COMMAND")
    command = partial(add_command, commands)

    train.add_commands(command)
    _add_evaluate(command)

    exported = command("export", _export, "write a saved model for timm, and as ONNX")
    exported.add_argument("checkpoint", type=Path, help="a .safetensors file or a run folder")
    exported.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="new folder")
    exported.add_argument("--onnx", action="store_true", help="also write model.onnx")
    add_imports(exported)

    for module in (
        polish, recipe, init, suggest, batch, noise, diagnose, referee, sweep, launch, rehearse,
    ):  # fmt: skip
        module.add_commands(command)

    bench.add_settings_commands(command)

    data.add_commands(commands.add_parser("data", help="prepare and look at data sets"))
    lr.add_commands(commands.add_parser("lr", help="compare, draw and measure learning rates"))
    study.add_commands(
        commands.add_parser("study", help="measure the cost of stale gradients and of hosts")
    )

    report = command(
        "report", _report, "draw the report of a run, or compare several runs in one page"
    )
    report.add_argument("runs", type=Path, nargs="+", metavar="run", help="one; or all to compare")
    report.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="the folder of the report (the run folder), or the comparison (compare.html)",
    )

    _add_doctor(command)
    return parser
