"""The command `lr recommend`: the best measured learning-rate policy. It prints."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.cli.arguments import Command, accuracy, count
from largebatch.cli.printing import wrapped
from largebatch.errors import LargebatchError, StudyError, printable

if TYPE_CHECKING:
    from largebatch.lab.studies.policies.groups import Group

BY = ("cost", "accuracy", "robustness")
"""Choices of studies.recommend.Criterion; listed here so that the parser needs no NumPy."""


def add_commands(command: Command) -> None:
    """Add the command `lr recommend`."""
    added = command("recommend", _recommend, "print the best policy measured by lr bench")
    added.add_argument("--dataset", metavar="NAME", help="start of the name of the recipe or study")
    added.add_argument("--model", metavar="NAME", help="as in the recipe: lenet5")
    added.add_argument(
        "--batch", type=count, metavar="B", help="global batch; the nearest if it was not measured"
    )
    added.add_argument("--optimizer", metavar="KIND", help="as in the recipe: sgd")
    added.add_argument("--target", type=accuracy, metavar="TOP1", help="accuracy, such as 0.90")
    added.add_argument("--by", choices=BY, default=BY[0], help=f"what decides ({BY[0]})")
    add_storage(added)
    added.add_argument("--json", action="store_true", help="print all of it as JSON")


def add_storage(parser: argparse.ArgumentParser) -> None:
    """Add --storage, databases of studies other than those in runs/."""
    parser.add_argument(
        "--storage",
        action="append",
        default=[],
        metavar="URL",
        help="a database of lr bench; may be repeated (every runs/*/study.db)",
    )


def _recommend(args: argparse.Namespace) -> int:
    if args.by == "cost" and args.target is None:
        raise LargebatchError(
            "--by cost is the cost to a top-1 accuracy: give --target, such as 0.90, or decide "
            "--by accuracy or robustness"
        )
    groups = read_groups(args.storage)
    from largebatch.lab.studies.policies.groups import choose
    from largebatch.lab.studies.policies.recommend import recommend
    from largebatch.lab.studies.policies.recommend_words import (
        as_json,
        policies_table,
        runs_behind,
        schedule_yaml,
        sentences,
    )

    chosen = choose(
        groups, dataset=args.dataset, model=args.model, optimizer=args.optimizer, batch=args.batch
    )
    answers = [
        recommend(group, by=args.by, target=args.target, batch=args.batch) for group in chosen
    ]
    if args.json:
        print(json.dumps([as_json(answer) for answer in answers], indent=2))
        return 0
    for place, answer in enumerate(answers):
        if place > 0:
            print()
        for sentence in sentences(answer):
            print(wrapped(sentence))
        print(printable(policies_table(answer).text()))
        if answer.first is not None:
            print(printable(schedule_yaml(answer.first.cell)), end="")
        for line in runs_behind(answer):
            print(printable(line))
    return 0


def default_storages() -> list[str]:
    """Return the databases of studies in runs/."""
    return [f"sqlite:///{path.absolute()}" for path in sorted(Path("runs").glob("*/study.db"))]


def read_groups(named: Sequence[str]) -> "list[Group]":
    """Read the measured policies of these databases, or of those in runs/ if none is named.

    An unnamed database that cannot be read is skipped with a message on standard error. Raises
    StudyError if there is no policy.
    """
    from largebatch.lab.studies.policies.groups import groups_of
    from largebatch.lab.studies.queue.database import open_existing, shown
    from largebatch.lab.studies.queue.results import read_results

    storages = named or default_storages()
    if not storages:
        raise StudyError(
            "there is no policy database: no runs/*/study.db below this folder; fill one with: "
            "largebatch lr bench STUDY.yaml; or give --storage"
        )
    groups = []
    for url in storages:
        try:
            with open_existing(url) as storage:
                groups += groups_of(shown(url), read_results(storage))
        except StudyError as error:
            if named:
                raise
            print(wrapped(f"passed over: {error}"), file=sys.stderr)
    if not groups:
        raise StudyError(
            f"no study of lr bench is in {', '.join(map(shown, storages))}; expected one at least; "
            "fill it with: largebatch lr bench STUDY.yaml --storage URL"
        )
    return groups
