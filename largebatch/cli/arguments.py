"""What several commands share: how one is added, and the arguments that mean the same in each."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, get_args

from largebatch.distributed.environment import TIMEOUT_SECONDS, BackendName

if TYPE_CHECKING:
    from largebatch.runs.options import Options

Call = Callable[[argparse.Namespace], int]

INTERRUPTED = 75
"""The exit code of what was asked to stop and has saved."""

ENDINGS = {".png", ".jpg", ".pdf", ".svg", ".html", ".json", ".yaml", ".onnx", ".pth", ".csv"}
"""The endings of file names that are given by mistake where a folder is expected."""


def add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    call: Call,
    text: str,
) -> argparse.ArgumentParser:
    """Add a command that does `call` with its arguments; `text` describes it."""
    added = commands.add_parser(name, help=text, description=text)
    added.set_defaults(call=call)
    return added


def count(text: str) -> int:
    """Read a number of things: 1 or more."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


def out_folder(text: str) -> Path:
    """Read the path of a folder to write to, which has no file's name."""
    path = Path(text)
    if path.suffix.lower() in ENDINGS and not path.exists():
        raise argparse.ArgumentTypeError(
            f"expected a folder, got {text!r}, the name of a file; such as {path.with_suffix('')}"
        )
    return path


def part(text: str) -> float:
    """Read an accuracy: above 0 and at most 1."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= 1:
        raise argparse.ArgumentTypeError(f"expected a part of 1, such as 0.90, got {text!r}")
    return found


def seconds(text: str) -> float:
    """Read a time in seconds, or with s, m or h behind it, such as 90m.

    >>> [seconds(text) for text in ("90", "90s", "1.5h")]
    [90.0, 90.0, 5400.0]
    """
    number, unit = (text[:-1], text[-1]) if text[-1:] in {"s", "m", "h"} else (text, "s")
    try:
        found = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(
            f"expected seconds, or a number with s, m or h behind it, such as 5m, got {text!r}"
        )
    return found


def updates(text: str) -> tuple[int, int]:
    """Read the numbers of the first and the last of some updates.

    >>> updates("100:110")
    (100, 110)
    """
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise argparse.ArgumentTypeError(
            "expected the first and the last update, counted from 1 and in this order, such as "
            f"100:110, got {text!r}"
        )
    return int(first), int(last)


def add_set(parser: argparse.ArgumentParser) -> None:
    """Let the command override what the recipe says."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override the recipe"
    )


def add_execution(parser: argparse.ArgumentParser) -> None:
    """Let the command override the settings of `execution` that are asked for most."""
    for option, key, kind, text in (
        ("--device-batch", "device_batch", "N", "samples a worker holds at a time"),
        ("--decoder", "decoder", "NAME", "dali or torchvision"),
    ):
        parser.add_argument(
            option,
            action="append",
            dest="set",
            type=f"execution.{key}={{}}".format,
            metavar=kind,
            help=f"{text}: --set execution.{key}={kind}",
        )


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Let the command be done by several local processes; as `train` is by `run`."""
    parser.add_argument(
        "--workers", type=count, default=1, metavar="N", dest="processes", help="local processes"
    )


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Let the command choose what connects its workers."""
    parser.add_argument(
        "--backend",
        choices=get_args(BackendName),
        default="auto",
        help="library that sums gradients (auto: the launcher's)",
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add what the machine decides about a run."""
    add_backend(parser)
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=TIMEOUT_SECONDS,
        metavar="TIME",
        help="how long to wait for a worker that does nothing (5m), six times that until the first "
        "update",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="DIR/{train,val}/<class>/* or *.tar"
    )
    parser.add_argument(
        "--dataset", metavar="M:F", help="instead: what module M's function F returns, (train, val)"
    )
    add_imports(parser)


def options_of(args: argparse.Namespace, *, out: Path = Path()) -> "Options":
    """Return the options of a command on what is saved, as add_set and add_machine read them."""
    from largebatch.runs.options import Options

    return Options(out=out, overrides=tuple(args.set), **machine_of(args))


class Machine(TypedDict):
    """What add_machine adds, as Options and `run` take it."""

    data: Path | None
    dataset: str | None
    imports: tuple[str, ...]
    backend: BackendName
    timeout: float


def machine_of(args: argparse.Namespace) -> Machine:
    """Return what the machine decides about a run, as add_machine reads it."""
    return Machine(
        data=args.data,
        dataset=args.dataset,
        imports=tuple(args.imports),
        backend=args.backend,
        timeout=args.timeout,
    )


def add_imports(parser: argparse.ArgumentParser) -> None:
    """Let a model of the user's own be known to the command."""
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import this first: it may register models with timm",
    )
