"""The command line: parse, call, print, exit code. Only this folder prints.

A command is a function; cyclopts reads its words from the signature, the docstring and the
dataclasses of `runs.options`. The module of a command is imported when it is called, and PyTorch
only when a command needs it, so `check` and `explain` take a fraction of a second.

Exit codes: 0 done; 2 the user can fix it (one message, no traceback); 75 interrupted and resumable
with `--resume`; 130 stopped at once; 141 the output is no longer read; 143 a `data` command was
terminated; 1 anything else, and a check that found faults.
"""

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from cyclopts import (
    App,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts.help.help import docstring_parse

from largebatch import __version__
from largebatch.cli.printing import INTERRUPTED
from largebatch.distributed.environment import (
    LAUNCHER,
    configure_libraries,
    join_slurm,
    own_rank,
    require_alone,
)
from largebatch.errors import (
    AuditError,
    BackendError,
    LargebatchError,
    MismatchError,
    PeerLostError,
    PlanError,
    RecipeError,
    RequestedStopError,
    SmallerBatchError,
    WorkerFailedError,
    WrongCardError,
    clip,
    nearest,
    printable,
)
from largebatch.runs.interrupts import StopRequests
from largebatch.runs.options import OPTIONS, Workers
from largebatch.runs.output import Output, prepare_streams

DONE, FAILED, USER, STOPPED, UNREAD = 0, 1, 2, 130, 141

COMMANDS = {
    "train": "train:train",
    "resume": "train:resume",
    "evaluate": "train:evaluate",
    "predict": "train:predict",
    "polish": "train:polish",
    "check": "recipe:check",
    "plan": "recipe:plan",
    "explain": "recipe:explain",
    "recipes": "recipe:recipes",
    "report": "report:app",
    "export": "train:export",
    "data": "data:app",
    "doctor": "doctor:doctor",
    "init": "data:init",
    "launch": "launch:launch",
    "audit": "audit:app",
    "batch": "lab:batch",
    "lab": "lab:app",
    "completion": "main:completion",
}
"""Modules of largebatch.cli with the functions of the commands, or with the commands below one."""

EXAMPLES = {
    "": ("train digits_96 --workers 2", "init photos --minutes 20", "audit --workers 2 train.py"),
    "train": (
        "train digits_96 --workers 2 --set seed=2 --out runs/seed-2",
        "train mine.yaml --data images --time-limit 8h --resume auto --out a",
    ),
    "resume": ("resume runs/mine", "resume runs/mine --time-limit 8h"),
    "predict": ("predict runs/mine photo.jpg", "predict runs/mine photos --top 1 --out found.csv"),
    "evaluate": ("evaluate runs/mine", "evaluate runs/mine --data images --training --json"),
    "polish": (
        "polish runs/mine --out runs/polished",
        "polish --model dla34 --weights w.pth --data d --out w.safetensors",
    ),
    "check": ("check mine.yaml", "check mine.yaml --set batch.global_batch=8192 --json"),
    "plan": (
        "plan digits_96 --workers 2",
        "plan resnet50_86016_fujitsu --workers 2048 --cluster abci-v100",
    ),
    "explain": ("explain optimizer.eta", "explain --schedule digits_96 --out rates.png"),
    "recipes": ("recipes", "recipes --json"),
    "recipes copy": ("recipes copy digits_96 --out mine.yaml",),
    "report": ("report runs/mine", "report runs/a runs/b --out compare.html"),
    "report diagnose": ("report diagnose runs/large runs/small", "report diagnose log.csv --json"),
    "report mlperf": ("report mlperf runs/mlperf-1 runs/mlperf-2",),
    "export": ("export runs/mine --out exported",),
    "data": ("data import cifar10 cifar-10-python.tar.gz --out cifar10", "data index images"),
    "data index": ("data index images", "data index images --drop-bad"),
    "data import": ("data import imagefolder a.zip --val-fraction 0.2 --out images",),
    "data show": ("data show mine.yaml --data images",),
    "doctor": (
        "doctor",
        "doctor --json",
        "doctor --network --workers 2",
        "doctor --replay --workers 8 --minutes 5",
    ),
    "init": ("init images", "init images --weights timm:resnet50.a1_in1k --minutes 30"),
    "launch": (
        "launch slurm resnet50_8192_mlperf --nodes 4 --data /images > job.sh",
        "launch trainjob digits_96 --nodes 2 --image host/lb:1 > job.yaml",
    ),
    "audit": (
        "audit --workers 2 train.py --lr 0.1",
        "audit mine:parts --workers 2",
        "audit digits_96 --workers 2",
    ),
    "audit resume": ('audit resume --whole t.py --first "t.py -e 1" --rest "t.py -r a"',),
    "batch": ("batch mine.yaml --data images --minutes 20",),
    "lab": ("lab range digits_96", "lab suggest --batch 40000"),
    "lab clusters": ("lab clusters",),
    "lab study": ("lab study study.yaml --dry-run", "lab study lrbench --jobs 2"),
    "lab range": ("lab range digits_96", "lab range mine.yaml --data images --seeds 1"),
    "lab noise": ("lab noise digits_96 --max-steps 200", "lab noise runs/mine"),
    "lab suggest": ("lab suggest --batch 40000", "lab suggest digits_96 --batch 64 --epochs 20"),
    "lab rehearse": ("lab rehearse resnet50_8192_mlperf --workers 64 --rank 63",),
    "completion": ("completion bash >> ~/.bash_completion",),
}
"""Calls that --help of each command shows, of which every one can be parsed."""


class UsageError(LargebatchError):
    """The words of a command have a mistake."""


_ON_WORKERS = {"evaluate", "polish", "doctor", "audit"}
"""Commands that run on every one of --workers; `train` and those of `lab` start theirs later."""

_RECORDED = {"train", "resume", "polish", "export"}
"""Commands whose results are in files, whatever becomes of their output."""

_INTERRUPTS = StopRequests()  # Ctrl-C while no command handles it

_SAME_ON_ALL_WORKERS = (
    *(RecipeError, PlanError, MismatchError, AuditError, UsageError),
    WrongCardError,
)
"""Errors that every worker raises and only worker 0 prints."""

_LONGEST_MESSAGE = 1900  # in characters: what it quotes may be of any length
_HEAD_START = 1.0  # seconds for worker 0 to print: launchers end all workers when one ends


def make_app() -> App:
    """Return the parser of all commands."""
    # A new command gets a row in COMMANDS and one in EXAMPLES. Its own options need no group; those
    # that several commands share have the groups of runs.options, as Annotated[Count, OF_WORKERS].
    app = App(
        name="largebatch",
        help="Train image classifiers with very large mini-batches, then polish them.",
        version=__version__,
        help_format="plaintext",
        default_parameter=Parameter(
            negative=(), show_default=lambda value: None if value in (None, False, ()) else value
        ),
    )
    for name, target in COMMANDS.items():
        app.command(f"largebatch.cli.{target}", name=name)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        prepare_streams()
    # Only in a program of ours: a library's caller, or a launcher that ignores Ctrl-C, has its
    # own handler.
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # Before anything else that reads the rank.
    try:
        join_slurm()
    except BackendError as error:  # which rank this is cannot be known
        _show(str(error))
        return USER
    configure_libraries()
    try:
        code = _call(words)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return UNREAD
    # A full disk behind `> file`: a command whose result is in a folder has not failed by it.
    if isinstance(sys.stdout, Output) and sys.stdout.lost and words[0] not in _RECORDED:
        return code or FAILED  # what was printed was the result
    return code


def parse(words: Sequence[str]) -> tuple[Callable[[], int | None], Workers]:
    """Return a call of the command that words name, and the local workers to run it on.

    Raises UsageError for words that are not a command.
    """
    app = make_app()
    # Commands are imported when they are looked up; a list of all of them needs their
    # descriptions.
    if words[:1] in ([], ["--help"], ["-h"]):
        for name in COMMANDS:
            _ = app[name]  # imported, for its description
    if not words or not {"--help", "-h"}.isdisjoint(words):
        _complete_help(app, words)
    try:
        command, bound, _ = app.parse_args(
            _with_values(words), exit_on_error=False, print_error=False
        )
    except CycloptsError as error:
        raise UsageError(_describe(error, words)) from None
    workers = Workers()
    if words and words[0] in _ON_WORKERS:
        workers = bound.arguments.get("options", workers)
    return partial(command, *bound.args, **bound.kwargs), workers


def _complete_help(app: App, words: Sequence[str]) -> None:
    """Give the command that words name its examples, and a description of whole paragraphs.

    In a docstring a line ends where the source does; a list has lines that end with a sentence.
    """
    command = app
    names = list[str]()
    for word in words:
        if word.startswith("-") or word not in command:
            break
        command = command[word]
        names = [*names, word]
    text = docstring_parse(command.help, "plaintext")
    parts = [part for part in (text.short_description, text.long_description) if part]
    # Joins the lines of a paragraph, but not those of a list.
    command.help = "\n\n".join(re.sub(r"(?<![.:\n])\n(?!\n)", " ", part) for part in parts)
    calls = "".join(f"\n  largebatch {call}" for call in EXAMPLES.get(" ".join(names), ()))
    command.help_epilogue = calls and f"Examples:{calls}"
    command.group_parameters = OPTIONS


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the script that completes commands, options and recipes after Tab.

    Args:
        shell: Shell that reads the script, from the folder of its completions.
    """
    script = make_app().generate_completion(shell=shell)
    split = 'COMPREPLY=( $(compgen -f -- "${cur}") )'  # at spaces in names
    print(script.replace(split, 'mapfile -t COMPREPLY < <(compgen -f -- "${cur}")'))
    if shell == "bash":  # folders end with /, and arguments without candidates are files
        print("complete -o filenames -o default -F _largebatch largebatch")


def _with_values(words: Sequence[str]) -> list[str]:
    """Write `--flag yes` as --flag=yes, and a bare --resume as --resume=yes.

    A flag takes no value by itself, so that `--flag FILE` leaves the file to the command. What
    follows the script of an audit is the script's.
    """
    completed: list[str] = []
    rest = list(words)
    # A loop that looks one word ahead, because only the next word tells whether it is a value.
    while rest:
        word = rest.pop(0)
        value = rest[0] if rest else ""
        if word.startswith("--") and "=" not in word:
            if value in {"yes", "no", "true", "false"}:
                word = f"{word}={rest.pop(0)}"
            elif word == "--resume" and value != "auto":
                word = "--resume=yes"
        completed.append(word)
        is_script = completed[0] == "audit" and completed[1:2] != ["resume"]
        if is_script and word.endswith(".py"):
            return [*completed, "--", *rest]
    return completed


def _interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt at the first Ctrl-C; end the process at once at a later one."""
    first = not _INTERRUPTS.any
    _INTERRUPTS.add()
    if _INTERRUPTS.again:
        os._exit(STOPPED)
    if first:
        raise KeyboardInterrupt


def _on_workers(words: Sequence[str]) -> int:
    """Run a command in this process, or start local workers that each run it."""
    call, workers = parse(words)
    if workers.workers in {None, 1}:  # an audit may have none
        return call() or DONE
    from largebatch.runs.launch import reporting_errors, start_workers

    # The words say --workers N in each worker, too: without the launcher's mark each would start
    # N more.
    if LAUNCHER in os.environ:  # this process is one of these workers
        with reporting_errors():
            return call() or DONE
    require_alone(workers.workers)
    horovod = workers.backend == "horovod"
    start_workers(["-m", "largebatch", *words], workers=workers.workers, horovod=horovod)
    return DONE


def _call(words: Sequence[str]) -> int:
    """Run a command; print what the user can fix, and errors of other workers."""
    rank = own_rank()
    try:
        return _on_workers(words)
    except LargebatchError as error:
        # Every worker has the same error: worker 0 prints it, the others wait for that.
        if rank > 0 and isinstance(error, _SAME_ON_ALL_WORKERS):
            time.sleep(_HEAD_START)
        else:
            _show(f"worker {rank}: {error}" if rank else str(error))
        if isinstance(error, RequestedStopError):
            return STOPPED
        return INTERRUPTED if isinstance(error, SmallerBatchError) else USER
    except KeyboardInterrupt as stop:
        if rank == 0:
            _show("; ".join(["stopped at once", *stop.args]))
        return STOPPED
    except (PeerLostError, WorkerFailedError) as error:
        if rank == 0:
            print(f"largebatch: {printable(str(error))}", file=sys.stderr)
        return FAILED
    except Exception:
        # Anything else is a fault of ours, and keeps its traceback.
        if not _INTERRUPTS.any:
            raise
        _show("stopped at once")  # an interrupted import may raise an error of its own
        return STOPPED


def _show(message: str) -> None:
    print(f"largebatch: {clip(printable(message), _LONGEST_MESSAGE)}", file=sys.stderr)


def _reader_is_gone() -> bool:
    """Return True if the output is a closed pipe; then discard the rest of the output."""
    out = sys.stdout.fileno()
    poll = select.poll()
    poll.register(out, select.POLLOUT)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)
    return gone


def _describe(error: CycloptsError, words: Sequence[str]) -> str:
    """Describe what is wrong with the words of a command, with what was probably meant."""
    name = " ".join(error.command_chain or ())
    match error:
        case UnknownOptionError():
            option = error.token.keyword or error.token.value
            return f"{name}: there is no option {option}{_hint(option, words, error)}"
        case UnusedCliTokensError():
            word, _, value = (error.unused_tokens or [""])[0].partition("=")
            hint = _key_hint(word, value) if value else ""
            hint = hint or f"; `largebatch {name} --help` shows what it takes"
            return f"{name}: unexpected argument {word!r}{hint}"
        # The nearest command; a subcommand that was typed without its command; a name of another
        # tool.
        case UnknownCommandError():
            known = [
                subcommand for subcommand in (error.app or ()) if not subcommand.startswith("-")
            ]
            word = (error.unused_tokens or [""])[0]
            otherwise = f"`{' '.join(['largebatch', *name.split()])} --help` lists them"
            hint = nearest(word, known, otherwise=otherwise, most=1)
            below = [call for call in EXAMPLES if call.endswith(f" {word}")]
            if below:  # as diagnose, of report
                hint = f"did you mean `largebatch {below[0]}`?"
            if word == "compare":  # as it is named in other tools
                hint = "to compare runs: largebatch report A B"
            return f"there is no command {f'{name} {word}'.strip()!r}; {hint}"
        case MissingArgumentError() if error.argument is not None:
            missing = error.keyword or error.argument.name
            text = error.argument.field_info.help or error.argument.parameter.help
            return f"{name}: missing {missing}{f' ({text})' if text else ''}"
        case _:
            return f"{name}: {error}"


def _hint(option: str, words: Sequence[str], error: UnknownOptionError) -> str:
    """Return what to write instead of an unknown option."""
    # As it was typed: `error` has the option without its value.
    typed = next(word for word in words if word.partition("=")[0] == option)
    _, equals, value = typed.partition("=")
    following = words[words.index(typed) + 1 :]
    if not equals and following and not following[0].startswith("--"):
        value = following[0]
    arguments = [argument for argument in error.argument_collection if argument.parse]
    known = [name for argument in arguments for name in argument.names if name.startswith("--")]
    otherwise = f"`largebatch {' '.join(error.command_chain or ())} --help` lists them"
    # A key of the recipe, typed as an option: `--epochs 3` is --set duration.epochs=3.
    trains = "--set" in known and any(
        argument.name in {"RECIPE", "RECIPES"} for argument in arguments
    )
    hint = _key_hint(option.lstrip("-"), value) if trains else ""
    return hint or f"; {nearest(option, known, otherwise=otherwise, most=1, cutoff=0.72)}"


def _key_hint(word: str, value: str) -> str:
    """Return the --set for the key of a recipe that a word stands for; empty if there is none."""
    from largebatch.recipe.explain import sections_below
    from largebatch.recipe.problems import meant_key, meant_words
    from largebatch.recipe.recipe import Recipe

    key = meant_key(word, Recipe)
    if key is None or sections_below(key):  # one value is no section
        return ""
    return f": write {meant_words(key, value or 'VALUE', Recipe)}"
