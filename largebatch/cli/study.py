"""The commands `lab study` and `lab recommend`. They print."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from largebatch.cli import sweep
from largebatch.cli.arguments import (
    INTERRUPTED,
    Command,
    accuracy,
    add_backend,
    add_imports,
    count,
    out_folder,
    seconds,
)
from largebatch.cli.printing import wrapped
from largebatch.distributed.environment import TIMEOUT_SECONDS, BackendName
from largebatch.errors import LargebatchError, printable

BY = ("cost", "accuracy", "robustness")


def study(  # noqa: PLR0913 -- its options
    file: Path,
    *,
    out: Path | None = None,
    jobs: int = 1,
    data: Sequence[str] = (),
    dataset: str | None = None,
    imports: Sequence[str] = (),
    backend: BackendName = "auto",
    timeout: float = TIMEOUT_SECONDS,
    dry_run: bool = False,
    page: bool = False,
) -> int:
    """Carry out a study, or resume it; print its table and draw its page.

    Args:
        file: A YAML file, or an installed study: lrbench, gtdlbench, rudra, jaeger, dell.
        out: Folder of the records (runs/<name>), which several machines may fill at once.
        jobs: Number of runs at a time.
        data: Folder of images, or RECIPE=DIR for one recipe of the study.
        dataset: Instead: what module M's function F returns, (train, val).
        imports: Modules to import first.
        backend: Library that sums gradients.
        timeout: Seconds to wait for a worker that does nothing.
        dry_run: Print the runs that are left.
        page: Start nothing; draw what is recorded, and simulations.
    """
    from largebatch.lab.studies import runner
    from largebatch.lab.studies.study import Machine

    named = dict(one.split("=", 1) for one in data if "=" in one)
    plain = [one for one in data if "=" not in one]
    if len(plain) > 1:
        raise LargebatchError(f"--data {plain[1]}: give one folder, or RECIPE=DIR for each recipe")
    machine = Machine(
        data=Path(plain[0]) if plain else None,
        data_of={name: Path(folder) for name, folder in named.items()},
        dataset=dataset,
        imports=tuple(imports),
        backend=backend,
        timeout=timeout,
    )

    def report(line: str) -> None:
        print(printable(line), flush=True)

    done = runner.study(
        file, out=out, jobs=jobs, dry_run=dry_run, page=page, machine=machine, report=report
    )
    return 0 if done else INTERRUPTED


def recommend(  # noqa: PLR0913 -- its options
    folders: Sequence[Path] = (),
    *,
    dataset: str | None = None,
    model: str | None = None,
    batch: int | None = None,
    optimizer: str | None = None,
    target: float | None = None,
    by: Literal["cost", "accuracy", "robustness"] = "cost",
    as_json: bool = False,
) -> int:
    """Print the best learning-rate policy that studies measured.

    Args:
        folders: Folders of studies (runs/*).
        dataset: Start of the name of the recipe or study.
        model: As in the recipe: lenet5.
        batch: Global batch; the nearest if it was not measured.
        optimizer: As in the recipe: sgd.
        target: Accuracy, such as 0.90.
        by: Criterion: cost, accuracy or robustness.
        as_json: Print all of it as JSON.
    """
    if by == "cost" and target is None:
        raise LargebatchError(
            "--by cost is the cost to a top-1 accuracy: give --target, such as 0.90, or --by "
            "accuracy or robustness"
        )
    from largebatch.lab.studies import recommend as rankings

    groups = rankings.choose(
        rankings.read_groups(folders),
        dataset=dataset,
        model=model,
        optimizer=optimizer,
        batch=batch,
    )
    answers = [
        (group, rankings.rank(group.cells, by=by, target=target, batch=batch)) for group in groups
    ]
    if as_json:
        print(json.dumps([rankings.as_json(*answer) for answer in answers], indent=2))
        return 0
    for group, answer in answers:
        print(wrapped(group.described))
        for sentence in rankings.sentences(answer):
            print(wrapped(sentence))
        print(printable(rankings.ranking_table(answer).text()))
        if answer.first is not None:
            print(printable(rankings.schedule_yaml(answer.first.results)), end="")
    return 0


def add_commands(command: Command) -> None:
    """Add the commands `study`, `recommend` and `sweep`."""
    added = command("study", lambda args: study(**_options(args)), "carry out a study")
    added.add_argument("file", type=Path, metavar="STUDY", help="a YAML file, or an installed one")
    added.add_argument("--out", type=out_folder, metavar="DIR", help="records (runs/<name>)")
    added.add_argument("--jobs", type=count, default=1, metavar="N", help="runs at a time")
    added.add_argument(
        "--data", action="append", default=[], metavar="[RECIPE=]DIR", help="DIR/{train,val}"
    )
    added.add_argument("--dataset", metavar="M:F", help="instead: what function F of M returns")
    add_imports(added)
    add_backend(added)
    added.add_argument("--timeout", type=seconds, default=TIMEOUT_SECONDS, metavar="TIME",
                       help="how long to wait for a worker that does nothing (5m)")  # fmt: skip
    added.add_argument("--dry-run", action="store_true", help="print the runs that are left")
    added.add_argument("--page", action="store_true", help="start nothing, draw what is recorded")
    text = "print the best policy that studies measured"
    found = command("recommend", lambda args: recommend(**_options(args)), text)
    found.add_argument("folders", type=Path, nargs="*", metavar="DIR", help="folders of studies")
    found.add_argument("--dataset", metavar="NAME", help="start of the name of recipe or study")
    found.add_argument("--model", metavar="NAME", help="as in the recipe: lenet5")
    found.add_argument("--batch", type=count, metavar="B", help="global batch")
    found.add_argument("--optimizer", metavar="KIND", help="as in the recipe: sgd")
    found.add_argument("--target", type=accuracy, metavar="TOP1", help="accuracy, such as 0.90")
    found.add_argument("--by", choices=BY, default=BY[0], help=f"what decides ({BY[0]})")
    found.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
    sweep.add_commands(command)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name != "call"}
