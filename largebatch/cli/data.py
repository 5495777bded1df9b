"""The `data` commands: index, verify, pack, import and show data sets. They print."""

import argparse
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.cli.arguments import add_command, add_recipe, count, number, out_folder
from largebatch.errors import DataError, printable
from largebatch.formatting import plural
from largebatch.recipe.loading import load_recipe
from largebatch.runs.interrupts import answering
from largebatch.storage import Progress

if TYPE_CHECKING:
    from largebatch.data.index.file import Content
    from largebatch.data.index.index import Index

fraction = partial(number, expected="a part between 0 and 1", most=math.nextafter(1, 0))

SPLITS = ("train", "val")
TERMINATED = 128 + signal.SIGTERM
"""Exit code of a command that was stopped by SIGTERM."""

NAMES = {
    "fashion-mnist": "its four official .gz files, in the folder SOURCE",
    "cifar10": "cifar-10-python.tar.gz, which SOURCE is or holds",
    "mnist": "its four files, packed with gzip or not, in the folder SOURCE",
    "idx": "four files in the layout of MNIST, packed with gzip or not, in the folder SOURCE",
    "imagefolder": "class folders in a folder, a zip or a tar; ImageNet's tars",
    "parquet": "Parquet files as the Hugging Face hub lays them out, in the folder SOURCE",
}
"""Formats that can be imported; listed here so that the parser needs no NumPy."""

OPENING = ("classes", "val_name", "val_fraction", "seed", "label")
"""Options that only some formats have."""


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands below `data`."""
    commands = parser.add_subparsers(metavar="COMMAND")
    command = partial(add_command, commands)

    index = command("index", _index, "verify the header of every image of DIR/{train,val}")
    index.add_argument("folder", type=Path, metavar="DIR")
    index.add_argument("--drop-bad", action="store_true", help="leave out what cannot be used")

    verified = command("verify", _verify, "read every image of DIR and compare it with a checksum")
    verified.add_argument("folder", type=Path, metavar="DIR")
    verified.add_argument("--write", action="store_true", help="write the checksums")

    pack = command("pack", _pack, "copy images of DIR, or its shards, into WebDataset tar shards")
    pack.add_argument("folder", type=Path, metavar="DIR")
    _add_output(pack)

    _add_imports(commands)

    shown = command("show", _show, "draw what the model sees: training, clean and evaluation")
    add_recipe(shown)
    shown.add_argument("--data", type=Path, metavar="DIR", help="what `train --data` is given")
    shown.add_argument("--out", type=Path, metavar="PNG", help="<recipe name>-sheet.png")


def _add_imports(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    imported = commands.add_parser("import", help="turn an archive on disk into shards")
    names = imported.add_subparsers(metavar="NAME", dest="name")
    parsers = {name: add_command(names, name, _import, text) for name, text in NAMES.items()}
    for parser in parsers.values():
        parser.add_argument("source", type=Path, metavar="SOURCE")
        parser.set_defaults(drop_bad=False)  # where there is no such option
        _add_output(parser)
    parsers["idx"].add_argument(
        "--classes", type=_names, metavar="A,B,...", help="names of the labels 0, 1, ... (0,1,...)"
    )
    parsers["parquet"].add_argument("--val-name", metavar="NAME", help="split that validates")
    parsers["parquet"].add_argument("--label", metavar="COLUMN", help="if there are several")
    parsers["imagefolder"].add_argument(
        "--val-name", default="val", metavar="NAME", help="split that validates"
    )
    for parser in (parsers["imagefolder"], parsers["parquet"]):
        parser.add_argument("--drop-bad", action="store_true", help="leave out what cannot be used")
        parser.add_argument(
            "--val-fraction", type=fraction, metavar="F", help="part of every class that validates"
        )
        parser.add_argument(
            "--seed", type=int, default=0, metavar="N", help="seed of that part (0)"
        )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if len(set(names)) < len(names) or "" in names:
        raise argparse.ArgumentTypeError(f"expected different names, such as a,b,c, got {text!r}")
    return names


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="new folder")
    parser.add_argument(
        "--shard-mb", type=count, default=256, metavar="N", help="longest shard, 10^6 bytes"
    )


def _index(args: argparse.Namespace) -> int:
    show_index(args.folder, drop_bad=args.drop_bad)
    return 0


def show_index(folder: Path, *, drop_bad: bool = False) -> "tuple[Index, Index]":
    """Build or refresh the indexes of a folder, check them and print what they hold."""
    from largebatch.data.index.index import BadImagesError, check_same_classes, index_of, refresh

    contents, bad = [], 0
    for split in SPLITS:
        try:
            with _progress(split) as progress:
                content = refresh(folder, split, drop_bad=drop_bad, progress=progress)
        except BadImagesError as error:
            print(printable("\n".join(f"{path}: {reason}" for path, reason, *_ in error.bad)))
            bad += len(error.bad)
        else:
            print(printable(_describe(content)))
            contents.append(content)
    if bad:
        them = "it" if bad == 1 else "them"
        raise DataError(
            f"{folder}: {plural(bad, 'image')}, listed above, cannot be used; replace or remove "
            f"{them}, or leave {them} out with: largebatch data index {folder} --drop-bad"
        )
    train, val = (index_of(content, folder) for content in contents)
    check_same_classes(train.root, train.classes, val.classes)
    print(
        f"{printable(str(folder))}: {len(train.classes)} classes, {len(train)} training and "
        f"{len(val)} validation images, {_left_out(train, val)}"
    )
    return train, val


def _left_out(*indexes: "Index") -> str:
    from largebatch.data.index.ignored import number_of

    bad = sum(len(index.bad) for index in indexes)
    ignored = sum(number_of(index.ignored) for index in indexes)
    parts = [f"{bad} bad ones left out"] if bad else []
    parts += [f"{ignored} other files ignored"] if ignored else []
    return ", ".join(parts) or "all readable"


def _verify(args: argparse.Namespace) -> int:
    from largebatch.data.index.index import index_of, open_content
    from largebatch.data.index.verify import differing, note

    wrong, total = 0, 0
    for split in SPLITS:
        index = index_of(open_content(args.folder, split, every_file=True), args.folder)
        with _progress(split) as progress:
            if args.write:
                where = note(index, split, progress=progress)
                print(printable(f"{split}: the checksums of {len(index)} images ({where})"))
                continue
            lines = differing(index, split, progress=progress)
        print(printable("\n".join([*lines, f"{split}: {len(lines)} of {len(index)} differ"])))
        wrong, total = wrong + len(lines), total + len(index)
    if wrong:
        raise DataError(
            f"{args.folder}: {wrong} of {total} images, listed above, are not what they were when "
            "their checksums were noted; restore them"
        )
    return 0


def _describe(content: "Content") -> str:
    from largebatch.data.index.ignored import describe

    split, bad = content.header["split"], content.bad
    where = content.file or "kept nowhere: neither the folder nor the user's cache can be written"
    lines = [f"{split}: {len(content.arrays['labels'])} images ({where})"]
    if bad:
        lines.append(f"{split}: {len(bad)} left out:")
        lines += [f"  {path}: {reason}" for path, reason, *_ in bad]
    return "\n".join([*lines, *describe(content.ignored, where=split)])


def _pack(args: argparse.Namespace) -> int:
    from largebatch.data.datasets.packing import pack_folder

    with _progress("packing") as progress:
        pack_folder(args.folder, args.out, shard_bytes=args.shard_mb * 10**6, progress=progress)
    _check_written(args.out)
    return 0


def _check_written(out: Path) -> None:
    """Print that the shards are complete, then check their images, which takes longer."""
    check = f"largebatch data index {out}"
    line = f"{out}: written; its images are checked now, or later with: {check}"
    print(printable(line), flush=True)
    show_index(out)


def _import(args: argparse.Namespace) -> int:
    from largebatch.data.datasets import import_data

    options = {name: value for name, value in vars(args).items() if name in OPENING}
    with _progress("importing") as progress:
        remarks = import_data(
            args.name,
            args.source,
            args.out,
            shard_bytes=args.shard_mb * 10**6,
            progress=progress,
            drop_bad=args.drop_bad,
            options=options,
        )
    for remark in remarks:
        print(printable(remark))
    _check_written(args.out)
    return 0


def _show(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe, args.set)
    path = args.out or Path(f"{recipe.name}-sheet.png")
    from largebatch.report.contact_sheet import write_sheet

    with _progress("reading") as progress:
        write_sheet(path, recipe, folder=args.data, progress=progress)
    print(printable(f"sheet: {path}"))
    return 0


@contextmanager
def _progress(text: str) -> Iterator[Progress]:
    """Show a progress bar, or a plain line every few seconds without a terminal.

    SIGTERM raises SystemExit meanwhile, so that unfinished output is removed.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    with answering(lambda *_: sys.exit(TERMINATED), signal.SIGTERM):
        if not console.is_terminal:
            yield _plain_lines(text)
            return
        columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(text, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _plain_lines(text: str) -> Progress:
    """Return a function that prints progress to standard error, at most every LINE_SECONDS."""
    from largebatch.tracking.console import LINE_SECONDS

    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print(f"{text}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    return show
