"""Options that several commands share, and how a command is added."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from largebatch.distributed.environment import TIMEOUT_SECONDS, BackendName

if TYPE_CHECKING:
    from largebatch.runs.options import Machine, Options

Call = Callable[[argparse.Namespace], int]
"""Runs a command and returns its exit code."""

Command = Callable[[str, Call, str], argparse.ArgumentParser]
"""Adds a command: its name, what it calls, and its description."""

INTERRUPTED = 75
"""Exit code of a command that was stopped and has saved."""

ENDINGS = {".png", ".jpg", ".pdf", ".svg", ".html", ".json", ".yaml", ".onnx", ".pth", ".csv"}
"""Endings of file names that users give by mistake where a folder is expected."""


def add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    call: Call,
    text: str,
) -> argparse.ArgumentParser:
    """Add a command that runs `call` on its arguments; `text` describes it."""
    added = commands.add_parser(name, help=text, description=text)
    added.set_defaults(call=call)
    return added


def count(text: str) -> int:
    """Parse a count: a whole number, 1 or more."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


def out_folder(text: str) -> Path:
    """Parse the path of an output folder; refuse the name of a file."""
    path = Path(text)
    if path.suffix.lower() in ENDINGS and not path.exists():
        raise argparse.ArgumentTypeError(
            f"expected a folder, got {text!r}, the name of a file; such as {path.with_suffix('')}"
        )
    return path


def number(text: str, *, expected: str, most: float = math.inf) -> float:
    """Parse a finite number above 0 and at most `most`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value <= most and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def accuracy(text: str) -> float:
    """Parse an accuracy: above 0 and at most 1."""
    return number(text, expected="a part of 1, such as 0.90", most=1)


def seconds(text: str) -> float:
    """Parse a time: seconds, or a number followed by s, m or h.

    >>> [seconds(text) for text in ("90", "90s", "1.5h")]
    [90.0, 90.0, 5400.0]
    """
    expected = "seconds, or a number with s, m or h behind it, such as 5m"
    digits, unit = (text[:-1], text[-1]) if text[-1:] in {"s", "m", "h"} else (text, "s")
    try:
        value = number(digits, expected=expected, most=1e300)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None
    return value * {"s": 1, "m": 60, "h": 3600}[unit]


def updates(text: str) -> tuple[int, int]:
    """Parse a range of updates FROM:TO; both ends count from 1 and are included.

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


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the recipe that the command reads, and --set."""
    parser.add_argument("recipe", type=Path, help="a YAML file, or the name of an installed recipe")
    add_set(parser)


def add_set(parser: argparse.ArgumentParser) -> None:
    """Add --set, which overrides keys of the recipe."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override the recipe"
    )


def add_execution(parser: argparse.ArgumentParser) -> None:
    """Add options for the most used settings of `execution`."""
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


def add_workers(parser: argparse.ArgumentParser, *, dest: str = "processes") -> None:
    """Add --workers. `main` starts these processes, unless the command starts them itself."""
    parser.add_argument(
        "--workers", type=count, default=1, metavar="N", dest=dest, help="local processes"
    )


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add --backend, the library that connects the workers."""
    parser.add_argument(
        "--backend",
        choices=get_args(BackendName),
        default="auto",
        help="library that sums gradients (auto: the launcher's)",
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the options that depend on the machine."""
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


def options_of(args: argparse.Namespace, *, out: Path | None = None) -> "Options":
    """Return the values of add_set and add_machine as Options."""
    from largebatch.runs.options import Options

    return Options(out=out or Path(), overrides=tuple(args.set), **machine_of(args))


def machine_of(args: argparse.Namespace) -> "Machine":
    """Return the values of add_machine."""
    return {
        "data": args.data,
        "dataset": args.dataset,
        "imports": tuple(args.imports),
        "backend": args.backend,
        "timeout": args.timeout,
    }


def add_imports(parser: argparse.ArgumentParser) -> None:
    """Add --import, which makes the user's own models known."""
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import this first: it may register models with timm",
    )
