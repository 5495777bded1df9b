"""The commands `data` (index, import and show data sets) and `init`. They print."""

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number as Between

from largebatch.address import Place
from largebatch.cli.recipe import write_recipe
from largebatch.errors import CheckpointError, DataError, LargebatchError, printable
from largebatch.formatting import plural
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.writing import recipe_name
from largebatch.runs.interrupts import answering
from largebatch.runs.options import Count, DataPlace, Number, Overrides, RecipeFile
from largebatch.storage import ReadProgress

if TYPE_CHECKING:
    from largebatch.data.index.index import Index
    from largebatch.runs.pretrained import StartingModel

SPLITS = ("train", "val")
GENERIC = {"data", "dataset", "images", "train"}  # names that do not describe images

NO_WEIGHTS = "none"  # as --weights: begin with random ones

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a command that was stopped by SIGTERM."""

Format = Literal[
    "fashion-mnist", "cifar10", "cifar100", "mnist", "imagefolder", "parquet", "webdataset"
]
"""Formats that can be imported."""

_OPTIONS = {"imagefolder": {"val_name", "val_fraction"}, "parquet": {"val_name"}}
"""Options that only some formats have."""

app = App(name="data", help="Prepare and look at data sets.")


@app.command
def index(folder: DataPlace, /, *, drop_bad: bool = False) -> None:
    """Verify the header of every image of DIR/{train,val}.

    Args:
        folder: The data set, or its address.
        drop_bad: Leave out images that cannot be used.
    """
    from largebatch.data.index.index import BadImagesError, make

    num_bad = 0
    for split in SPLITS:
        try:
            with _progress(split) as progress:
                content = make(folder, split, drop_bad=drop_bad, progress=progress)
        except BadImagesError as error:
            print(printable("\n".join(f"{path}: {reason}" for path, reason in error.bad)))
            num_bad += len(error.bad)
            continue
        where = content.file or "not stored: neither the folder nor the user's cache is writable"
        lines = [f"{split}: {plural(len(content.arrays['labels']), 'image')} ({where})"]
        lines += [f"{split}: left out: {path}: {reason}" for path, reason in content.bad]
        print(printable("\n".join(lines)))
    if num_bad:
        raise DataError(
            f"{folder}: {plural(num_bad, 'image')}, listed above, cannot be used; replace or "
            f"remove, or leave out with: largebatch data index {folder} --drop-bad"
        )
    open_indexes(folder)


def open_indexes(folder: Place) -> "tuple[Index, Index]":
    """Return the indexes of a folder, built if there are none; print what they hold, and copies.

    Raises DataError if the splits have other classes, or a class has no image.
    """
    from largebatch.data.datasets.copies import copies_in_folder
    from largebatch.data.index.folder import describe
    from largebatch.data.index.index import check_classes, load_or_read

    train, val = (load_or_read(folder, split) for split in SPLITS)
    local = folder if isinstance(folder, Path) else None
    for split, index in zip(SPLITS, (train, val), strict=True):
        if ignored := describe(index.ignored, where=split, folder=local and local / split):
            print(printable(ignored))
    # After both splits are indexed: a difference of classes often comes from ignored files, which
    # are listed before.
    check_classes(train.root, train.classes, val.classes)
    bad = len(train.bad) + len(val.bad)
    print(
        f"{printable(str(folder))}: {len(train.classes)} classes, {len(train)} training and "
        f"{len(val)} validation images{f', {bad} bad ones left out' * bool(bad)}"
    )
    for line in copies_in_folder(train, val):
        print(printable(line), flush=True)
    return train, val


@app.command(name="import")
def import_(  # noqa: PLR0913 -- its options
    name: Format,
    source: DataPlace,
    /,
    *,
    out: DataPlace,
    shard_mb: Count = 256,
    val_name: str | None = None,
    val_fraction: Annotated[float | None, Parameter(validator=Between(gt=0, lt=1))] = None,
    seed: Annotated[int | None, Parameter(validator=Between(gte=0, lt=2**63))] = None,
    keep_order: bool = False,
    drop_bad: bool = False,
) -> None:
    """Turn an archive on disk into shards, whose training images are shuffled.

    SOURCE of imagefolder: class folders in a folder, a zip or a tar; ImageNet's tars.
    Of parquet: a folder of Parquet files, as the Hugging Face hub lays them out.
    Of cifar10 and cifar100: cifar-10-python.tar.gz or cifar-100-python.tar.gz, or its folder.
    Of mnist and fashion-mnist: the folder of the four official .gz files.
    Of webdataset: a data set of shards, to make them longer or shorter.

    Args:
        name: Format of SOURCE.
        source: File or folder; of webdataset also an address.
        out: New folder, or address such as s3://bucket/birds.
        shard_mb: Longest shard, in 10^6 bytes.
        val_name: Split that validates, of imagefolder (val) and parquet.
        val_fraction: Part of every class that validates, of imagefolder.
        seed: Seed of the order of training images, and of that part (0).
        keep_order: Keep the order of SOURCE, often by class, which data.order is not for.
        drop_bad: Leave out images that cannot be used.
    """
    if seed is not None and keep_order and val_fraction is None:
        raise DataError("--seed draws the order: leave out --seed or --keep-order")
    possible = {"val_name": val_name, "val_fraction": val_fraction}
    options = {key: value for key, value in possible.items() if value is not None}
    for key in sorted(options.keys() - _OPTIONS.get(name, set())):
        raise DataError(f"--{key.replace('_', '-')} is not an option of {name}")
    if val_fraction is not None:
        options["seed"] = seed or 0
    from largebatch.data.datasets import import_data

    size = shard_mb * 10**6
    with _progress("importing") as bar:
        remarks = import_data(
            name,
            source,
            out,
            shard_bytes=size,
            progress=bar,
            drop_bad=drop_bad,
            seed=None if keep_order else seed or 0,
            options=options,
        )
    check = f"largebatch data index {out}"
    for line in (*remarks, f"{out}: written; its images are checked now, or later with: {check}"):
        print(printable(line), flush=True)
    index(out)
    label = _resolved(source).name.partition(".")[0]
    words = ["--name", label] if out.name in GENERIC and label not in GENERIC else []
    print(printable(f"next: {shlex.join(['largebatch', 'init', str(out), *words])}"))


@app.command
def show(
    recipe: RecipeFile,
    /,
    *,
    data: DataPlace | None = None,
    out: Path | None = None,
    overrides: Overrides = (),
) -> None:
    """Draw the images of training, clean training and evaluation as the model gets them.

    Below an augmented image are the shares of its label, and the operations on its pixels.

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
def _progress(text: str) -> Iterator[ReadProgress]:
    """Show a progress bar on a terminal.

    SIGTERM raises SystemExit meanwhile, so that unfinished output is removed.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with (
        answering(lambda *_: sys.exit(TERMINATED), signal.SIGTERM),
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def init(  # noqa: PLR0913 -- its options
    folder: DataPlace,
    /,
    *,
    out: Path | None = None,
    name: str | None = None,
    weights: str | None = None,
    model: str | None = None,
    image_size: Annotated[int | None, Parameter(validator=Between(gte=8, lte=4096))] = None,
    minutes: Number | None = None,
) -> None:
    """Write a recipe for a folder of images.

    Photographs of which a class has few begin with weights of ImageNet, if they can be had.

    Args:
        folder: DIR/{train,val}/<class>/* or *.tar, or an address of shards.
        out: Recipe to write (<name>.yaml).
        name: Name of the recipe and its runs (that of --out, else of the folder, or above "data").
        weights: Weights to begin with: timm:NAME, a file (then with --model), a run, or none.
        model: Network of largebatch or timm, or torchvision/NAME.
        image_size: Side of the images that the network gets, in pixels.
        minutes: Choose image size and epochs for a run of this time on this machine, measured.
    """
    from largebatch.lab.measure.initial import draft, fitted, remarks, survey

    home = Path.home()
    start_folder = _resolved(folder)
    # Named after the nearest folder that says something: of /data/flowers/images it is flowers.
    names = (
        above.name
        for above in (start_folder, *start_folder.parents)
        if not home.is_relative_to(above) and above.name not in GENERIC
    )
    name = recipe_name(name or (out.stem if out else next(names, "")), otherwise="own-data")
    out = out or Path(f"{name}.yaml")
    if out.exists():
        raise LargebatchError(f"{out}: exists already; choose another file with --out")
    train, val = open_indexes(folder)
    start = _start(train, weights, model)
    pretrained = start is not None and start.model.weights is not None
    for remark in remarks(train, val, pretrained=pretrained):
        print(printable(remark))
    epochs = None
    statistics = survey(train, val, start, image_size=image_size)
    if minutes is not None:
        statistics, epochs, text = fitted(statistics, minutes=minutes, fixed=image_size is not None)
        print(text)
    write_recipe(out, draft(statistics, name=name, epochs=epochs))
    print("every assumption is a comment of the recipe")
    where = f"{shlex.quote(str(out))} --data {shlex.quote(str(folder))}"
    print(printable(f"recipe: {out}\nlook at it: largebatch data show {where}"))
    print(printable(f"train it: largebatch train {where} --out {shlex.quote(f'runs/{name}')}"))


def _resolved(place: Place) -> PurePath:
    """Return the path without links of a folder, or the path of an address from its bucket on."""
    if isinstance(place, Path):
        return place.resolve()
    return PurePosixPath("/", place.url.partition("://")[2])


def _start(train: "Index", weights: str | None, model: str | None) -> "StartingModel | None":
    """Return the model that was asked for, or weights for few photographs if they can be had.

    None: random weights of the network that suits the images.
    """
    from largebatch.lab.measure.initial import WEIGHTS, needs_weights
    from largebatch.runs.pretrained import download_of, start_with

    chosen = None if weights == NO_WEIGHTS else weights
    lines = []
    if weights is None and model is None and needs_weights(train):
        chosen = WEIGHTS
        lines.append(f"few photographs in a class: begin with {WEIGHTS} (or: --weights none)")
    if chosen is None and model is None:
        return None
    if chosen is not None and (download := download_of(chosen)):
        lines.append(download)
    if lines:
        print("; ".join(lines), flush=True)
    try:
        return start_with(chosen, model, classes=len(train.classes))
    except CheckpointError as error:
        if weights is not None:
            raise
        print(printable(f"without them: {error}"))
        return None
