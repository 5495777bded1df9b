"""argparse for the studies' commands, which `lab` hands their words to."""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from largebatch.distributed.environment import TIMEOUT_SECONDS, BackendName

Call = Callable[[argparse.Namespace], int]
"""Runs a command and returns its exit code."""

Command = Callable[[str, Call, str], argparse.ArgumentParser]
"""Adds a command: its name, what it calls, and its description."""


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
    """Parse a whole number, 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


out_folder = Path


def accuracy(text: str) -> float:
    """Parse an accuracy: above 0 and at most 1."""
    value = float(text)
    if not (0 < value <= 1 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"expected a part of 1, such as 0.90, got {text!r}")
    return value


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the recipe that the command reads, and --set."""
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the options that depend on the machine."""
    parser.add_argument("--backend", choices=get_args(BackendName), default="auto")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS)
    parser.add_argument("--data", type=Path, metavar="DIR")
    parser.add_argument("--dataset", metavar="M:F")
    parser.add_argument("--import", action="append", default=[], dest="imports", metavar="MODULE")


def machine_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of add_machine."""
    return {
        "data": args.data,
        "dataset": args.dataset,
        "imports": tuple(args.imports),
        "backend": args.backend,
        "timeout": args.timeout,
    }


def run_command(name: str, words: Sequence[str]) -> int:
    """Run `lab study`, `lab recommend` or `lab sweep` with these words."""
    from largebatch.cli import bench, recommend, study, sweep

    parser = argparse.ArgumentParser(prog="largebatch lab")
    commands = parser.add_subparsers(required=True)
    add = partial(add_command, commands)
    if name == "study":
        below = commands.add_parser("study").add_subparsers(metavar="COMMAND", required=True)
        bench.add_commands(partial(add_command, below))
        bench.add_settings_commands(partial(add_command, below))
        study.add_commands(below)
    recommend.add_commands(add)
    sweep.add_commands(add)
    args = parser.parse_args([name, *words])
    call: Call = args.call
    return call(args)
