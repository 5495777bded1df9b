"""The `data` commands: index, pack, import and show data sets. It prints, as main.py does."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.cli.arguments import add_command, add_set, count
from largebatch.errors import DataError, printable
from largebatch.recipe.loading import load_recipe
from largebatch.runs.interrupts import answering

if TYPE_CHECKING:
    from largebatch.data.index.file import Content
    from largebatch.storage import Progress

SPLITS = ("train", "val")
TERMINATED = 128 + signal.SIGTERM
"""The exit code of a command that a SIGTERM ended."""

NAMES = ("fashion-mnist", "cifar10", "imagefolder")
"""What can be imported; known here, so that the parser needs no NumPy."""


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands below `data`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = partial(add_command, commands)

    index = command("index", _index, "verify the header of every image of DIR/{train,val}")
    index.add_argument("folder", type=Path, metavar="DIR")
    index.add_argument("--drop-bad", action="store_true", help="leave out what cannot be used")

    verified = command("verify", _verify, "read every image of DIR and compare it with a checksum")
    verified.add_argument("folder", type=Path, metavar="DIR")
    verified.add_argument("--write", action="store_true", help="note the checksums first")

    pack = command("pack", _pack, "copy the images of DIR into WebDataset tar shards")
    pack.add_argument("folder", type=Path, metavar="DIR")
    _add_output(pack)

    imported = command("import", _import, "turn an archive on disk into shards")
    imported.add_argument("name", choices=NAMES)
    imported.add_argument("source", type=Path, help="the archive, or the folder it lies in")
    _add_output(imported)

    shown = command("show", _show, "draw what the model sees: training, clean and evaluation")
    shown.add_argument("recipe", type=Path)
    shown.add_argument("--data", type=Path, metavar="DIR", help="what `train --data` is given")
    shown.add_argument("--out", type=Path, metavar="PNG", help="<recipe name>-sheet.png")
    add_set(shown)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    parser.add_argument(
        "--shard-mb", type=count, default=256, metavar="N", help="longest shard, 10^6 bytes"
    )


def _index(args: argparse.Namespace) -> int:
    _show_index(args.folder, drop_bad=args.drop_bad)
    return 0


def _show_index(folder: Path, *, drop_bad: bool = False) -> None:
    """Make the indexes of a folder unless they are there, check them and print what they hold."""
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
        raise DataError(
            f"{folder}: {bad} images, listed above, cannot be used; replace or remove them, or "
            f"leave them out with: largebatch data index {folder} --drop-bad"
        )
    train, val = (index_of(content, folder) for content in contents)
    check_same_classes(train, val)
    left_out = len(train.bad) + len(val.bad)
    print(
        f"{printable(str(folder))}: {len(train.classes)} classes, {len(train)} training and "
        f"{len(val)} validation images, "
        f"{f'{left_out} bad ones left out' if left_out else 'all readable'}"
    )


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
    split, bad = content.header["split"], content.bad
    where = content.file or "kept nowhere: neither the folder nor the user's cache can be written"
    lines = [f"{split}: {len(content.arrays['labels'])} images ({where})"]
    if bad:
        lines.append(f"{split}: {len(bad)} left out:")
        lines += [f"  {path}: {reason}" for path, reason, *_ in bad]
    return "\n".join(lines)


def _pack(args: argparse.Namespace) -> int:
    from largebatch.data.datasets.packing import pack_folder

    with _progress("packing") as progress:
        pack_folder(args.folder, args.out, shard_bytes=args.shard_mb * 10**6, progress=progress)
    _show_index(args.out)
    return 0


def _import(args: argparse.Namespace) -> int:
    from largebatch.data.datasets import import_data

    with _progress("importing") as progress:
        import_data(
            args.name,
            args.source,
            args.out,
            shard_bytes=args.shard_mb * 10**6,
            progress=progress,
        )
    _show_index(args.out)
    return 0


def _show(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe, args.set)
    path = args.out or Path(f"{recipe.name}-sheet.png")
    from largebatch.report.contact_sheet import write_sheet

    write_sheet(path, recipe, folder=args.data)
    print(printable(f"sheet: {path}"))
    return 0


@contextmanager
def _progress(text: str) -> Iterator["Progress"]:
    """Show a bar on the terminal, and nothing where there is none.

    A SIGTERM meanwhile becomes an exception, so that what is half done is removed.
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
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        answering(lambda *_: sys.exit(TERMINATED), signal.SIGTERM),
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
