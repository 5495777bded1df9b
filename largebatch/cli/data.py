"""The commands `data` (index, verify, pack, import and show data sets) and `init`. They print."""

import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from largebatch.cli.recipe import write_recipe
from largebatch.errors import DataError, LargebatchError, printable
from largebatch.formatting import aligned, plural
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.writing import recipe_name
from largebatch.runs.interrupts import answering
from largebatch.runs.options import Count, Folder, Overrides, RecipeFile
from largebatch.storage import Progress

if TYPE_CHECKING:
    from largebatch.data.index.index import Content, Index

SPLITS = ("train", "val")
TERMINATED = 128 + signal.SIGTERM
"""Exit code of a command that was stopped by SIGTERM."""

Format = Literal["fashion-mnist", "cifar10", "cifar100", "mnist", "imagefolder", "parquet"]
"""Formats that can be imported."""

_SHOWN = 20  # classes that are printed one by one
_UNEVEN = 4  # ratio of images between two classes from which the classes are called uneven
_VALIDATIONS = ("test", "validation", "valid", "dev", "eval")
"""Other common names of the validation folder."""

_OPTIONS: dict[str, dict[str, object]] = {
    "imagefolder": {"val_name": "val", "val_fraction": None, "seed": 0, "drop_bad": False},
    "parquet": {"val_name": None, "val_fraction": None, "seed": 0, "label": None,
                "drop_bad": False},
}  # fmt: skip
"""Options that only some formats have, and their defaults."""

app = App(name="data", help="Prepare and look at data sets.")


@app.command
def index(folder: Path, /, *, drop_bad: bool = False) -> None:
    """Verify the header of every image of DIR/{train,val}.

    Args:
        folder: The data set.
        drop_bad: Leave out images that cannot be used.
    """
    show_index(folder, drop_bad=drop_bad)


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
    from largebatch.data.index.folder import number_of

    bad = sum(len(index.bad) for index in indexes)
    ignored = sum(number_of(index.ignored) for index in indexes)
    parts = [f"{bad} bad ones left out"] if bad else []
    parts += [f"{ignored} other files ignored"] if ignored else []
    return ", ".join(parts) or "all readable"


@app.command
def verify(folder: Path, /, *, write: bool = False) -> None:
    """Read every image of a data set and compare it with a checksum.

    Args:
        folder: The data set.
        write: Write the checksums.
    """
    from largebatch.data.index.index import index_of, open_content
    from largebatch.data.index.verify import differing, note

    wrong, total = 0, 0
    for split in SPLITS:
        index = index_of(open_content(folder, split, every_file=True), folder)
        with _progress(split) as progress:
            if write:
                where = note(index, split, progress=progress)
                print(printable(f"{split}: the checksums of {len(index)} images ({where})"))
                continue
            lines = differing(index, split, progress=progress)
        print(printable("\n".join([*lines, f"{split}: {len(lines)} of {len(index)} differ"])))
        wrong, total = wrong + len(lines), total + len(index)
    if wrong:
        raise DataError(
            f"{folder}: {wrong} of {total} images, listed above, are not what they were when "
            "their checksums were noted; restore them"
        )


def _describe(content: "Content") -> str:
    from largebatch.data.index.folder import describe

    split, bad = content.header["split"], content.bad
    where = content.file or "kept nowhere: neither the folder nor the user's cache can be written"
    lines = [f"{split}: {len(content.arrays['labels'])} images ({where})"]
    if bad:
        lines.append(f"{split}: {len(bad)} left out:")
        lines += [f"  {path}: {reason}" for path, reason, *_ in bad]
    return "\n".join([*lines, *describe(content.ignored, where=split)])


@app.command
def pack(folder: Path, /, *, out: Folder, shard_mb: Count = 256) -> None:
    """Copy images of a data set, or its shards, into WebDataset tar shards.

    Args:
        folder: The data set.
        out: New folder.
        shard_mb: Longest shard, in 10^6 bytes.
    """
    from largebatch.data.datasets.packing import pack_folder

    with _progress("packing") as progress:
        pack_folder(folder, out, shard_bytes=shard_mb * 10**6, progress=progress)
    _check_written(out)


def _check_written(out: Path) -> None:
    """Print that the shards are complete, then check their images, which takes longer."""
    check = f"largebatch data index {out}"
    line = f"{out}: written; its images are checked now, or later with: {check}"
    print(printable(line), flush=True)
    show_index(out)


def _fraction(_: object, value: float | None) -> None:
    if value is not None and not 0 < value < 1:
        raise ValueError(f"expected a part between 0 and 1, got {value:g}")


@app.command(name="import")
def import_(  # noqa: PLR0913 -- its options
    name: Format,
    source: Path,
    /,
    *,
    out: Folder,
    shard_mb: Count = 256,
    val_name: str | None = None,
    val_fraction: Annotated[float | None, Parameter(validator=_fraction)] = None,
    seed: int | None = None,
    label: str | None = None,
    drop_bad: bool = False,
) -> None:
    """Turn an archive on disk into shards.

    SOURCE of imagefolder: class folders in a folder, a zip or a tar; ImageNet's tars.
    Of parquet: a folder of Parquet files, as the Hugging Face hub lays them out.
    Of cifar10 and cifar100: cifar-10-python.tar.gz or cifar-100-python.tar.gz, or its folder.
    Of mnist and fashion-mnist: the folder of the four official .gz files.

    Args:
        name: Format of SOURCE.
        source: File or folder.
        out: New folder.
        shard_mb: Longest shard, in 10^6 bytes.
        val_name: Split that validates, of imagefolder (val) and parquet.
        val_fraction: Part of every class that validates, of imagefolder and parquet.
        seed: Seed of that part (0).
        label: Column of parquet's labels, if there are several.
        drop_bad: Leave out images of imagefolder and parquet that cannot be used.
    """
    given: dict[str, object] = {
        "val_name": val_name,
        "val_fraction": val_fraction,
        "seed": seed,
        "label": label,
        "drop_bad": drop_bad or None,
    }
    options = {key: value for key, value in given.items() if value is not None}
    for key in options.keys() - _OPTIONS.get(name, {}).keys():
        raise DataError(f"--{key.replace('_', '-')} is not an option of {name}")
    options = _OPTIONS.get(name, {}) | options
    from largebatch.data.datasets import import_data

    with _progress("importing") as progress:
        remarks = import_data(
            name,
            source,
            out,
            shard_bytes=shard_mb * 10**6,
            progress=progress,
            drop_bad=bool(options.pop("drop_bad", False)),
            options=options,
        )
    for remark in remarks:
        print(printable(remark))
    _check_written(out)


@app.command
def show(
    recipe: RecipeFile,
    /,
    *,
    data: Path | None = None,
    out: Path | None = None,
    overrides: Overrides = (),
) -> None:
    """Draw the images of training, clean training and evaluation as the model gets them.

    Args:
        data: The folder that `train --data` is given.
        out: PNG to write (<recipe name>-sheet.png).
    """
    loaded = load_recipe(recipe, overrides)
    path = out or Path(f"{loaded.name}-sheet.png")
    from largebatch.report.contact_sheet import write_sheet

    with _progress("reading") as progress:
        write_sheet(path, loaded, folder=data, progress=progress)
    print(printable(f"sheet: {path}"))


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


def init(folder: Path, /, *, out: Path | None = None) -> None:
    """Write a recipe for a folder of images.

    Args:
        folder: DIR/{train,val}/<class>/* or *.tar.
        out: Recipe to write (<folder>.yaml).
    """
    _require_splits(folder)
    from largebatch.lab.measure.initial import draft, survey

    name = recipe_name(folder.resolve().name, otherwise="own-data")
    out = out or Path(f"{name}.yaml")
    if out.exists():
        raise LargebatchError(f"{out}: exists already; choose another file with --out")
    train, val = show_index(folder)
    _show_classes(train, val)
    found = survey(train, val)
    text = draft(found, name=name)
    write_recipe(out, text)
    print("every assumption is a comment of the recipe")
    where = f"{shlex.quote(str(out))} --data {shlex.quote(str(folder))}"
    print(printable(f"recipe: {out}\nlook at it: largebatch data show {where}"))
    print(printable(f"train it: largebatch train {where} --out {shlex.quote(f'runs/{name}')}"))


def _require_splits(folder: Path) -> None:
    """Raise DataError if there is no validation split, with the command that makes one."""
    if (folder / "val").is_dir() or not folder.is_dir():
        return
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    other = next((name for name in _VALIDATIONS if name in names and "train" in names), None)
    choice = f"--val-name {other}" if other else "--val-fraction 0.1"
    if not names:
        raise DataError(f"{folder}: there are no folders in it; expected one for each class")
    out = shlex.quote(f"{folder.resolve().name}-shards")
    raise DataError(
        f"{folder}: there are no validation images in it (expected val); make a copy that has "
        f"some with: largebatch data import imagefolder {shlex.quote(str(folder))} {choice} "
        f"--out {out} && largebatch init {out}"
    )


def _show_classes(train: "Index", val: "Index") -> None:
    import numpy as np

    number = len(train.classes)
    counts = [np.bincount(index.labels, minlength=number).tolist() for index in (train, val)]
    rows = list(zip(train.classes, *counts, strict=True))
    table = aligned([(f"  {name}", f"{t:,} + {v:,}") for name, t, v in rows[:_SHOWN]])
    print(printable(table))
    if number > _SHOWN:
        print(f"  ... and {number - _SHOWN} more classes")
    few, many = min(rows, key=lambda row: row[1]), max(rows, key=lambda row: row[1])
    if many[1] >= _UNEVEN * few[1]:
        print(
            printable(
                f"the classes are uneven: {few[0]} has {few[1]:,} training images, {many[0]} "
                f"{many[1]:,}; top-1 counts images, so it is mostly that of large classes"
            )
        )
